"""Speed and memory, measured beside a baseline."""
