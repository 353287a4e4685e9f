"""Recipes: their sections, how they are read from YAML, and model configurations."""
