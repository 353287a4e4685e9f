"""Reading and writing of GGUF files."""
