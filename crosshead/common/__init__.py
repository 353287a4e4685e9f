"""Helpers that several folders of crosshead share; it imports none of them."""
