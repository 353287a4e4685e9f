"""Writing a converted checkpoint: shards, and atomic output."""
