"""Triton kernels whose PTX, as Triton 3.6 makes it without a GPU, lies beside this file.

pip install triton==3.6.0 && TRITON_DISABLE_LINE_INFO=1 python -m tests.emulator.triton.kernels
"""

# Annotations must stay objects: Triton looks at them.
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HERE = Path(__file__).parent


@triton.jit
def expert_gemm(
    tokens,  # [num_tokens, k]
    weights,  # [num_experts, n, k]
    out,  # [num_slots, n]
    slots,  # of each row of a block; num_slots for rows that hold none
    experts,  # of each block of rows
    factors,  # of each slot
    num_slots,
    n,
    k,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    num_topk: tl.constexpr,
):
    slot = tl.load(slots + tl.program_id(0) * block_m + tl.arange(0, block_m))
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    is_used = slot < num_slots
    column = tl.program_id(1) * block_n + tl.arange(0, block_n)
    inner = tl.arange(0, block_k)
    token_at = tokens + (slot[:, None] // num_topk) * k + inner[None, :]
    weight_at = weights + expert * n * k + column[None, :] * k + inner[:, None]
    sums = tl.zeros((block_m, block_n), tl.float32)
    for first in range(0, k, block_k):
        is_inside = inner < k - first
        a = tl.load(token_at, mask=is_used[:, None] & is_inside[None, :], other=0.0)
        b = tl.load(weight_at, mask=is_inside[:, None], other=0.0)
        sums = tl.dot(a, b, sums)
        token_at += block_k
        weight_at += block_k
    factor = tl.load(factors + slot, mask=is_used, other=0.0)
    tl.store(
        out + slot[:, None] * n + column[None, :],
        (sums * factor[:, None]).to(tl.bfloat16),
        mask=is_used[:, None] & (column[None, :] < n),
    )


@triton.jit
def tensor_gemm(
    a,  # [m, k]
    b,  # [n, k]
    out,  # [m, n]
    m,
    n,
    k,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """With tensor maps that the kernel makes itself."""
    a_map = tl.make_tensor_descriptor(a, [m, k], [k, 1], [block_m, block_k])
    b_map = tl.make_tensor_descriptor(b, [n, k], [k, 1], [block_n, block_k])
    out_map = tl.make_tensor_descriptor(out, [m, n], [n, 1], [block_m, block_n])
    row, column = tl.program_id(0) * block_m, tl.program_id(1) * block_n
    sums = tl.zeros((block_m, block_n), tl.float32)
    for first in range(0, k, block_k):
        sums = tl.dot(a_map.load([row, first]), b_map.load([column, first]).T, sums)
    out_map.store([row, column], sums.to(tl.bfloat16))


def compile_ptx(function, types: dict[str, str], sizes: dict[str, int], capability: int) -> str:
    """Pointers and sizes are multiples of 16, which is what lets copies be wide."""
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(types)
        if name != "num_slots"
    }
    source = ASTSource(
        function,
        signature={**types, **dict.fromkeys(sizes, "constexpr")},
        constexprs=sizes,
        attrs=attributes,
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4, "num_stages": 3},
    )
    return compiled.asm["ptx"]


def main() -> None:
    for capability, dtype in ((80, "bf16"), (90, "fp8e4nv"), (100, "bf16")):
        types = {
            "tokens": f"*{dtype}",
            "weights": f"*{dtype}",
            "out": "*bf16",
            "slots": "*i32",
            "experts": "*i32",
            "factors": "*fp32",
            **dict.fromkeys(("num_slots", "n", "k"), "i32"),
        }
        sizes = {"block_m": 64, "block_n": 64, "block_k": 64, "num_topk": 2}
        ptx = compile_ptx(expert_gemm, types, sizes, capability)
        (HERE / f"expert_gemm_sm{capability}.ptx").write_text(ptx)
    for capability in (90, 100):
        types = {**dict.fromkeys(("a", "b", "out"), "*bf16"), **dict.fromkeys("mnk", "i32")}
        sizes = {"block_m": 128, "block_n": 64, "block_k": 64}
        ptx = compile_ptx(tensor_gemm, types, sizes, capability)
        (HERE / f"tensor_gemm_sm{capability}.ptx").write_text(ptx)


if __name__ == "__main__":
    main()
