"""vLLM's modular kernel and experts of its standard format between the dispatch and combine of many
tokens, emulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.trial.rank_processes import run_on_ranks

vllm = pytest.importorskip("vllm", reason="make test-serving installs it")

from .test_vllm import EXPERTS, HIDDEN, MAX_TOKENS, TOPK, make_runner, world  # noqa: E402
from .test_vllm_all_to_all import apply, close, expected, tokens  # noqa: E402

MAX_ROWS = 256


def make_layer(group: Any = None, topk: int = TOPK, **options: Any) -> Any:
    sizes = (MAX_TOKENS, HIDDEN, EXPERTS, topk, MAX_ROWS)
    return deep_moe.AllToAll(group, *sizes, expert_alignment=8, device="cpu", **options)


def make_kernel(layer: Any, *, reduces: bool = False) -> Any:
    """vLLM's kernel around experts in plain PyTorch. reduces: they apply the weights that they are
    given, as most of vLLM's do; others leave that to the last step."""
    from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.experts.fused_batched_moe import NaiveBatchedExperts
    from vllm.model_executor.layers.fused_moe.modular_kernel import (
        FusedMoEActivationFormat,
        FusedMoEExpertsModular,
        FusedMoEKernel,
    )

    from deep_moe.integrations.vllm.many_tokens import ThroughputPrepareAndFinalize

    class Experts(NaiveBatchedExperts):
        def __init__(self) -> None:
            FusedMoEExpertsModular.__init__(
                self, make_runner("bf16").moe_config, FUSED_MOE_UNQUANTIZED_CONFIG
            )

        @staticmethod
        def activation_format() -> FusedMoEActivationFormat:
            return FusedMoEActivationFormat.Standard

        def finalize_weight_and_reduce_impl(self) -> Any:
            if reduces:
                return topk_weight_and_reduce.TopKWeightAndReduceNoOP()
            return topk_weight_and_reduce.TopKWeightAndReduceDelegate()

        def workspace_shapes(self, rows: int, _: int, hidden: int, topk: int, *__: Any) -> Any:
            assert topk == 1
            return (1,), (1,), (rows, hidden) if reduces else (rows, topk, hidden)

        def apply(self, output: Any, hidden_states: Any, w1: Any, w2: Any, **given: Any) -> None:
            ids, weights = given["topk_ids"], given["topk_weights"]
            assert ids.shape == weights.shape == (hidden_states.shape[0], 1)
            output.fill_(torch.nan)  # rows of no expert are nobody's
            found = torch.zeros(w1.shape[0], dtype=torch.int32)
            for row, (expert, weight) in enumerate(zip(ids[:, 0], weights[:, 0], strict=True)):
                if expert < 0:
                    continue
                local = int(given["expert_map"][expert])
                assert local >= 0, "a row of another rank's expert"
                found[local] += 1
                gate, up = (w1[local].float() @ hidden_states[row].float()).chunk(2)
                y = w2[local].float() @ (torch.nn.functional.silu(gate) * up)
                output[row] = y * weight if reduces else y
            assert torch.equal(found, given["expert_tokens_meta"].expert_num_tokens)

    return FusedMoEKernel(ThroughputPrepareAndFinalize(layer), Experts())


@pytest.mark.parametrize("reduces", [False, True])
def test_vllms_experts_run_between_dispatch_and_combine(reduces):
    with world():
        layer = make_layer()
        kernel = make_kernel(layer, reduces=reduces)
        call = tokens(5, 0)
        call[2][3, 1] = -1  # a slot that is not used
        for again in (call, tokens(7, 1)):
            assert close(apply(kernel, slice(None), again), expected(*again))
        layer.close()


