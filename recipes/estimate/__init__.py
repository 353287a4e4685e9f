"""The size, work and memory of a run, without running it."""
