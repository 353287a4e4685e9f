"""The training loop: trainer, objectives, losses, checkpoints and metrics."""
