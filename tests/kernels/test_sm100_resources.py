"""What ptxas makes of the SM100 kernel: no spills within the register budgets, and quickly."""

from __future__ import annotations

from itertools import product

import pytest

from deep_moe import jit
from deep_moe.heuristics import MoEShape
from deep_moe.targets import choose_config
from tests.everyday import parametrize
from tests.pairs import formats

NVFP4 = "nvfp4 x nvfp4"
FP8_ROWS = "fp8 x fp8_token"
DECODED = ("nvfp4", "int4", "mxfp4 x bf16")
TILES = (16, 32, 64, 96, 128, 192)
# ranks, experts, top-k, hidden, intermediate, clamp, fast math
PROBLEMS = {
    "plain": (8, 256, 8, 7168, 2048, None, True),
    "clamp_precise": (8, 384, 6, 7168, 3072, 10.0, False),
}
MORE_PROBLEMS = {
    "many_local_experts": (2, 256, 8, 7168, 2048, 10.0, False),
    "one_rank": (1, 256, 6, 4096, 3072, None, False),
    "wide": (4, 384, 32, 8192, 6144, 7.0, True),
    "most_ranks": (72, 288, 8, 7168, 2048, 10.0, True),
    "two_words_of_ranks": (64, 384, 6, 7168, 3072, 10.0, False),
}


def check(
    block_m: int,
    problem: tuple[int, int, int, int, int, float | None, bool],
    weights: str = "mxfp4",
    biases: bool = False,
    *,
    arch: str = "sm_100a",
    num_pool_tokens: int | None = None,
    activation: str | None = None,
) -> None:
    ranks, experts, topk, hidden, intermediate, clamp, fast_math = problem
    shape = MoEShape(
        *(ranks, experts, topk, hidden, intermediate, 1024),
        **formats(weights),
        biases=biases,
        num_pool_tokens=num_pool_tokens,
    )
    config = choose_config(
        shape,
        1024,
        arch=arch,
        **({"activation_clamp": clamp} if activation is None else {"activation": activation}),
        fast_math=fast_math,
        overrides={"block_m": block_m},
    )
    compilation = jit.compile_source(
        jit.render_kernel(config), arch=arch, include_paths=jit.find_headers().include_paths
    )
    resources = compilation.resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == 0
    assert resources.stack_bytes == 0
    # What the compiler hands out for so many threads, from which setmaxnreg starts.
    assert resources.num_registers == {384: 168, 512: 128, 640: 96}[config.num_threads]
    assert "warning" not in compilation.log.lower(), compilation.log


@parametrize(
    ("block_m", "problem"),
    product(TILES, PROBLEMS),
    everyday=[(16, "plain"), (192, "clamp_precise")],
)
def test_no_spills(block_m: int, problem: str) -> None:
    check(block_m, PROBLEMS[problem])


@pytest.mark.slow
@pytest.mark.parametrize("block_m", TILES)
@pytest.mark.parametrize("weights", ["fp8", FP8_ROWS, "bf16", NVFP4, *DECODED])
def test_no_spills_with_other_weights(block_m: int, weights: str) -> None:
    check(block_m, PROBLEMS["clamp_precise"], weights)


@parametrize(
    ("activation", "block_m", "weights"),
    product(("relu2", "gelu_tanh", "swiglu_step"), TILES, ("mxfp4", "bf16", "nvfp4")),
    everyday=[("relu2", 192, "mxfp4"), ("relu2", 64, "bf16"), ("gelu_tanh", 192, "mxfp4")],
)
def test_no_spills_with_other_activations(activation: str, block_m: int, weights: str) -> None:
    check(block_m, PROBLEMS["plain"], weights, activation=activation)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["mxfp4", "fp8", FP8_ROWS, NVFP4, *DECODED])
@pytest.mark.parametrize("block_m", TILES)
def test_no_spills_with_biases(block_m: int, weights: str) -> None:
    check(block_m, PROBLEMS["clamp_precise"], weights, biases=True)


@parametrize(
    ("arch", "weights"),
    product(("sm_100a", "sm_103a"), ("mxfp4", "bf16", NVFP4, FP8_ROWS, *DECODED)),
    everyday=[("sm_100a", "mxfp4"), ("sm_103a", "bf16"), ("sm_103a", NVFP4), ("sm_103a", "nvfp4")],
)
def test_no_spills_where_the_pool_is_a_ring(arch: str, weights: str) -> None:
    check(192, PROBLEMS["plain"], weights, arch=arch, num_pool_tokens=12288)


@parametrize(
    ("arch", "weights"),
    product(("sm_100a", "sm_103a"), ("mxfp4", "fp8", FP8_ROWS, "bf16")),
    everyday=[("sm_100a", "mxfp4")],
)
def test_no_spills_of_wide_tiles(arch: str, weights: str) -> None:
    check(240, PROBLEMS["clamp_precise"], weights, arch=arch, num_pool_tokens=12288)


def cases() -> list[tuple[int, str, str]]:
    """Every tile in half of the problems, every problem with half of the tiles, with weights in
    turn."""
    pairs = ("mxfp4", "fp8", "bf16", NVFP4, FP8_ROWS, *DECODED)
    return [
        (block_m, problem, pairs[(i + j) // 2 % len(pairs)])
        for i, block_m in enumerate(TILES)
        for j, problem in enumerate(MORE_PROBLEMS)
        if (i + j) % 2 == 0
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("block_m", "problem", "weights"), cases())
def test_no_spills_in_more_problems(block_m: int, problem: str, weights: str) -> None:
    check(block_m, MORE_PROBLEMS[problem], weights)
