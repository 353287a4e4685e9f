"""The convertible model families, and the tensors that mechanisms add to them."""
