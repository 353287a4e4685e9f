"""Training: recipe schema, data, trainer, memory estimate, learning-rate sweep, and the YAML recipes."""
