"""One small call on one GPU, for NVIDIA's compute-sanitizer: see tests/sanitize_on_gpu.sh.

    python -m tests.layer.sanitized_call [--full-tiles]

--full-tiles: every tile is full. Else scales and routing weights of rows behind the last token of a
tile, which nobody wrote, are read, and what comes of them is thrown away; that is how the kernel is
meant, but a tool that looks for such reads cannot know it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

import deep_moe
from deep_moe.heuristics import MoEShape
from deep_moe.targets import target_of, target_of_device
from deep_moe.trial.calls import fill_inputs
from deep_moe.trial.comparison import compare
from deep_moe.trial.reference import reference_mega_moe
from deep_moe.trial.synthetic import Tokens, exact_layer, exact_tokens

BLOCK_M = 16
NUM_SMS = 4
TIMEOUT_S = 500.0  # tools slow a kernel down a thousandfold
SHAPE = MoEShape(
    num_ranks=1,
    num_experts=4,
    num_topk=2,
    hidden=384,
    intermediate_hidden=256,
    num_max_tokens_per_rank=2 * BLOCK_M,
)


def make_tokens(full_tiles: bool) -> Tokens:
    """Every expert gets a tile, or in all but one case, which gets none, another part of one."""
    if full_tiles:
        tokens = exact_tokens(SHAPE, 2 * BLOCK_M)
        token_idx = torch.arange(2 * BLOCK_M)
        topk_idx = torch.stack([token_idx % 2, 2 + token_idx % 2], dim=1)
    else:
        tokens = exact_tokens(SHAPE, BLOCK_M + 3)
        topk_idx = tokens.topk_idx.where(tokens.topk_idx != 2, -1)
    return Tokens(tokens.x, tokens.x_sf, topk_idx, tokens.topk_weights)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full-tiles", action="store_true")
    arguments = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arch = target_of_device(device).name
    numerics = target_of(arch).weights_of().numerics
    # On the CPU, so that the tool has no kernels of PyTorch's to watch.
    layer = exact_layer(SHAPE, sum_bits=numerics.sum_bits)
    weights = deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2, arch=arch)
    tokens = make_tokens(arguments.full_tiles)
    expected = reference_mega_moe(
        *layer.operands(tokens),
        numerics=numerics,
    )

    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None,
        SHAPE.num_experts,
        SHAPE.num_max_tokens_per_rank,
        SHAPE.num_topk,
        SHAPE.hidden,
        SHAPE.intermediate_hidden,
        device=device,
    )
    l1, l2 = ((values.to(device), sf.to(device)) for values, sf in weights)
    stats = torch.zeros(SHAPE.num_experts, dtype=torch.int32).to(device)
    for _ in range(2):  # the second finds what the first left behind
        fill_inputs(buffer, tokens)
        y = torch.full(expected.shape, torch.nan, dtype=torch.bfloat16).to(device)
        deep_moe.fp8_fp4_mega_moe(
            y,
            l1,
            l2,
            buffer,
            stats,
            num_sms=NUM_SMS,
            overrides={"block_m": BLOCK_M, "num_stages": 3},
            timeout_s=TIMEOUT_S,
        )
        buffer.memory.synchronize()
        buffer.raise_if_failed()
        result = compare(y, expected)
        if not result.is_exact:
            sys.exit(f"wrong: {result}")
    print(f"right: {result}")


if __name__ == "__main__":
    main()
