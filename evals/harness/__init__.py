"""Scores by lm-evaluation-harness, and comparisons item by item."""
