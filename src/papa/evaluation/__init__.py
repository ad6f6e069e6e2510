"""How networks are applied to batches, and scored."""
