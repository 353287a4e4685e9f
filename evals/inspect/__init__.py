"""Reports on the attention heads of a model for a text."""
