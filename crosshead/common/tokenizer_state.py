"""Arguments of loading that transformers (from 5.0 on) saves among a tokenizer's settings."""

LOADING = ("is_local", "local_files_only")
"""Saved, they would apply to everyone who loads the tokenizer."""
