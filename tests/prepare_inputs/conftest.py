"""Where the kernel runs: in the emulator for each architecture, and on a GPU if there is one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import deep_moe
from deep_moe.formats.block_scaled import quantize_e4m3_ue8m0
from deep_moe.fused.buffer import SymmBuffer

VIEWS = ("x", "x_sf", "topk_idx", "topk_weights")
FILL = 0x5A  # of every byte of the buffer's views, before a test writes


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Of any tensor, on the CPU: equal exactly if all bits are."""
    return tensor.detach().cpu().contiguous().view(torch.uint8)


@dataclass(frozen=True)
class Target:
    """device: of the buffer. arch: what is asked for there; None is the GPU's own."""

    device: str
    arch: str | None

    def buffer(self, *, max_tokens: int = 16, num_topk: int = 2, hidden: int = 256) -> SymmBuffer:
        """A buffer for one rank whose views hold FILL in every byte."""
        buffer = deep_moe.get_symm_buffer_for_mega_moe(
            None, 64, max_tokens, num_topk, hidden, 128, device=self.device
        )
        for view in VIEWS:
            getattr(buffer, view).view(torch.uint8).fill_(FILL)
        return buffer

    def check(
        self,
        buffer: SymmBuffer,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> None:
        """Prepare the inputs, and compare every byte of the views with the reference casts."""
        inputs = [tensor.to(self.device) for tensor in (x, topk_idx, topk_weights)]
        deep_moe.prepare_inputs(*inputs, buffer, arch=self.arch)
        expected = (*quantize_e4m3_ue8m0(x), topk_idx.to(torch.int64), topk_weights.float())
        num_tokens = x.shape[0]
        for name, rows in zip(VIEWS, expected, strict=True):
            view = getattr(buffer, name)
            assert torch.equal(bits(view[:num_tokens]), bits(rows)), name
            assert bool((bits(view[num_tokens:]) == FILL).all()), f"{name} after the last token"


@pytest.fixture(
    params=[
        pytest.param(Target("cpu", "sm_100a"), id="emulated-sm_100a"),
        pytest.param(Target("cpu", "sm_90a"), id="emulated-sm_90a"),
        pytest.param(Target("cuda", None), id="gpu", marks=pytest.mark.gpu),
    ]
)
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


def routing(num_tokens: int, num_topk: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random expert ids, a quarter of them -1, and weights."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(0, 64, (num_tokens, num_topk), generator=generator)
    idx = idx.where(torch.rand(idx.shape, generator=generator) >= 0.25, -1)
    return idx, torch.rand(idx.shape, generator=generator)
