"""Checkpoints in folders, on the Hub and in GGUF files, and the files of a model folder."""
