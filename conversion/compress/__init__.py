"""New attention tensors: fewer key and value heads, and reordered heads."""
