"""Attention for other libraries: PyTorch's own scaled_dot_product_attention."""
