"""What an adapter says of experts that the kernel cannot run."""


class UnsupportedError(Exception):
    """Why the kernel cannot run a layer's experts, in words that follow the layer's name."""
