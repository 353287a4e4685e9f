"""Reports of what attention heads do on a text."""
