"""The compiled kernels: no spills on any architecture, arguments that agree on both sides."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from deep_moe import jit
from deep_moe.heuristics.low_latency import LowLatencyConfig, LowLatencyShape
from deep_moe.tokens import ALL_TO_ALL_FORMATS
from tests.everyday import parametrize

HEADER = Path(__file__).parents[2] / "include/deep_moe/split/low_latency_args.cuh"
ARCHS = ("sm_90a", "sm_100a", "sm_103a")
PARTS = ((True, True), (True, False), (False, True))
STEPS = ("dispatch", "combine")
each_arch = parametrize("arch", ARCHS, everyday=ARCHS[:2])  # sm_103a's are those of sm_100a
# ranks, experts, top-k, hidden, tokens
PROBLEMS = {
    "v3": (8, 256, 8, 7168, 128),
    "one_rank": (1, 896, 16, 3584, 1024),
    "most_ranks": (72, 288, 32, 7168, 1024),
    "small": (2, 4, 2, 128, 8),
}


def compile_kernel(config: LowLatencyConfig):
    return jit.compile_source(
        jit.render_kernel(config),
        arch=config.arch,
        include_paths=jit.find_headers().include_paths,
        kernel=config.kernel_name,
    )


def cases() -> list[tuple[str, str, str]]:
    """Tokens in one format in every problem; in the others, which differ in their scales, in one
    for each architecture."""
    whole = ("mxfp8",)
    chosen = list(product(ARCHS[:2], whole, PROBLEMS))
    for token_format in ALL_TO_ALL_FORMATS:
        if token_format not in whole:
            chosen += [("sm_90a", token_format, "v3"), ("sm_100a", token_format, "most_ranks")]
    return [*chosen, (ARCHS[2], "mxfp8", "v3")]


@parametrize(
    ("arch", "token_format", "problem"),
    cases(),
    everyday=[("sm_90a", "bf16", "v3"), ("sm_100a", "mxfp8", "v3")],
)
def test_no_spills(arch: str, token_format: str, problem: str) -> None:
    shape = LowLatencyShape(
        *PROBLEMS[problem], token_format, has_shared_rows=token_format == "mxfp8"
    )
    for step, (sends, receives), repeats in product(STEPS, PARTS, (False, True)):
        if repeats and step == "dispatch":
            continue
        config = LowLatencyConfig(
            shape,
            step,
            132,
            arch,
            sends=sends,
            receives=receives,
            fetches_rows=shape.has_shared_rows and step == "combine",
            repeats=repeats,
        )
        compilation = compile_kernel(config)
        resources = compilation.resources
        assert resources.spill_store_bytes == resources.spill_load_bytes == 0
        assert resources.stack_bytes == resources.static_smem_bytes == 0
        assert resources.num_registers * config.num_threads <= 65536
        assert "warning" not in compilation.log.lower(), compilation.log


@parametrize("problem", ["v3", "most_ranks"], everyday=["v3"])
@each_arch
def test_no_spills_with_a_message_for_each_expert(arch: str, problem: str) -> None:
    shape = LowLatencyShape(*PROBLEMS[problem], "fp8_128", placement="experts")
    for sends, receives in PARTS:
        config = LowLatencyConfig(shape, "dispatch", 132, arch, sends=sends, receives=receives)
        compilation = compile_kernel(config)
        resources = compilation.resources
        assert resources.spill_store_bytes == resources.spill_load_bytes == 0
        assert resources.num_registers * config.num_threads <= 65536
        assert "warning" not in compilation.log.lower(), compilation.log


@pytest.mark.parametrize("step", STEPS)
@each_arch
def test_no_spills_with_stamps(arch: str, step: str) -> None:
    shape = LowLatencyShape(*PROBLEMS["v3"], "fp8_128")
    resources = compile_kernel(LowLatencyConfig(shape, step, 132, arch, trace=True)).resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == 0


def test_the_manifest_says_what_the_kernel_is(tmp_path: Path) -> None:
    shape = LowLatencyShape(*PROBLEMS["small"], "mxfp8")
    config = LowLatencyConfig(shape, "dispatch", 2, "sm_90a", has_int32_topk_idx=True)
    kernel = jit.build(config, cache=jit.KernelCache(tmp_path))
    assert kernel.name == "low_latency_dispatch_kernel"
    assert f".entry {kernel.name}" in kernel.ptx
    assert kernel.manifest["config"] == {**config.kernel_fields(), "arch": "sm_90a"}
