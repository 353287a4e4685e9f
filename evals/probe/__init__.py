"""The loss of a model with masked heads, and line plots."""
