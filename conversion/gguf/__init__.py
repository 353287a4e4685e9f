"""GGUF files as sources of checkpoints."""
