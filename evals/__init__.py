"""Evaluation: scores, cost, speed, inspection."""
