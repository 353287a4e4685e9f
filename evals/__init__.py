"""Scoring, cost, speed, and looking inside a model."""
