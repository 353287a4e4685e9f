"""How a tokenizer was loaded, which transformers (from 5.0 on) writes among the settings that it saves."""

LOADING = ("is_local", "local_files_only")
"""Saved, they would hold for everyone who loads the tokenizer after that."""
