"""The fused layer: its call, its symmetric buffer, and what calls keep between them."""
