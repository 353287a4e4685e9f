"""New attention tensors: fewer key and value heads, reordered heads, folded mechanisms."""
