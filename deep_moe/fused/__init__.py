"""The fused layer: its call, its symmetric buffer, and what a call works out once."""
