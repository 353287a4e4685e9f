"""Training data: readers, tokenisation, caching, and the order of samples."""
