"""A buffer for BF16 weights takes tokens as they are."""

from __future__ import annotations

import torch

import deep_moe

from .conftest import FILL, Target, bits, routing


def test_every_bit_stays(target: Target) -> None:
    """NaN, infinities and subnormals among them; later rows keep what they hold."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = patterns.view(256, 256)
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None, 64, 260, 2, 256, 128, weights="bf16", device=target.device
    )
    assert buffer.x.dtype == torch.bfloat16
    assert buffer.x_sf.shape == (260, 0)
    for view in (buffer.x, buffer.topk_idx, buffer.topk_weights):
        view.view(torch.uint8).fill_(FILL)
    topk_idx, topk_weights = routing(256, 2)
    inputs = [tensor.to(target.device) for tensor in (x, topk_idx, topk_weights)]
    deep_moe.prepare_inputs(*inputs, buffer, arch=target.arch)
    assert torch.equal(bits(buffer.x[:256]), bits(x))
    assert torch.equal(buffer.topk_idx[:256].cpu(), topk_idx)
    assert torch.equal(buffer.topk_weights[:256].cpu(), topk_weights)
    for view in (buffer.x, buffer.topk_idx, buffer.topk_weights):
        assert bool((bits(view[256:]) == FILL).all())
