"""The best released fused kernel for Hopper, where it is installed: sgl-deep-gemm's, with FP8
weights."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
from typing import Any

import torch
import torch.distributed as dist

from deep_moe.formats.block_scaled import dequantize_e4m3_ue8m0
from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import Layer, Tokens

from .problem import fp8_weights

BLOCK = 128  # weights have a scale per 128 x 128, tokens per 128 values


def is_available() -> bool:
    """Whether the package is there, knows Hopper, and is new enough to be told how many tokens a
    call has at most, by which it chooses its schedule."""
    if importlib.util.find_spec("deep_gemm") is None:
        return False
    import deep_gemm

    call = getattr(deep_gemm, "fp8_mega_moe", None)
    return call is not None and "num_tokens_bound" in inspect.signature(call).parameters


def version() -> str | None:
    """Of the package; None where it is not there."""
    try:
        return importlib.metadata.version("sgl-deep-gemm") if is_available() else None
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


class PeerLayer:
    """One rank's part."""

    def __init__(self, shape: MoEShape, layer: Layer, group: dist.ProcessGroup | None) -> None:
        import deep_gemm

        self._library: Any = deep_gemm
        self.weights = deep_gemm.transform_weights_for_mega_moe_sm90(
            fp8_weights(shape.weights, layer.l1, BLOCK, BLOCK),
            fp8_weights(shape.weights, layer.l2, BLOCK, BLOCK),
        )
        self.num_tokens_bound = shape.num_max_tokens_per_rank
        self.buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(
            group,
            shape.num_experts,
            shape.num_max_tokens_per_rank,
            shape.num_topk,
            shape.hidden,
            shape.intermediate_hidden,
        )

    def fill(self, tokens: Tokens, num_tokens_bound: int) -> None:
        """Copy a rank's tokens into the buffer. num_tokens_bound: no rank has more."""
        n = tokens.num_tokens
        self.num_tokens_bound = num_tokens_bound
        blocks = dequantize_e4m3_ue8m0(tokens.x, tokens.x_sf).unflatten(1, (-1, BLOCK))
        scale = blocks.abs().amax(dim=2).clamp(min=2.0**-100) / 448
        values = (blocks / scale.unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn)
        self.buffer.x[:n].copy_(values)
        self.buffer.x_sf[:n].copy_(scale)
        self.buffer.topk_idx[:n].copy_(tokens.topk_idx)
        self.buffer.topk_weights[:n].copy_(tokens.topk_weights)

    def __call__(self, y: torch.Tensor, activation_clamp: float | None) -> torch.Tensor:
        self._library.fp8_mega_moe(
            y,
            *self.weights,
            self.buffer,
            activation_clamp=activation_clamp,
            fast_math=True,
            num_tokens_bound=self.num_tokens_bound,
        )
        return y
