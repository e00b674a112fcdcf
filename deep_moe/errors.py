"""Every error type that deep_moe raises beside ValueError and TypeError. What the emulator finds is
an EmulatorError, which is no DeepMoEError: emulator/errors.py."""

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


class RequantizationWarning(UserWarning):
    """Weights were rounded again, to scales that the kernel can apply, because the caller passed
    requantize=True.

    layer: name of the layer.
    scales: the scales that the weights have now, in words.
    share_moved: share of the layer's values that changed.
    relative_error: norm of all changes, divided by the norm of all values.
    largest_change: largest change of one value.
    """

    def __init__(
        self,
        layer: str,
        scales: str,
        *,
        share_moved: float,
        relative_error: float,
        largest_change: float,
    ) -> None:
        super().__init__(
            f"{layer}: rounded anew, to {scales} values: "
            f"{share_moved:.1%} of the values moved, all together by {relative_error:.2%} of their "
            f"size, the furthest by {largest_change:.3g}"
        )
        self.layer = layer
        self.scales = scales
        self.share_moved = share_moved
        self.relative_error = relative_error
        self.largest_change = largest_change


class MegaMoEError(DeepMoEError):
    """The kernel stopped early and said why. The buffer needs `reset()` on every rank."""


class MegaMoETimeoutError(MegaMoEError):
    """A wait in the kernel exceeded `timeout_s`, for example for a rank that never arrived."""


class LostDomainError(DeepMoEError):
    """A transport between NVLink domains failed or did not end. The text names the domain that does
    not answer. The groups and the layer have to be made anew without it."""


class ForeignTokensError(DeepMoEError):
    """Other domains have more tokens for a rank than its layer has room for. Raised on all ranks of
    all domains, with the numbers; the layer can be used again."""
