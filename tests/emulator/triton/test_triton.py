"""Kernels as Triton compiles them, of which `kernels.py` has the source: the GEMM of a fused MoE
layer by cp.async and each generation's matrix instructions, and one with tensor maps made on the
device. The operands are small whole numbers, so that every sum is exact."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from warpcheck import Finding, Machine

HERE = Path(__file__).parent
SHARED_BYTES = 100 * 1024
SCRATCH_BYTES = 384  # of a CTA, where it makes its tensor maps

# Triton lets wgmma and tcgen05.mma, which are in the async proxy, read what cp.async has written.
NO_PROXY_FENCE = r"no fence\.proxy\.async stands between them\n  first: write by .* cp\.async of"


def launch(
    name: str, grid: tuple[int, int], arguments: list[torch.Tensor | int], seed: int
) -> list[Finding]:
    ptx = (HERE / f"{name}.ptx").read_text()
    entry = name.rpartition("_")[0]
    machine = Machine(seed=seed, stop_at_findings=False)
    scratch = torch.full((grid[0] * grid[1] * SCRATCH_BYTES // 8 + 16,), -1, dtype=torch.int64)
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    for index, tensor in enumerate([*tensors, scratch]):
        machine.add_memory(0, tensor.data_ptr(), tensor.nbytes, f"tensor {index}")
    packed = [
        a.data_ptr().to_bytes(8, "little")
        if isinstance(a, torch.Tensor)
        else a.to_bytes(4, "little")
        for a in arguments
    ]
    # Two pointers to scratch memory follow the kernel's own parameters.
    first_scratch = -(-scratch.data_ptr() // 128) * 128
    packed += [first_scratch.to_bytes(8, "little")] * 2
    assert len(re.findall(r"\.param \.[^,)]*_param_\d+", ptx)) == len(packed)
    module = machine.load(ptx, name=f"{name}.ptx")
    machine.launch(
        module,
        entry,
        grid=(*grid, 1),
        block=(128, 1, 1),
        shared_bytes=SHARED_BYTES,
        args=packed,
    )
    machine.run()
    return machine.findings


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-2, 3, shape).to(dtype)


def check_findings(findings: list[Finding], *expected: str) -> None:
    texts = [str(finding) for finding in findings]
    assert [t for t in texts if not any(re.search(e, t) for e in expected)] == []
    assert [e for e in expected if not any(re.search(e, t) for t in texts)] == []


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("arch", "dtype", "findings"),
    [
        ("sm80", torch.bfloat16, []),
        ("sm90", torch.float8_e4m3fn, [NO_PROXY_FENCE]),
        ("sm100", torch.bfloat16, [NO_PROXY_FENCE]),
    ],
)
def test_gemm_of_experts(arch, dtype, findings, seed):
    torch.manual_seed(seed)
    num_tokens, n, k, num_experts, num_topk, block_m = 20, 128, 208, 3, 2, 64
    num_slots = num_tokens * num_topk
    tokens, weights = numbers(num_tokens, k, dtype=dtype), numbers(num_experts, n, k, dtype=dtype)
    expert_of = torch.stack([torch.randperm(num_experts)[:num_topk] for _ in range(num_tokens)])
    slots, experts = [], []
    for expert in range(num_experts):
        own = (expert_of.reshape(-1) == expert).nonzero()[:, 0].tolist()
        own += [num_slots] * (-len(own) % block_m)
        slots += own
        experts += [expert] * (len(own) // block_m)
    factors = torch.tensor([0.5, 1.0, 2.0])[torch.randint(0, 3, (num_slots,))]
    out = torch.zeros(num_slots, n, dtype=torch.bfloat16)
    slots, experts = (torch.tensor(x, dtype=torch.int32) for x in (slots, experts))
    found = launch(
        f"expert_gemm_{arch}",
        (len(experts), n // 64),
        [tokens, weights, out, slots, experts, factors, num_slots, n, k],
        seed,
    )
    rows = tokens.double().repeat_interleave(num_topk, dim=0)
    expected = torch.einsum("sk,snk->sn", rows, weights.double()[expert_of.reshape(-1)])
    assert (out == (expected * factors[:, None]).bfloat16()).all()
    assert expected.abs().max() > 0
    check_findings(found, *findings)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_gemm_with_tensor_maps_made_on_the_device(arch, seed):
    torch.manual_seed(seed)
    m, n, k = 200, 128, 144  # the first two overhang in tiles of 128 by 64 by 64
    a, b = numbers(m, k, dtype=torch.bfloat16), numbers(n, k, dtype=torch.bfloat16)
    out = torch.zeros(m, n, dtype=torch.bfloat16)
    found = launch(f"tensor_gemm_{arch}", (2, 2), [a, b, out, m, n, k], seed)
    assert (out == (a.double() @ b.double().T).bfloat16()).all()
    check_findings(found)
