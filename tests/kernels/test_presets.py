"""Kernels of published models compile, with their activations, and spill no more than others."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from deep_moe import jit
from deep_moe.heuristics import PRESETS, preset_activation, preset_shape
from deep_moe.targets import TARGETS, choose_config
from tests.everyday import parametrize
from tests.pairs import formats

# Where the math warps leave dispatch and loaders 56 registers: 112 local experts and SiTU are most.
MAX_SPILL_BYTES = {72: 0, 56: 24}
SAMPLE = ("kimi-k3", "minimax-m3", "deepseek-v4.1-flash")
ARCHS = ("sm_90a", "sm_100a")
DECODE, PREFILL, OTHERS = 64, 8192, (1, 512, 1024)  # tokens per rank


def cases() -> list[tuple[str, str, int]]:
    """Each model in decode on one kernel and in prefill on the other, in turn, and with another
    number of tokens, of which each has a third of the models; a third of the models as sm_103a,
    whose kernel is that of sm_100a, in decode. Every tile meets problems in test_sm90_resources.py
    and test_sm100_resources.py."""
    chosen = []
    for i, name in enumerate(PRESETS):
        one, other = ARCHS[i % 2], ARCHS[1 - i % 2]
        chosen += [] if name in SAMPLE else [(name, one, DECODE)]
        chosen += [(name, other, PREFILL), (name, one, OTHERS[i % len(OTHERS)])]
        if i % 3 == 0:
            chosen += [(name, arch, DECODE) for arch in TARGETS if arch not in ARCHS]
    return chosen


def decoded_cases() -> list[tuple[str, str, int, str]]:
    """Each model on SM100 with 4-bit weights of one format beside BF16 tokens."""
    pairs, archs, counts = ("nvfp4", "int4", "mxfp4 x bf16"), ("sm_100a", "sm_103a"), (8192, 64)
    return [
        (name, archs[i % 2], counts[i // 2 % 2], pairs[i % len(pairs)])
        for i, name in enumerate(PRESETS)
    ]


def check(name: str, arch: str, num_tokens: int, pair: str = "mxfp4") -> None:
    shape = replace(preset_shape(name, num_ranks=8, num_max_tokens_per_rank=8192), **formats(pair))
    config = choose_config(shape, num_tokens, arch=arch, activation=preset_activation(name))
    compilation = jit.compile_source(
        jit.render_kernel(config), arch=arch, include_paths=jit.find_headers().include_paths
    )
    resources = compilation.resources
    allowed = MAX_SPILL_BYTES.get(config.num_dispatch_registers, 0)
    assert resources.spill_store_bytes <= allowed
    assert resources.spill_load_bytes <= allowed
    assert "warning" not in compilation.log.lower(), compilation.log
    assert "serialized" not in compilation.log, compilation.log


@parametrize(
    ("name", "arch"),
    product(SAMPLE, ARCHS),
    everyday=[(name, ARCHS[i % 2]) for i, name in enumerate(SAMPLE)],
)
def test_a_sample_compiles(name: str, arch: str) -> None:
    check(name, arch, DECODE)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch", "num_tokens"), cases())
def test_all_compile(name: str, arch: str, num_tokens: int) -> None:
    check(name, arch, num_tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch", "num_tokens", "pair"), decoded_cases())
def test_decoded_weights_compile(name: str, arch: str, num_tokens: int, pair: str) -> None:
    check(name, arch, num_tokens, pair)
