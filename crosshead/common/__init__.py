"""Helpers shared by several packages of crosshead; this package imports none of those."""
