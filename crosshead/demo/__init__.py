"""The demo: fetch a model, convert it, train it briefly, score it and inspect its heads, in one command."""
