"""Evaluation: scores, cost, speed and inspection of models."""
