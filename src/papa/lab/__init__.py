"""The lab: recipes, data sets, networks and reports that reproduce and extend the paper, built on the library."""
