"""Ranks as processes, as in the tests of the fused call."""

from ..fused.conftest import run_ranks

__all__ = ["run_ranks"]
