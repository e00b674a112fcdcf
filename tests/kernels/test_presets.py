"""Kernels of published models compile, with their activations, and spill no more than others."""

from __future__ import annotations

import pytest

from deep_moe import jit
from deep_moe.heuristics import PRESETS, choose_config, preset_activation, preset_shape
from deep_moe.targets import TARGETS

# Where the math warps leave dispatch and loaders 56 registers: 112 local experts and SiTU are most.
MAX_SPILL_BYTES = {72: 0, 56: 24}
EVERYDAY_TOKENS, MORE_TOKENS = (64,), (1, 512, 1024, 8192)


def check(name: str, arch: str, num_tokens: int) -> None:
    shape = preset_shape(name, num_ranks=8, num_max_tokens_per_rank=8192)
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


@pytest.mark.parametrize("num_tokens", EVERYDAY_TOKENS)
@pytest.mark.parametrize("arch", sorted(TARGETS.keys() - {"sm_103a"}))  # the kernel of sm_100a
@pytest.mark.parametrize("name", ["kimi-k3", "minimax-m3", "deepseek-v4.1-flash"])
def test_a_sample_compiles(name: str, arch: str, num_tokens: int) -> None:
    check(name, arch, num_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [*EVERYDAY_TOKENS, *MORE_TOKENS])
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", PRESETS)
def test_all_compile(name: str, arch: str, num_tokens: int) -> None:
    check(name, arch, num_tokens)
