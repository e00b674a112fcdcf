"""SM100 and SM103: B200 and B300. One kernel, compiled for each by its own name."""

from .target import SM100A, SM103A, TARGETS

__all__ = ["SM100A", "SM103A", "TARGETS"]
