"""The compiled kernels: no spills on any architecture, arguments that agree on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from deep_moe import jit
from deep_moe.activations import Situ, Swiglu, SwigluOai
from deep_moe.heuristics.training import (
    ActivateRowsBackwardConfig,
    ActivateRowsConfig,
    CountSlotsConfig,
    DequantizeRowsConfig,
    GatherRowsConfig,
    PlaceSlotsConfig,
    QuantizeColumnsConfig,
    QuantizeRowsConfig,
    QuantizeWeightsConfig,
    RoundWeightsConfig,
    ScanCountsConfig,
    ScatterRowsConfig,
    TrainingConfig,
)

HEADER = Path(__file__).parents[2] / "include/deep_moe/training/args.cuh"
ARCHS = ("sm_90a", "sm_100a", "sm_103a")


def configs(arch: str) -> list[TrainingConfig]:
    """Each kernel, and of what can be chosen the largest."""
    return [
        CountSlotsConfig(num_experts=1024, arch=arch),
        ScanCountsConfig.of_experts(1024, arch),
        PlaceSlotsConfig(num_experts=1024, arch=arch),
        GatherRowsConfig(rounds_to_mxfp8=True, arch=arch),
        *(
            config
            for activation in (Swiglu(), SwigluOai(), Situ())
            for config in (
                ActivateRowsConfig(
                    applied=activation, has_biases=True, rounds_to_mxfp8=True, arch=arch
                ),
                ActivateRowsConfig(applied=activation, has_biases=True, quantizes=True, arch=arch),
                ActivateRowsBackwardConfig(applied=activation, has_biases=True, arch=arch),
            )
        ),
        ScatterRowsConfig(num_sources=2, has_biases=True, arch=arch),
        DequantizeRowsConfig(arch=arch),
        QuantizeRowsConfig(arch=arch),
        QuantizeWeightsConfig(arch=arch),
        QuantizeWeightsConfig(has_same=False, has_transposed=True, arch=arch),
        QuantizeWeightsConfig(has_transposed=True, arch=arch),
        QuantizeWeightsConfig(compares=True, arch=arch),
        QuantizeWeightsConfig(has_same=False, has_transposed=True, compares=True, arch=arch),
        QuantizeColumnsConfig(gathers=True, arch=arch),
        QuantizeColumnsConfig(stores_rows=True, arch=arch),
        RoundWeightsConfig(arch=arch),
    ]


def compile_kernel(config: TrainingConfig):
    return jit.compile_source(
        jit.render_kernel(config),
        arch=config.arch,
        include_paths=jit.find_headers().include_paths,
        kernel=config.kernel_name,
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_no_spills(arch: str) -> None:
    for config in configs(arch):
        compilation = compile_kernel(config)
        resources = compilation.resources
        assert resources.spill_store_bytes == resources.spill_load_bytes == 0, config
        assert resources.stack_bytes == 0, config
        assert resources.static_smem_bytes <= 48 << 10, config
        assert "warning" not in compilation.log.lower(), compilation.log


def test_the_manifest_says_what_the_kernel_is(tmp_path: Path) -> None:
    config = ActivateRowsConfig(applied=Situ(beta=3.0), arch="sm_90a")
    kernel = jit.build(config, cache=jit.KernelCache(tmp_path))
    assert kernel.name == "activate_rows_kernel"
    assert f".entry {kernel.name}" in kernel.ptx
    assert kernel.manifest["config"]["activation_beta"] == 3.0
    assert kernel.manifest["config"]["arch"] == "sm_90a"
