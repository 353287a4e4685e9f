"""Reports on the attention heads of a model for texts or images."""
