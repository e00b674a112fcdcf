"""The compiled throughput kernels: no spills, arguments that agree on both sides."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from deep_moe import jit
from deep_moe.heuristics.throughput import ThroughputConfig, ThroughputShape
from tests.everyday import parametrize

HEADER = Path(__file__).parents[2] / "include/deep_moe/split/throughput_args.cuh"
KINDS = {
    "bf16": {"step": "dispatch", "has_weights": True},
    "fp8_128": {"step": "dispatch", "token_format": "fp8_128_ue8m0"},
    "mxfp8": {"step": "dispatch", "token_format": "mxfp8"},
    "given_fp8": {"step": "dispatch", "token_format": "fp8_128", "is_quantized_input": True},
    "again": {"step": "dispatch", "has_weights": True, "knows_rows": True},
    "combine": {"step": "combine", "has_weights": True, "sends_rows": True},
    "fetched": {"step": "combine"},
    "scalars": {"step": "scalars"},
    "masked": {"step": "dispatch", "token_format": "mxfp8", "masks_ranks": True},
    "masked_again": {"step": "dispatch", "knows_rows": True, "masks_ranks": True},
    "masked_combine": {"step": "combine", "sends_rows": True, "masks_ranks": True},
}
# Bytes of stack, spilled and loaded again, of a kernel that needs a register more than there are.
SPILLS = {("sm_100a", "masked"): (8, 4, 8)}
SM90_EVERYDAY = ("bf16", "combine", "scalars")  # one of each step
# ranks, experts, top-k, hidden, tokens, received rows
PROBLEMS = {
    "v3": (8, 256, 8, 7168, 8192, 81_920),
    "most": (72, 2016, 32, 7168, 32_768, 1 << 24),
    "one_rank": (1, 2048, 16, 3584, 4096, 1 << 20),
}


def compile_kernel(config: ThroughputConfig):
    return jit.compile_source(
        jit.render_kernel(config),
        arch=config.arch,
        include_paths=jit.find_headers().include_paths,
        kernel=config.kernel_name,
    )


@parametrize(
    ("arch", "kind"),
    product(("sm_90a", "sm_100a"), KINDS),
    everyday=[("sm_90a" if kind in SM90_EVERYDAY else "sm_100a", kind) for kind in KINDS],
)
def test_no_spills(arch: str, kind: str) -> None:
    problems = PROBLEMS.values() if arch == "sm_90a" else [PROBLEMS["v3"]]
    for sizes in problems:
        config = ThroughputConfig(ThroughputShape(*sizes), num_ctas=132, arch=arch, **KINDS[kind])
        compilation = compile_kernel(config)
        resources = compilation.resources
        spilled = resources.spill_store_bytes, resources.spill_load_bytes
        assert (resources.stack_bytes, *spilled) == SPILLS.get((arch, kind), (0, 0, 0))
        assert resources.static_smem_bytes == 0
        assert resources.num_registers * config.num_threads <= 65536
        assert "warning" not in compilation.log.lower(), compilation.log
