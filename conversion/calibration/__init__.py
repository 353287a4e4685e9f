"""Running the source on text, and what is recorded of its heads."""
