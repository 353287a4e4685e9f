"""Parameters, FLOPs and cache sizes of models."""
