"""Parameters, arithmetic and cache sizes of models."""