def test_the_steps_by_the_names_of_a_known_document():
    """Ids that come are of all ranks' experts, weights count once, in the last step, and what is
    handed on needs no host: sizes are fixed, and rows of none are told by their id."""
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceDelegate,
    )

    with world():
        layer = make_layer()
        steps = make_kernel(layer).prepare_finalize
        hidden_states, topk_weights, topk_ids = tokens(5, 0)
        receiver = steps.prepare_async(
            a1=hidden_states,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            num_experts=EXPERTS,
            expert_map=None,
            apply_router_weight_on_input=False,
            quant_config=FUSED_MOE_UNQUANTIZED_CONFIG,
        )
        expert_x, expert_x_scale, _, expert_topk_ids, recv_weights = receiver()
        assert expert_x_scale is None
        assert expert_x.shape == (MAX_ROWS, HIDDEN)
        came = expert_topk_ids[expert_topk_ids >= 0]
        assert came.sort().values.tolist() == topk_ids.flatten().sort().values.tolist()
        assert recv_weights.unique().tolist() == [1]
        output = torch.empty_like(hidden_states)
        receiver = steps.finalize_async(
            output=output,
            fused_expert_output=3 * expert_x,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            apply_router_weight_on_input=False,
            weight_and_reduce_impl=TopKWeightAndReduceDelegate(),
        )
        receiver()
        assert close(output, 3 * hidden_states.float() * topk_weights.sum(dim=1, keepdim=True))
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
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceContiguous,
        TopKWeightAndReduceNoOP,
    )

    with world():
        layer = make_layer(token_format="fp8_128")
        kernel = make_kernel(layer)
        with pytest.raises(ValueError, match="made with token_format='bf16' for these experts"):
            apply(kernel, slice(None), tokens(3, 0))
        steps = kernel.prepare_finalize
        x, topk_weights, ids = tokens(3, 0)
        fp8 = FusedMoEQuantConfig.make(torch.float8_e4m3fn, block_shape=[128, 128])
        rows, scales, *_ = steps.prepare(x, topk_weights, ids, EXPERTS, None, False, fp8)
        assert (rows.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
        for arguments, words in (
            ((EXPERTS + 1, None, False, fp8), f"num_experts must be {EXPERTS}.* got {EXPERTS + 1}"),
            ((EXPERTS, None, True, fp8), "must be False for tokens of several experts"),
        ):
            with pytest.raises(ValueError, match=words):
                steps.prepare(x, topk_weights, ids, *arguments)
        y = torch.zeros(MAX_ROWS, HIDDEN, dtype=torch.bfloat16)
        with pytest.raises(TypeError, match="got TopKWeightAndReduceContiguous"):
            steps.finalize(x, y, topk_weights, ids, False, TopKWeightAndReduceContiguous())
        steps.finalize(x, y, topk_weights, ids, False, TopKWeightAndReduceNoOP())
        with pytest.raises(RuntimeError, match="finalize must follow a prepare"):
            steps.finalize(x, y, topk_weights, ids, False, TopKWeightAndReduceNoOP())
        layer.close()


def test_rows_that_came_as_bf16_are_quantized_by_vllm(monkeypatch):
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    from deep_moe.integrations.vllm import many_tokens

    given = []

    def quantize(*arguments: Any, is_scale_swizzled: bool) -> Any:
        given.append(arguments)
        return "values", "scales"

    monkeypatch.setattr(many_tokens, "moe_kernel_quantize_input", quantize)
    by_row = FusedMoEQuantConfig.make(torch.float8_e4m3fn, per_act_token_quant=True)
    with world():
        layer = make_layer()
        steps = many_tokens.ThroughputPrepareAndFinalize(layer)
        call = (*tokens(5, 0), EXPERTS, None, False)
        assert steps.prepare(*call, by_row)[:2] == ("values", "scales")
        ((rows, *rest),) = given
        assert rows.shape == (MAX_ROWS, HIDDEN)
        assert rows.dtype == torch.bfloat16
        assert rest == [None, torch.float8_e4m3fn, True, None]
        # Experts that quantize for themselves.
        assert steps.prepare(*call, by_row, True)[0].dtype == torch.bfloat16
        with pytest.raises(ValueError, match="a scale for each row or block, or a1_scale"):
            steps.prepare(*call, FusedMoEQuantConfig.make(torch.float8_e4m3fn))
        layer.close()


def test_two_batches_at_once(monkeypatch):
    """Each has rows and weights of its own. Between vLLM's calls that change streams there is what
    travels, and nothing else."""
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
    from vllm.v1.worker import ubatching

    calls: list[tuple[int, str]] = []
    batch = [0]
    monkeypatch.setattr(ubatching, "dbo_current_ubatch_id", lambda: batch[0])
    for name in (
        "dbo_yield_and_switch_from_compute_to_comm",
        "dbo_switch_to_compute_sync",
        "dbo_switch_to_compute",
        "dbo_switch_to_comm",
        "dbo_yield_and_switch_from_comm_to_compute",
    ):
        monkeypatch.setattr(ubatching, name, lambda name=name: calls.append((batch[0], name)))
    with world():
        layer = make_layer()
        steps = make_kernel(layer).prepare_finalize
        for name in ("dispatch", "combine"):
            own = getattr(layer, name)

            def called(*given: Any, name: str = name, own: Any = own, **options: Any) -> Any:
                calls.append((batch[0], name))
                return own(*given, **options)

            monkeypatch.setattr(layer, name, called)
        given = [tokens(5, 0), tokens(7, 1)]
        outs = [torch.empty_like(x) for x, *_ in given]
        receivers: list[Any] = []
        for batch[0], (x, weights, ids) in enumerate(given):
            receivers.append(
                steps.prepare_async(
                    x, weights, ids, EXPERTS, None, False, FUSED_MOE_UNQUANTIZED_CONFIG
                )
            )
        for batch[0], (_, weights, ids) in enumerate(given):
            rows = receivers[batch[0]]()[0]
            hand_over = steps.finalize_async(
                outs[batch[0]], rows, weights, ids, False, TopKWeightAndReduceNoOP()
            )
            hand_over()
        sent = [
            "dbo_yield_and_switch_from_compute_to_comm",
            "dispatch",
            "dbo_switch_to_compute_sync",
        ]
        returned = [
            "dbo_yield_and_switch_from_compute_to_comm",
            "combine",
            "dbo_switch_to_compute",
            "dbo_switch_to_comm",
            "dbo_yield_and_switch_from_comm_to_compute",
        ]
        assert calls == [(i, name) for names in (sent, returned) for i in (0, 1) for name in names]
        for out, (x, weights, _) in zip(outs, given, strict=True):
            assert close(out, x.float() * weights.float().sum(dim=1, keepdim=True))
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
