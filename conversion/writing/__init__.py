"""Writing of a converted checkpoint: shards, and atomic output."""
