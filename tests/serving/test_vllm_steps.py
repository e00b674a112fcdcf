"""vLLM's modular kernel runs our dispatch, experts and combine as three kernels, emulated."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.activations import Swiglu
from deep_moe.integrations.switch import (
    LOW_LATENCY,
    PATH_VARIABLE,
    TOKENS_VARIABLE,
)
from deep_moe.trial.rank_processes import run_on_ranks
from tests.pairs import formats

vllm = pytest.importorskip("vllm", reason="make test-serving installs it")

from .test_vllm import (  # noqa: E402
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    MAX_TOKENS,
    NAME,
    TOPK,
    Weights,
    checkpoint,
    forward,
    install,
    installed,
    lines,
    load,
    make_runner,
    route,
    tokens,
    world,
)

__all__ = ["installed"]  # a fixture


@pytest.fixture
def in_steps(installed, monkeypatch):
    """The plugin with the option that chooses the steps."""
    monkeypatch.setenv(PATH_VARIABLE, LOW_LATENCY)
    yield installed
    close_steps()


def close_steps() -> None:
    from deep_moe.integrations.vllm import routed_experts

    routed_experts.steps.close()


def called_directly(
    weights: str, arch: str, source: Weights, x: Any, topk_weights: Any, ids: Any
) -> torch.Tensor:
    """By the public API, without vLLM, all experts on one rank."""
    token_format = {"mxfp4": "mxfp8", "fp8": "fp8_128"}.get(weights, "bf16")
    pair = {"weights": formats(weights)["weights"], "token_format": token_format}
    all_to_all = deep_moe.LowLatencyAllToAll(
        None, MAX_TOKENS, HIDDEN, EXPERTS, TOPK, token_format=token_format, device="cpu", arch=arch
    )
    experts = deep_moe.GroupedExperts(
        MAX_TOKENS * TOPK,
        HIDDEN,
        INTERMEDIATE,
        EXPERTS,
        **pair,
        activation=Swiglu(),
        device="cpu",
        arch=arch,
    )
    transformed = deep_moe.transform_weights_for_mega_moe(*source, arch, **pair)
    sent = all_to_all.dispatch(x, ids)
    rows = experts(sent.recv_x, sent.scales, transformed, sent.recv_count)
    y = all_to_all.combine(rows, ids, topk_weights, sent.handle)
    all_to_all.close()
    experts.close()
    return y


@pytest.mark.parametrize(
    ("weights", "arch"),
    [
        ("mxfp4", "sm_90a"),
        ("mxfp4", "sm_100a"),
        ("fp8", "sm_90a"),
        ("bf16", "sm_90a"),
        ("mxfp4 x bf16", "sm_90a"),
    ],
)
def test_vllms_layer_runs_all_three(in_steps, weights, arch, caplog, monkeypatch):
    """Padded rows have expert -1 in every slot. A second call, of another size, and shared experts
    that vLLM runs between the steps."""
    from deep_moe.integrations.vllm.all_to_all import LowLatencyPrepareAndFinalize
    from deep_moe.integrations.vllm.batched_experts import DeepMoEBatchedExperts

    loaded = formats(weights)["weights"]
    if loaded != weights:
        monkeypatch.setenv(TOKENS_VARIABLE, "bf16")
    if weights == "fp8":
        monkeypatch.setenv(TOKENS_VARIABLE, "fp8_128")
    in_steps(arch)
    source = checkpoint(loaded)
    shared = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world() as config:
        runner = make_runner(loaded, shared_experts=shared)
        load(runner, loaded, source)
        kernel = runner.routed_experts.quant_method.moe_kernel
        assert isinstance(kernel.prepare_finalize, LowLatencyPrepareAndFinalize)
        assert isinstance(kernel.fused_experts, DeepMoEBatchedExperts)
        for num_tokens in (5, 7):
            x, logits = tokens(num_tokens)
            topk_weights, ids = route(x, logits, TOPK, True)
            result = forward(runner, config, x, logits)
            with torch.inference_mode():
                routed = called_directly(weights, arch, source, x, topk_weights, ids)
                assert torch.equal(result, shared(x) + routed)
        ids[4:] = -1
        padded = runner.routed_experts.forward_modular(x, topk_weights, ids)
    assert torch.equal(padded[:4], routed[:4])
    assert (padded[4:] == 0).all()
    assert routed.abs().max() > 0.01
    assert lines(caplog) == [f"{NAME}: experts run by deep_moe ({loaded}, low-latency steps)"]


def test_layers_share_the_steps_and_a_load_balancer_permutes_their_experts(in_steps):
    in_steps("sm_90a")
    x, logits = tokens(5)
    order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(1))
    with world() as config:
        runners = [
            make_runner("mxfp4", prefix=name) for name in (NAME, "model.layers.1.mlp.experts")
        ]
        results = []
        for seed, runner in enumerate(runners):
            load(runner, "mxfp4", checkpoint("mxfp4", seed))
            results.append(forward(runner, config, x, logits))
        first, second = (r.routed_experts.quant_method.moe_kernel for r in runners)
        assert first.fused_experts.experts is second.fused_experts.experts
        assert first.prepare_finalize.layer is second.prepare_finalize.layer
        assert not torch.equal(*results)
        for tensor in runners[0].routed_experts.get_expert_weights():
            tensor.copy_(tensor[order].clone())
        assert torch.equal(forward(runners[0], config, x, logits[:, order]), results[0])


def test_what_the_steps_do_not_take_goes_vllms_way(in_steps, caplog):
    in_steps("sm_90a")
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world() as config:
        config.scheduler_config.max_num_batched_tokens = 2048
        make_runner("mxfp4")
    (line,) = lines(caplog)
    assert "experts run by vLLM" in line
    assert line.endswith("num_max_tokens_per_rank must be 1 to 1024; got 2048")


@pytest.mark.parametrize("parallel", ["tp_ep", "dp_ep"])
def test_two_ranks(parallel):
    run_on_ranks(run_two_ranks, 2, "cpu", parallel, start_method="spawn")


def run_two_ranks(device: torch.device, parallel: str) -> None:
    """Every rank compares its own rows with all experts on one rank; then one has no tokens."""
    os.environ[PATH_VARIABLE] = LOW_LATENCY
    rank = torch.distributed.get_rank()
    install(os.environ.__setitem__, "sm_90a")
    source = checkpoint("mxfp4")
    is_dp = parallel == "dp_ep"
    with world(rank=rank, **({"dp": 2} if is_dp else {"tp": 2})) as config:
        runner = make_runner("mxfp4")
        load(runner, "mxfp4", source)
        # Both ranks of tensor parallelism hold the same tokens; of one, the second rank has none.
        for counts in ((3, 6), (4, 0)) if is_dp else ((5, 5), (1, 1)):
            x, logits = tokens(counts[rank], seed=rank if is_dp else 0)
            step = {"num_tokens_across_dp": torch.tensor(counts)} if is_dp else {}
            result = forward(runner, config, x, logits, **step)
            topk_weights, ids = route(x, logits, TOPK, True)
            assert torch.equal(
                result, called_directly("mxfp4", "sm_90a", source, x, topk_weights, ids)
            )
        close_steps()
