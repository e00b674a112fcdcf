"""A mixture-of-experts layer from checkpoint to result, on two ranks and without a GPU.

Run it with `make demo`. It writes demo-out/, and ends with PASS or fails. Its lines fit a terminal
of 80 columns.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from pathlib import Path

import torch

from deep_moe import EmulatedRanks, jit, transform_weights_for_mega_moe
from deep_moe.checkpoint import load_experts, save_experts
from deep_moe.formats.numerics import FP32_SUM_BITS
from deep_moe.heuristics import MoEShape
from deep_moe.targets import choose_config, target_of
from deep_moe.trial.bounds import reference_bounds
from deep_moe.trial.calls import fill_inputs
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import Tokens, random_layer, random_tokens
from deep_moe.weights.layers import LayerWeights

OUTPUT = Path("demo-out")
SHAPE = MoEShape(
    num_ranks=2,
    num_experts=8,
    num_topk=2,
    hidden=512,
    intermediate_hidden=256,
    num_max_tokens_per_rank=8,
)
NUMERICS = target_of("sm_100a").weights_of(SHAPE.weights, SHAPE.token_format).numerics
NUM_TOKENS = (6, 3)  # per rank
NUM_SMS = 4  # the emulated GPU of each rank is this small
# What the kernel's PTX should hold, and what it is there for.
PTX_LANDMARKS = {
    "tcgen05.mma": "FP8 x FP4 products with scales, by two SMs",
    "tcgen05.cp": "scale factors on their way into tensor memory",
    "cp.async.bulk.tensor": "tiles of weights and tokens into shared memory",
    "cp.async.bulk.shared": "tokens pulled from the rank that has them",
    ".release.": "progress told to other warps, SMs and ranks",
}


def main() -> int:
    step("1. A checkpoint", "FP4 weights (E2M1) with one scale per 32 values, as safetensors.")
    shutil.rmtree(OUTPUT, ignore_errors=True)
    layer = random_layer(SHAPE, seed=0)
    save_experts(OUTPUT, {0: (layer.l1, layer.l2)}, experts_per_file=4)
    for path in sorted(OUTPUT.iterdir()):
        print(f"   {path}  {path.stat().st_size} bytes")

    step("2. Two ranks load their experts", "Rank 0 owns experts 0 to 3, rank 1 owns 4 to 7.")
    weights = []
    for rank in range(SHAPE.num_ranks):
        loaded = load_experts(OUTPUT, 0, rank_idx=rank, num_ranks=SHAPE.num_ranks)
        weights.append(transform_weights_for_mega_moe(loaded.l1, loaded.l2))
        show(f"rank {rank}: Linear1 {shape_of(loaded.l1)}, Linear2 {shape_of(loaded.l2)}")

    step("3. Tokens and routing", "Each token goes to 2 of the 8 experts, on whichever rank.")
    tokens = [random_tokens(SHAPE, n, seed=10 + rank) for rank, n in enumerate(NUM_TOKENS)]
    for rank, own in enumerate(tokens):
        print_routing(rank, own)

    step("4. The kernel", "Rendered for this shape, compiled by NVRTC for a B200 (sm_100a).")
    for rank, num_tokens in enumerate(NUM_TOKENS):
        describe_kernel(rank, num_tokens)

    step("5. One call", "Dispatch, Linear1, SwiGLU, Linear2, combine: one kernel on each rank.")
    print("   no GPU is used: the PTX above runs on this CPU, instruction by instruction")
    ys = [torch.empty(n, SHAPE.hidden, dtype=torch.bfloat16) for n in NUM_TOKENS]
    stats = [torch.zeros(SHAPE.num_experts_per_rank, dtype=torch.int32) for _ in NUM_TOKENS]
    with EmulatedRanks(
        SHAPE.num_ranks,
        SHAPE.num_experts,
        SHAPE.num_max_tokens_per_rank,
        SHAPE.num_topk,
        SHAPE.hidden,
        SHAPE.intermediate_hidden,
    ) as ranks:
        for buffer, own in zip(ranks.buffers, tokens, strict=True):
            fill_inputs(buffer, own)
        started = time.perf_counter()
        ranks.call(ys, weights, stats, num_sms=NUM_SMS)
        seconds = time.perf_counter() - started
    print(f"   {SHAPE.num_ranks} ranks x {NUM_SMS} SMs emulated in {seconds:.1f} s")

    step("6. What the experts received", "Counted by the kernel, and from the table in step 3.")
    named = torch.cat([own.topk_idx.flatten() for own in tokens])
    counted = torch.bincount(named, minlength=SHAPE.num_experts).int()
    print(f"   kernel: {torch.cat(stats).tolist()}")
    print(f"   table:  {counted.tolist()}")
    passed = torch.equal(torch.cat(stats), counted)

    step("7. Comparison", "The same layer in plain PyTorch, with sums in FP64.")
    for rank, own in enumerate(tokens):
        inputs = (own.x, own.x_sf, own.topk_idx, own.topk_weights)
        bounds = reference_bounds(
            *inputs, layer.l1, layer.l2, numerics=NUMERICS, sum_bits=FP32_SUM_BITS
        )
        comparison = compare(ys[rank], bounds)
        passed &= comparison.is_right
        show(
            f"rank {rank}: {comparison.num_equal} of {comparison.num_values} values equal bit "
            f"for bit, the furthest {comparison.max_units:g} BF16 units away; "
            f"{comparison.num_wrong} that rounding does not explain"
        )

    print("\nPASS" if passed else "\nFAIL: the kernel and the reference differ")
    return 0 if passed else 1


def step(title: str, text: str) -> None:
    print(f"\n{title}\n   {text}", flush=True)


def show(text: str) -> None:
    """Print a paragraph, folded."""
    print(textwrap.fill(text, width=80, initial_indent="   ", subsequent_indent="     "))


def shape_of(pair: LayerWeights) -> str:
    return f"{list(pair.weight.shape)} bytes + {list(pair.sf.shape)} scale words"


def print_routing(rank: int, tokens: Tokens) -> None:
    rows = zip(tokens.topk_idx.tolist(), tokens.topk_weights.tolist(), strict=True)
    for token, (experts, shares) in enumerate(rows):
        targets = ", ".join(
            f"expert {expert} on rank {expert // SHAPE.num_experts_per_rank} ({share:.2f})"
            for expert, share in zip(experts, shares, strict=True)
        )
        print(f"   rank {rank}, token {token}  ->  {targets}")


def describe_kernel(rank: int, num_tokens: int) -> None:
    config = choose_config(SHAPE, num_tokens, num_sms=NUM_SMS)
    kernel = jit.build(config)
    resources = kernel.manifest["resources"]
    show(
        f"rank {rank}: tiles of {config.block_m} tokens x {config.block_n} weight rows, "
        f"{config.num_stages} stages, {config.num_threads} threads, {config.smem_bytes} bytes of "
        f"shared memory, {resources['spill_store_bytes']} bytes of registers spilled"
    )
    if rank > 0:
        return
    lines = kernel.ptx.splitlines()
    print(f"   kept in the cache (deep-moe cache list) as\n   {kernel.key}")
    print(f"   its kernel.ptx has {len(lines)} lines, among them")
    for mnemonic, purpose in PTX_LANDMARKS.items():
        print(f"   {sum(mnemonic in line for line in lines):5}  {mnemonic:21} {purpose}")


if __name__ == "__main__":
    sys.exit(main())
