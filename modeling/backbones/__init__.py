"""The backbones: one small file for each."""
