"""Biases of the two linear layers: there are none, or those of per_expert.py."""
