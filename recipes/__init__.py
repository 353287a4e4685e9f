"""Training: the recipe schema, the data, the trainer, and the YAML recipes themselves."""
