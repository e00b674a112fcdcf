"""Every byte that the kernel writes is that of the reference casts, and it writes no other."""

from __future__ import annotations

import pytest
import torch

import deep_moe
from deep_moe.heuristics import PrepareInputsConfig

from .conftest import FILL, VIEWS, Target, bits, routing

BF16_PATTERNS = 1 << 16


def every_bf16() -> torch.Tensor:
    """All values, NaNs and infinities too, [65536]."""
    patterns = torch.arange(BF16_PATTERNS, dtype=torch.int32)
    return patterns.to(torch.uint16).view(torch.bfloat16)


def randn(num_tokens: int, hidden: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, hidden, generator=generator).bfloat16()


@pytest.mark.parametrize("idx_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_random_tokens_and_routing(
    target: Target, idx_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    idx, weights = routing(16, 6)
    assert bool((idx == -1).any())
    buffer = target.buffer(num_topk=6)
    target.check(buffer, randn(16, 256), idx.to(idx_dtype), weights.to(weight_dtype))


def test_every_value_as_the_largest_of_its_group(target: Target) -> None:
    """Each pattern with 31 zeros: its scale and its rounding, at the place where 448 goes."""
    x = torch.zeros(BF16_PATTERNS // 32, 32, 32, dtype=torch.bfloat16)
    x[torch.arange(x.shape[0])[:, None], torch.arange(32), torch.arange(32)] = every_bf16().view(
        -1, 32
    )
    x = x.reshape(-1, 1024)
    idx, weights = routing(x.shape[0], 1)
    target.check(target.buffer(max_tokens=x.shape[0], num_topk=1, hidden=1024), x, idx, weights)


def test_every_value_beside_larger_ones(target: Target) -> None:
    """All patterns of one exponent range share groups: ties, subnormals, values that vanish."""
    finite = every_bf16()[every_bf16().isfinite()]
    generator = torch.Generator().manual_seed(1)
    order = finite.abs().float().argsort(stable=True)
    near = finite[order].view(-1, 32)
    apart = finite[torch.randperm(len(finite), generator=generator)].view(-1, 32)
    x = torch.cat([near, apart]).reshape(-1, 255 * 128)
    idx, weights = routing(len(x), 2)
    target.check(target.buffer(hidden=255 * 128), x, idx, weights)


def test_groups_with_nan_infinity_and_zeros(target: Target) -> None:
    x = randn(8, 256)
    x[0] = 0
    x[1] = -0.0
    x[2, 5] = torch.nan
    x[2, 70] = -torch.nan
    x[3, 31] = torch.inf
    x[3, 32] = -torch.inf
    x[4, 255] = torch.nan
    x[4, 224] = torch.inf
    x[5] = torch.finfo(torch.bfloat16).max
    x[6] = torch.finfo(torch.bfloat16).smallest_normal
    x[7] = torch.tensor([1], dtype=torch.int16).view(torch.bfloat16)  # the smallest subnormal
    target.check(target.buffer(), x, *routing(8, 2))


def test_weights_keep_their_bits(target: Target) -> None:
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-45, 3.4e38, 1e-39, -1.5])
    idx, _ = routing(8, 1)
    buffer = target.buffer(num_topk=1)
    target.check(buffer, randn(8, 256), idx, special[:, None])
    target.check(target.buffer(num_topk=1), randn(8, 256), idx, special[:, None].bfloat16())


def test_ids_are_widened_with_their_sign(target: Target) -> None:
    idx = torch.tensor([[-1, 0], [2**31 - 1, -(2**31)]], dtype=torch.int32)
    _, weights = routing(2, 2)
    target.check(target.buffer(), randn(2, 256), idx, weights)
    wide = torch.tensor([[-1, 2**62], [-(2**63), 2**32 + 5]])
    target.check(target.buffer(), randn(2, 256), wide, weights)


def test_no_tokens(target: Target) -> None:
    target.check(target.buffer(), randn(0, 256), *routing(0, 2))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 31, 33])
@pytest.mark.parametrize("hidden", [128, 384, 1152])
def test_counts_that_fill_no_cta_and_no_warp(target: Target, num_tokens: int, hidden: int) -> None:
    config = PrepareInputsConfig(arch="sm_100a")
    chunks_per_cta = config.num_threads * config.num_chunks_per_lane
    assert config.num_chunks(num_tokens * hidden) % chunks_per_cta != 0
    buffer = target.buffer(max_tokens=40, num_topk=3, hidden=hidden)
    target.check(buffer, randn(num_tokens, hidden), *routing(num_tokens, 3))


def test_more_slots_than_threads(target: Target) -> None:
    """A token of 128 values is loaded by 16 lanes, of which 4 exist with 4 loads each."""
    config = PrepareInputsConfig(arch="sm_100a")
    num_tokens, num_topk = 64, 32
    num_ctas = config.num_ctas(config.num_chunks(num_tokens * 128))
    assert num_tokens * num_topk > num_ctas * config.num_threads
    buffer = target.buffer(max_tokens=num_tokens, num_topk=num_topk, hidden=128)
    target.check(buffer, randn(num_tokens, 128), *routing(num_tokens, num_topk))


def test_a_full_buffer_and_then_fewer_tokens(target: Target) -> None:
    buffer = target.buffer(max_tokens=16, hidden=7168)
    first = randn(16, 7168)
    target.check(buffer, first, *routing(16, 2))
    before = {name: bits(getattr(buffer, name)).clone() for name in VIEWS}
    idx, weights = (tensor.to(target.device) for tensor in routing(5, 2, seed=1))
    deep_moe.prepare_inputs(
        randn(5, 7168, seed=1).to(target.device), idx, weights, buffer, arch=target.arch
    )
    for name in VIEWS:
        now = bits(getattr(buffer, name))
        assert torch.equal(now[5:], before[name][5:])
        assert not torch.equal(now[:5], before[name][:5])


def test_nothing_but_the_views_changes(target: Target) -> None:
    buffer = target.buffer()
    memory = buffer.memory.tensor
    memory.fill_(FILL)
    target.check(buffer, randn(16, 256), *routing(16, 2))
    for name in VIEWS:
        getattr(buffer, name).view(torch.uint8).fill_(FILL)
    assert bool((memory == FILL).all())
