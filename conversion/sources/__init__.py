"""Where checkpoints come from: folders, the Hub, and the files in them."""
