"""The training run: trainer, checkpoints, losses and metrics."""
