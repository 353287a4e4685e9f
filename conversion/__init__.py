"""Conversion of stock transformers checkpoints to crosshead models, and back."""
