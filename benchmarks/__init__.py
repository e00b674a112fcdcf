"""Speed of the layer on GPUs; see mega_moe.py."""
