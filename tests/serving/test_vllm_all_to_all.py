"""vLLM's modular kernel and its batched experts between our dispatch and combine, emulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.trial.rank_processes import run_on_ranks

vllm = pytest.importorskip("vllm", reason="make test-serving installs it")

from .test_vllm import (  # noqa: E402
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    MAX_TOKENS,
    TOPK,
    make_runner,
    route,
    world,
)


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (
        (torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) / 16).bfloat16(),
        (torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) / 11).bfloat16(),
    )


def tokens(num_tokens: int, seed: int, topk: int = TOPK) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    topk_weights, ids = route(x, torch.randn(num_tokens, EXPERTS, generator=generator), topk, True)
    return x, topk_weights, ids


def expected(x: Any, topk_weights: Any, ids: Any) -> torch.Tensor:
    w1, w2 = (w.float() for w in weights())
    y = torch.zeros(x.shape)
    for token, (own, scales) in enumerate(zip(ids.tolist(), topk_weights.tolist(), strict=True)):
        for expert, scale in zip(own, scales, strict=True):
            if expert >= 0:
                gate, up = (w1[expert] @ x[token].float()).chunk(2)
                y[token] += scale * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return y


def make_kernel(layer: Any, quant_config: Any = None) -> Any:
    """vLLM's kernel, with its batched experts in plain PyTorch."""
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.experts import fused_batched_moe
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel

    from deep_moe.integrations.vllm.all_to_all import LowLatencyPrepareAndFinalize

    # It asks a GPU's stream.
    fused_batched_moe._is_capturing_or_compiling = lambda: False

    class Experts(fused_batched_moe.NaiveBatchedExperts):
        def activation(self, activation: Any, output: Any, rows: Any) -> None:
            gate, up = rows.float().chunk(2, dim=-1)  # vLLM's own is a compiled operator
            output.copy_(torch.nn.functional.silu(gate) * up)

    moe = make_runner("bf16").moe_config
    experts = Experts(
        moe, quant_config or FUSED_MOE_UNQUANTIZED_CONFIG, MAX_TOKENS, layer.shape.num_ranks
    )
    return FusedMoEKernel(LowLatencyPrepareAndFinalize(layer), experts)


def apply(kernel: Any, own: slice, call: tuple[torch.Tensor, ...], **options: Any) -> torch.Tensor:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    x, topk_weights, ids = call
    w1, w2 = (w[own].contiguous() for w in weights())
    # Of global ids to local ones, as vLLM has it: tokens go by the global ones.
    expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
    expert_map[own] = torch.arange(w1.shape[0], dtype=torch.int32)
    with torch.inference_mode():
        return kernel.apply(
            hidden_states=x,
            w1=w1,
            w2=w2,
            topk_weights=topk_weights,
            topk_ids=ids,
            activation=MoEActivation.SILU,
            global_num_experts=EXPERTS,
            expert_map=expert_map,
            apply_router_weight_on_input=options.pop("on_input", False),
            shared_experts=None,
            shared_experts_input=None,
        )


def make_layer(group: Any = None, topk: int = TOPK, **options: Any) -> Any:
    return deep_moe.LowLatencyAllToAll(
        group,
        MAX_TOKENS,
        HIDDEN,
        EXPERTS,
        topk,
        device="cpu",
        **{"token_format": "bf16", **options},
    )


def close(result: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(result.float(), wanted, rtol=0.02, atol=0.02)


def test_vllms_batched_experts_run_between_dispatch_and_combine():
    with world():
        layer = make_layer()
        kernel = make_kernel(layer)
        call = tokens(5, 0)
        call[2][3, 1] = -1  # a slot that is not used
        for again in (call, tokens(7, 1)):
            assert close(apply(kernel, slice(None), again), expected(*again))
        layer.close()


def test_weights_on_the_input_count_once():
    with world():
        layer = make_layer(topk=1)
        kernel = make_kernel(layer)
        x, topk_weights, ids = tokens(5, 2, topk=1)
        result = apply(kernel, slice(None), (x, topk_weights, ids), on_input=True)
        weighted = x * topk_weights.bfloat16()
        assert close(result, expected(weighted, torch.ones_like(topk_weights), ids))
        layer.close()


def test_what_does_not_go_together_is_refused():
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    with world():
        layer = make_layer(token_format="fp8_128")
        kernel = make_kernel(layer)
        with pytest.raises(
            ValueError, match="made with token_format='bf16' for these experts; got one"
        ):
            apply(kernel, slice(None), tokens(3, 0))
        steps = kernel.prepare_finalize
        x, topk_weights, ids = tokens(3, 0)
        fp8 = FusedMoEQuantConfig.make(torch.float8_e4m3fn, block_shape=[128, 128])
        prepared = steps.prepare(x, topk_weights, ids, EXPERTS, None, False, fp8)
        assert prepared[0].dtype == torch.float8_e4m3fn
        assert prepared[1].dtype == torch.float32
        for arguments, words in (
            ((EXPERTS + 1, None, False, fp8), f"num_experts must be {EXPERTS}.* got {EXPERTS + 1}"),
            ((EXPERTS, None, True, fp8), "must be False for tokens of several experts"),
            (
                (EXPERTS, None, False, FusedMoEQuantConfig.make(torch.int8)),
                r"BF16, or in FP8 .* got quant_dtype torch\.int8",
            ),
        ):
            with pytest.raises(ValueError, match=words):
                steps.prepare(x, topk_weights, ids, *arguments)
        layer.close()


def test_two_ranks():
    run_on_ranks(run_two_ranks, 2, "cpu", start_method="spawn")


def run_two_ranks(device: torch.device) -> None:
    """Each rank has its own tokens, not equally many or none, and half of the experts."""
    rank = torch.distributed.get_rank()
    with world(rank=rank, dp=2):
        layer = make_layer(torch.distributed.group.WORLD)
        kernel = make_kernel(layer)
        own = slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)
        for seed, counts in enumerate(((3, 5), (4, 0))):
            call = tokens(counts[rank], 10 * seed + rank)
            assert close(apply(kernel, own, call), expected(*call))
        layer.close()
