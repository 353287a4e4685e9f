"""Computation of new attention tensors: fewer KV heads, fitted routers, and reordered or doubled heads."""
