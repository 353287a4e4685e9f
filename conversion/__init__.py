"""A checkpoint in, a checkpoint out: turning stock Llama and Qwen checkpoints into crosshead models and back."""
