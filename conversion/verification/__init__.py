"""Comparison of a converted model with its source."""
