"""Generates a model card from measured results, one for each published model."""
