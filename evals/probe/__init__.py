"""Losses of a model with some heads masked, and plots."""
