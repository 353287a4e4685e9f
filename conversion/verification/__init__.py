"""Comparing a converted model with its source."""
