"""SM90: H100 and H200."""

from .target import SM90A, TARGETS

__all__ = ["SM90A", "TARGETS"]
