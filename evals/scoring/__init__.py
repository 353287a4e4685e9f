"""Scores on a user's own data, for models that lm-evaluation-harness does not score."""
