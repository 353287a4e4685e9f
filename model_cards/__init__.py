"""Model cards made from measured results, one per published model."""
