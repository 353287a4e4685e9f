"""Speed and memory of mechanisms, measured against a baseline."""
