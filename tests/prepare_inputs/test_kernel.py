"""The compiled kernel: no spills, full occupancy, an argument that agrees on both sides."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from deep_moe import jit
from deep_moe.heuristics import PrepareInputsConfig

HEADER = Path(__file__).parents[2] / "include/deep_moe/kernels/prepare_inputs.cuh"
THREADS_PER_SM, REGISTERS_PER_SM = 2048, 65536


def compile_kernel(source: str, arch: str):
    return jit.compile_source(
        source,
        arch=arch,
        include_paths=jit.find_headers().include_paths,
        kernel=PrepareInputsConfig.kernel_name,
    )


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("int32_idx", "bf16_weights"), list(product([False, True], repeat=2)))
def test_no_spills_and_full_occupancy(arch: str, int32_idx: bool, bf16_weights: bool) -> None:
    config = PrepareInputsConfig(
        has_int32_topk_idx=int32_idx, has_bf16_topk_weights=bf16_weights, arch=arch
    )
    compilation = compile_kernel(jit.render_kernel(config), arch)
    resources = compilation.resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == 0
    assert resources.stack_bytes == resources.static_smem_bytes == 0
    assert resources.num_registers * THREADS_PER_SM <= REGISTERS_PER_SM
    assert "warning" not in compilation.log.lower(), compilation.log


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_tokens_are_loaded_in_16_bytes_before_anything_is_stored(arch: str) -> None:
    config = PrepareInputsConfig(arch=arch)
    ptx = compile_kernel(jit.render_kernel(config), arch).ptx
    accesses = re.findall(r"\b((?:ld|st)\.global\.\S+)", ptx)
    num_loads = config.num_chunks_per_lane
    assert accesses[:num_loads] == ["ld.global.v4.u32"] * num_loads
    assert accesses.count("ld.global.v4.u32") == num_loads
    assert accesses.count("st.global.v2.u32") == num_loads


def test_the_manifest_says_what_the_kernel_is(tmp_path: Path) -> None:
    config = PrepareInputsConfig(has_int32_topk_idx=True, arch="sm_90a")
    kernel = jit.build(config, cache=jit.KernelCache(tmp_path))
    assert kernel.name == config.kernel_name
    assert f".entry {config.kernel_name}" in kernel.ptx
    assert kernel.manifest["config"] == {**config.kernel_fields(), "arch": "sm_90a"}
    (entry,) = jit.KernelCache(tmp_path).entries()
    assert entry.key == kernel.key
