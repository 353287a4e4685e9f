"""Parameter counts, FLOPs and GPU memory of a run, estimated without running it."""
