"""How much a model needs each of its heads."""
