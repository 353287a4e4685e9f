"""Conversion of stock Llama and Qwen checkpoints to crosshead models, and back."""
