"""Activation statistics of attention heads, recorded while the source runs on text or images."""
