"""The mechanisms, configurations and model classes: the part of crosshead that travels with a published model.

This file does not travel with a published model: nothing may depend on it.
"""
