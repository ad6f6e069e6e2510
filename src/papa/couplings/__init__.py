"""Rules beyond the paper: on some columns, with rows of their own, or with weights that depend on the members."""
