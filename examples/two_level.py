"""A layer over two NVLink domains, each of two ranks, on GPUs or, emulated, on CPUs.

    torchrun --nproc-per-node 4 examples/two_level.py

Every rank prints a line; rank 0 ends with PASS.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import deep_moe
from deep_moe.formats.numerics import FP32_SUM_BITS
from deep_moe.heuristics import MoEShape
from deep_moe.targets import target_of_device
from deep_moe.trial.calls import model_inputs
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import random_layer, random_tokens
from deep_moe.trial.two_level import two_level_bounds

NUM_DOMAINS = 2
NUM_TOKENS = (6, 3, 0, 9)  # of each rank


def main() -> None:
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if on_gpus:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    # As if all ranks were one domain; who loads a checkpoint needs no more than this.
    shape = MoEShape(num_ranks, 4 * num_ranks, 2, 256, 128, max(NUM_TOKENS))

    groups = deep_moe.make_domain_groups(NUM_DOMAINS)
    moe = deep_moe.TwoLevelMoE(
        *groups,
        shape.num_experts,
        shape.num_max_tokens_per_rank,
        shape.num_topk,
        shape.hidden,
        shape.intermediate_hidden,
        num_chunks=2,
        device=device,
    )
    experts = random_layer(shape)
    l1, l2 = experts.of_rank(rank, num_ranks)
    weights = deep_moe.transform_weights_for_mega_moe(
        (l1[0].to(device), l1[1].to(device)), (l2[0].to(device), l2[1].to(device))
    )
    x, tokens = model_inputs(random_tokens(shape, NUM_TOKENS[rank % 4], seed=rank))
    y = moe.call(x.to(device), tokens.topk_idx.to(device), tokens.topk_weights.to(device), weights)
    moe.check()

    numerics = target_of_device(device).weights_of(shape.weights, shape.token_format).numerics
    sum_bits = numerics.sum_bits if on_gpus else FP32_SUM_BITS  # the emulator adds exactly
    bounds = two_level_bounds(
        shape, NUM_DOMAINS, moe.domain, experts, tokens, numerics=numerics, sum_bits=sum_bits
    )
    comparison = compare(y.cpu(), bounds)
    print(
        f"rank {rank}, domain {moe.domain}: {comparison.num_tokens} tokens, "
        f"{comparison.num_wrong_tokens} wrong",
        flush=True,
    )
    are_right = torch.tensor(int(comparison.is_right), device=device)
    dist.all_reduce(are_right, dist.ReduceOp.MIN)
    moe.close()
    if rank == 0:
        print("PASS" if are_right else "FAIL", flush=True)
    dist.destroy_process_group()
    if not are_right:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
