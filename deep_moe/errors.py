"""Every error type that deep_moe raises beside ValueError and TypeError. The emulator's derive from
DeepMoEError too and are in emulator/errors.py."""

from __future__ import annotations


class DeepMoEError(RuntimeError):
    """Base of the errors below."""


class MissingPackageError(DeepMoEError):
    """A package or header folder that is needed is not installed; the text says how to get it."""


class CompileError(DeepMoEError):
    """NVRTC refused a kernel. The text holds the compiler's log and the kernel's config."""


class CacheError(DeepMoEError):
    """The kernel cache folder cannot be used."""


class CheckpointError(DeepMoEError):
    """A checkpoint lacks a tensor, or holds one of another shape or type. The text names it."""


class MegaMoEError(DeepMoEError):
    """The kernel stopped early and said why. The buffer needs `reset()` on every rank."""


class MegaMoETimeoutError(MegaMoEError):
    """A wait in the kernel exceeded `timeout_s`, for example for a rank that never arrived."""
