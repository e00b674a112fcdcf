"""What ptxas makes of the SM90 kernel: no spills within the register budgets, no warnings."""

from __future__ import annotations

import pytest

from deep_moe import jit
from deep_moe.heuristics import MoEShape, choose_config

# block_m and block_m_step.
TILES = (
    *((block_m, block_m) for block_m in (8, 24, 64, 80, 112, 128, 144, 152, 160, 168, 176)),
    (128, 32),
)
# Tiles of different sizes, and those of more than 152 rows, leave the loaders and dispatch 56
# registers, with which those who know the counts keep some in local memory: up to 24 bytes for
# deepseek-v4-pro, the most with 256 experts on one rank.
MAX_SPILL_BYTES = {(128, 32): 64, (160, 160): 88, (168, 168): 88, (176, 176): 88}
# ranks, experts, top-k, hidden, intermediate, clamp, fast math
PROBLEMS = {"pro": (4, 384, 6, 7168, 3072, 10.0, True)}
MORE_PROBLEMS = {
    "flash_precise": (4, 256, 6, 4096, 2048, None, False),
    "one_rank": (1, 256, 8, 7168, 2048, 10.0, True),
    "odd": (2, 8, 2, 384, 128, 10.0, False),
    "most_ranks": (72, 288, 8, 7168, 2048, 10.0, True),
}


def check(
    tile: tuple[int, int], problem: tuple[int, int, int, int, int, float | None, bool]
) -> None:
    ranks, experts, topk, hidden, intermediate, clamp, fast_math = problem
    config = choose_config(
        MoEShape(ranks, experts, topk, hidden, intermediate, 1024),
        1024,
        arch="sm_90a",
        activation_clamp=clamp,
        fast_math=fast_math,
        overrides=dict(zip(("block_m", "block_m_step"), tile, strict=True)),
    )
    compilation = jit.compile_source(
        jit.render_kernel(config), arch="sm_90a", include_paths=jit.find_headers().include_paths
    )
    resources = compilation.resources
    max_spill_bytes = MAX_SPILL_BYTES.get(tile, 0)
    assert resources.spill_store_bytes <= max_spill_bytes
    assert resources.spill_load_bytes <= max_spill_bytes
    assert resources.stack_bytes <= max_spill_bytes
    # setmaxnreg starts from here.
    assert resources.num_registers == 65536 // config.num_threads // 8 * 8
    assert "warning" not in compilation.log.lower(), compilation.log
    # ptxas gives up the overlap of wgmma with everything else where it cannot follow.
    assert "serialized" not in compilation.log, compilation.log


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("tile", TILES)
def test_no_spills(tile: tuple[int, int], problem: str) -> None:
    check(tile, PROBLEMS[problem])


@pytest.mark.slow
@pytest.mark.parametrize("problem", MORE_PROBLEMS)
@pytest.mark.parametrize("tile", TILES)
def test_no_spills_in_more_problems(tile: tuple[int, int], problem: str) -> None:
    check(tile, MORE_PROBLEMS[problem])
