"""What ptxas makes of the SM90 kernel: no spills within the register budgets, no warnings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deep_moe import jit
from deep_moe.heuristics import MoEShape, preset_shape
from deep_moe.heuristics.shape import DEFAULT_POOL_TOKENS
from deep_moe.heuristics.sm90_tiles import LARGE_FITTED_TILE
from deep_moe.targets import MegaMoEConfig, choose_config
from tests.everyday import parametrize
from tests.pairs import formats

MAX_TOKENS = 8192

# block_m and block_m_step.
TILES = (
    *((block_m, block_m) for block_m in (8, 24, 64, 80, 112, 128, 144, 152, 160, 168, 176)),
    (64, 8),
    (88, 8),
    (128, 32),
)
# Tiles of different sizes, and those of more than 152 rows, leave the loaders and dispatch 56
# registers: enough in a model's usual layout. With 256 experts on one rank, or lists of 72 ranks,
# those who know the counts keep some in local memory.
NARROW_TILES = ((128, 32), (160, 160), (168, 168), (176, 176))
MAX_SPILL_BYTES = {"pro": 0, "flash_precise": 0, "one_rank": 36, "odd": 0, "most_ranks": 44}
# ranks, experts, top-k, hidden, intermediate, clamp, fast math
PROBLEMS: dict[str, tuple[int, int, int, int, int, float | None, bool]] = {
    "pro": (4, 384, 6, 7168, 3072, 10.0, True),
}
MORE_PROBLEMS: dict[str, tuple[int, int, int, int, int, float | None, bool]] = {
    "flash_precise": (4, 256, 6, 4096, 2048, None, False),
    "one_rank": (1, 256, 8, 7168, 2048, 10.0, True),
    "odd": (2, 8, 2, 384, 128, 10.0, False),
    "most_ranks": (72, 288, 8, 7168, 2048, 10.0, True),
}


# Formats whose weights are decoded, and tiles of the one for BF16 tokens.
DECODED = ("mxfp4", "mxfp4 x bf16")
DECODED_TO_BF16 = ("mxfp4 x bf16", "nvfp4", "int4", "mxfp8")
DECODED_BF16_TILES = ((8, 8), (152, 152), (160, 160), (176, 176), (88, 8), (128, 32))
# With FP8 weights, whose products take registers of their own beside the sums.
FP8_TILES = (
    *((rows, rows) for rows in (8, 24, 48, 64, 80, 88, 96, 104, 112, 128)),
    LARGE_FITTED_TILE,
)
# With BF16 weights: nothing is decoded, so that all sizes leave the others 72 registers.
BF16_TILES = (
    *((rows, rows) for rows in (8, 64, 128, 152, 168, 176)),
    (88, 8),
    (128, 32),
    LARGE_FITTED_TILE,
)


# In clusters the weight loader has more to keep: where it has 56 registers, so much spills.
CLUSTER_SPILL_BYTES = {("fp8", 128): 8}


def check(
    tile: tuple[int, int],
    problem: str,
    weights: str = "mxfp4",
    biases: bool = False,
    cluster_size: int = 1,
    activation: str | None = None,
) -> None:
    values = {**PROBLEMS, **MORE_PROBLEMS}[problem]
    ranks, experts, topk, hidden, intermediate, clamp, fast_math = values
    config = choose_config(
        MoEShape(
            ranks, experts, topk, hidden, intermediate, 1024, **formats(weights), biases=biases
        ),
        1024,
        arch="sm_90a",
        **({"activation_clamp": clamp} if activation is None else {"activation": activation}),
        fast_math=fast_math,
        overrides={"block_m": tile[0], "block_m_step": tile[1], "cluster_size": cluster_size},
    )
    is_narrow = tile in NARROW_TILES and weights in DECODED
    max_spill_bytes = MAX_SPILL_BYTES[problem] if is_narrow else 0
    if cluster_size > 1:
        max_spill_bytes = CLUSTER_SPILL_BYTES.get((weights, tile[0]), 0)
    check_config(config, max_spill_bytes, max_spill_bytes)


def check_config(config: MegaMoEConfig, max_spill_bytes: int, max_stack_bytes: int) -> None:
    compilation = jit.compile_source(
        jit.render_kernel(config), arch="sm_90a", include_paths=jit.find_headers().include_paths
    )
    resources = compilation.resources
    assert resources.spill_store_bytes <= max_spill_bytes
    assert resources.spill_load_bytes <= max_spill_bytes
    assert resources.stack_bytes <= max_stack_bytes
    # What the compiler hands out for so many threads, from which setmaxnreg starts.
    assert resources.num_registers == {384: 168}[config.num_threads]
    assert "warning" not in compilation.log.lower(), compilation.log
    # ptxas gives up the overlap of wgmma with everything else where it cannot follow.
    assert "serialized" not in compilation.log, compilation.log


@pytest.mark.parametrize("problem", PROBLEMS)
@parametrize("tile", TILES, everyday=[(8, 8), (152, 152), (176, 176), (128, 32)])
def test_no_spills(tile: tuple[int, int], problem: str) -> None:
    check(tile, problem)


# What loaders spill that walk a ring, which the default pool of such layers is, and the stack that
# holds it.
RING_SPILL_BYTES = {
    "deepseek-v4-pro": (16, 16),
    "deepseek-v4-flash": (0, 0),
    "deepseek-v3": (8, 8),
}


@parametrize("model", RING_SPILL_BYTES, everyday=["deepseek-v3"])
@parametrize("num_tokens", [128, MAX_TOKENS], everyday=[MAX_TOKENS])
def test_spills_with_the_default_pool(model: str, num_tokens: int) -> None:
    shape = preset_shape(model, num_ranks=8, num_max_tokens_per_rank=MAX_TOKENS)
    shape = replace(shape, num_pool_tokens=DEFAULT_POOL_TOKENS)
    config = choose_config(shape, num_tokens, arch="sm_90a", activation_clamp=10.0)
    assert config.pool_wraps
    check_config(config, *(RING_SPILL_BYTES[model] if num_tokens == MAX_TOKENS else (0, 0)))


@pytest.mark.parametrize("problem", PROBLEMS)
@parametrize("tile", FP8_TILES, everyday=[(128, 128), LARGE_FITTED_TILE])
def test_no_spills_with_fp8_weights(tile: tuple[int, int], problem: str) -> None:
    check(tile, problem, "fp8")


# Without a gate, tiles that leave no registers beside the sums are not chosen.
SPARED_WITHOUT_GATE = ((176, 176), (128, 32))
OTHER_ACTIVATIONS = [
    (activation, *case)
    for activation in ("relu2", "gelu_tanh", "swiglu_step")
    for case in (
        *(("mxfp4", tile) for tile in ((8, 8), (88, 8), (152, 152))),
        *(("mxfp4", tile) for tile in SPARED_WITHOUT_GATE if activation != "relu2"),
        *(("mxfp4 x bf16", tile) for tile in ((8, 8), (176, 176))),
        *(("fp8", tile) for tile in ((88, 88), (128, 128))),
        *(("bf16", tile) for tile in ((176, 176), (128, 32))),
    )
]


@parametrize(("activation", "weights", "tile"), OTHER_ACTIVATIONS, everyday=OTHER_ACTIVATIONS[2::9])
def test_no_spills_with_other_activations(
    activation: str, weights: str, tile: tuple[int, int]
) -> None:
    check(tile, "pro", weights, activation=activation)


@parametrize("tile", [(8, 8), (88, 8), (152, 152), (160, 160)], everyday=[(152, 152)])
def test_no_spills_with_biases(tile: tuple[int, int]) -> None:
    check(tile, "pro", biases=True)


@parametrize("tile", BF16_TILES, everyday=[(176, 176)])
def test_no_spills_with_fp8_weights_with_scales_of_rows(tile: tuple[int, int]) -> None:
    check(tile, "pro", "fp8 x fp8_token")


@pytest.mark.slow
@pytest.mark.parametrize("tile", [(8, 8), (176, 176), (128, 32)])
def test_no_spills_with_fp8_weights_with_scales_of_rows_and_biases(tile: tuple[int, int]) -> None:
    check(tile, "pro", "fp8 x fp8_token", biases=True)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [(8, 8), (80, 80), (128, 128)])
def test_no_spills_with_fp8_weights_and_biases(tile: tuple[int, int]) -> None:
    check(tile, "pro", "fp8", biases=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "tile"),
    [
        *(("fp8", (rows, rows)) for rows in (72, 112, 128)),
        *(("bf16", (rows, rows)) for rows in (128, 176)),
        *(("fp8 x fp8_token", (rows, rows)) for rows in (128, 176)),
        ("mxfp4", (176, 176)),
        ("fp8", LARGE_FITTED_TILE),
        ("bf16", LARGE_FITTED_TILE),
        ("fp8 x fp8_token", LARGE_FITTED_TILE),
    ],
)
def test_spills_in_clusters(weights: str, tile: tuple[int, int]) -> None:
    check(tile, "pro", weights, cluster_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [(8, 8), (176, 176), (128, 32)])
def test_no_spills_with_bf16_weights_and_biases(tile: tuple[int, int]) -> None:
    check(tile, "pro", "bf16", biases=True)


@parametrize(
    ("weights", "tile"),
    [
        (weights, tile)
        for weights in DECODED_TO_BF16
        for tile in DECODED_BF16_TILES
        if (weights, tile) != ("int4", (176, 176))
    ],
    everyday=[("mxfp4 x bf16", (152, 152)), ("nvfp4", (128, 32))],
)
def test_no_spills_with_weights_decoded_to_bf16(weights: str, tile: tuple[int, int]) -> None:
    check(tile, "pro", weights)


@pytest.mark.slow
@pytest.mark.parametrize("weights", DECODED_TO_BF16)
@pytest.mark.parametrize("tile", [(8, 8), (152, 152)])
def test_no_spills_with_weights_decoded_to_bf16_and_biases(
    weights: str, tile: tuple[int, int]
) -> None:
    check(tile, "pro", weights, biases=True)


@pytest.mark.parametrize("problem", PROBLEMS)
@parametrize("tile", BF16_TILES, everyday=[(176, 176), LARGE_FITTED_TILE])
def test_no_spills_with_bf16_weights(tile: tuple[int, int], problem: str) -> None:
    check(tile, problem, "bf16")


# What other problems change is what the loaders and dispatch keep, with 56 registers or with 72, of
# which the others' tiles are the smallest, the largest and those of two sizes.
TILES_OF_MORE_PROBLEMS = (*NARROW_TILES, (8, 8), (152, 152), (64, 8), (88, 8))


def pairs() -> list[tuple[tuple[int, int], str]]:
    """Every tile in two of the problems, every problem with half of the tiles."""
    return [
        (tile, problem)
        for i, tile in enumerate(TILES_OF_MORE_PROBLEMS)
        for j, problem in enumerate(MORE_PROBLEMS)
        if (i + j) % 2 == 0
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("tile", "problem"), pairs())
def test_no_spills_in_more_problems(tile: tuple[int, int], problem: str) -> None:
    check(tile, problem)


@pytest.mark.parametrize("is_uneven", [False, True])
def test_without_a_gate_no_tile_is_chosen_that_spills(is_uneven: bool) -> None:
    shape = MoEShape(4, 512, 22, 1024, 2688, MAX_TOKENS)
    chosen = {
        (config.block_m, config.block_m_step)
        for num_tokens in (*range(1, 512, 7), *range(512, MAX_TOKENS + 1, 256))
        for config in [
            choose_config(shape, num_tokens, arch="sm_90a", activation="relu2", is_uneven=is_uneven)
        ]
    }
    assert len(chosen) > 5
    assert max(rows for rows, _ in chosen) <= 152
    assert not chosen & set(SPARED_WITHOUT_GATE)
