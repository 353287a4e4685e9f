"""Scores on a user's own data of models that lm-evaluation-harness does not score."""
