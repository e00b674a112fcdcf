"""What the vLLM adapter decides without vLLM. tests/serving runs the rest, with vLLM."""

from __future__ import annotations

import math
import os
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deep_moe.activations import GeluTanh, Relu2, Situ, Swiglu, SwigluOai, SwigluStep
from deep_moe.errors import DeepMoEError
from deep_moe.integrations import vllm as adapter
from deep_moe.integrations.shared_buffers import LayerSizes
from deep_moe.integrations.shared_steps import check_step_sizes
from deep_moe.integrations.switch import (
    Switch,
    read_num_pool_tokens,
    read_path,
    read_static_scales,
    read_switch,
)
from deep_moe.integrations.unsupported import UnsupportedError
from deep_moe.integrations.vllm.support import check_steps, plan_of

from .vllm_fakes import layer

EP: dict[str, Any] = {"use_ep": True, "ep_size": 4}


def test_a_plan_for_one_rank():
    plan = plan_of(layer(), "mxfp4", "mxfp8", 1)
    assert plan.sizes == LayerSizes(8, 2, 256, 128, "mxfp4", "mxfp8")
    assert plan.activation == Swiglu()
    assert plan[2:] == (1, 1, 33)


@pytest.mark.parametrize(
    ("changes", "tp_size", "num_sharers", "most"),
    [
        ({**EP}, 4, 4, 9),  # all ranks hold the same tokens
        ({**EP, "dp_size": 2}, 2, 2, 17),  # pairs do
        ({**EP, "dp_size": 4}, 1, 1, 33),
        # vLLM itself has given each a share
        ({**EP, "dp_size": 2, "sp_size": 2, "is_sequence_parallel": True}, 2, 1, 17),
    ],
)
def test_ranks_that_hold_the_same_tokens_share_them(changes, tp_size, num_sharers, most):
    plan = plan_of(layer(**changes), "mxfp4", "mxfp8", tp_size)
    assert plan[2:] == (4, num_sharers, most)


def test_slices_of_tensor_parallelism_are_one_rank_each():
    assert plan_of(layer(), "fp8", "mxfp8", 2)[2:] == (1, 1, 33)


@pytest.mark.parametrize(
    ("activation", "changes", "expected"),
    [
        ("relu2_no_mul", {}, Relu2()),
        ("silu", {}, Swiglu(math.inf)),
        ("silu", {"swiglu_limit": 10.0}, Swiglu(10.0)),
        (
            "swigluoai_uninterleave",
            {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0},
            SwigluOai(1.702, 7.0),
        ),
        (
            "situ",
            {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0},
            Situ(4.0, 25.0),
        ),
        ("gelu_tanh", {}, GeluTanh()),
        ("swiglustep", {}, SwigluStep(7.0)),
        ("swiglustep", {"swiglu_limit": 7.0}, SwigluStep(7.0)),
    ],
)
def test_activations_with_their_parameters(activation, changes, expected):
    assert plan_of(layer(activation, **changes), "mxfp4", "mxfp8", 1).activation == expected


@pytest.mark.parametrize(
    ("activation", "changes", "words"),
    [
        ("gelu", {}, "no activation gelu"),
        ("gelu_tanh", {"swiglu_limit": 7.0}, "no activation gelu_tanh, swiglu_limit=7.0"),
        ("swiglustep", {"swiglu_limit": 5.0}, "no activation swiglustep, swiglu_limit=5.0"),
        ("relu2", {}, "no activation relu2"),
        ("silu_no_mul", {}, "no activation silu_no_mul"),
        ("silu", {"swiglu_alpha": 1.702}, "no activation silu, swiglu_alpha=1.702"),
        ("silu", {"swiglu_limit": -1.0}, "clamp must be a positive number"),
        ("swigluoai", {}, "no activation swigluoai"),  # rows of gate and up in turn
        ("swigluoai_uninterleave", {"swiglu_alpha": 1.7, "swiglu_limit": 7.0}, "no activation"),
        ("situ", {"activation_situ_beta": 4.0}, "no activation situ, activation_situ_beta=4.0"),
        ("silu", {"moe_backend": "marlin"}, "moe_backend='marlin' was asked for"),
        ("silu", {"has_bias": True}, "experts have biases"),
        ("silu", {"is_lora_enabled": True}, "LoRA"),
        ("silu", {"in_dtype": "torch.float16"}, "activations are torch.float16"),
        ("silu", {**EP, "pcp_size": 2}, "prefill context parallelism"),
        ("silu", {"dp_size": 2}, "without expert parallelism"),
        ("silu", {**EP, "all2all_backend": "nixl_ep"}, "all2all_backend='nixl_ep'"),
        ("silu", {**EP, "placement_strategy": "round_robin"}, "are placed round_robin"),
        ("silu", {"num_fused_shared_experts": 1}, "shared experts are fused"),
        ("silu", {**EP, "skip_final_all_reduce": True}, "not reduced yet"),
        ("silu", {"apply_router_weight_on_input": True}, "applied to the input"),
        ("silu", {**EP, "ep_size": 3}, "8 experts are unevenly spread over 3 ranks"),
    ],
)
def test_what_it_leaves_to_vllm_it_says_why(activation, changes, words):
    with pytest.raises(UnsupportedError, match=words):
        plan_of(layer(activation, **changes), "mxfp4", "mxfp8", 1)


@pytest.mark.parametrize("version", ["0.32.9", "0.34.0", "1.0", "0.34.0rc1"])
def test_another_vllm_starts_and_one_line_says_that_it_runs_without(version, monkeypatch, caplog):
    monkeypatch.delenv(adapter.SWITCH_VARIABLE, raising=False)
    monkeypatch.setattr("deep_moe.integrations.engine_version.version", lambda _: version)
    monkeypatch.setitem(sys.modules, f"{adapter.__name__}.routed_experts", None)  # not looked at
    adapter.register()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("vllm.deep_moe", "WARNING")
    assert record.getMessage() == (
        "vLLM runs all experts itself, without deep_moe: vllm must be at least 0.33 and older than "
        f"0.34, whose interfaces deep_moe's adapter was written for; got {version}"
    )


@pytest.mark.parametrize(
    "error",
    [
        ImportError("cannot import name 'RoutedExperts'"),
        AttributeError("no attribute 'FusedMoEExpertsModular'"),
        DeepMoEError("another plugin, somebody, replaces vLLM's RoutedExperts"),
    ],
)
def test_a_vllm_that_the_adapter_cannot_join_starts(error, monkeypatch, caplog):
    def install(emulated_arch: str | None) -> None:
        raise error

    module = SimpleNamespace(install=install)
    monkeypatch.delenv(adapter.SWITCH_VARIABLE, raising=False)
    monkeypatch.setattr("deep_moe.integrations.engine_version.version", lambda _: "0.33.0")
    monkeypatch.setitem(sys.modules, f"{adapter.__name__}.routed_experts", module)
    adapter.register()
    assert caplog.messages == [f"vLLM runs all experts itself, without deep_moe: {error}"]


def test_without_the_package_vllm_the_line_says_what_to_install(monkeypatch, caplog):
    def no_version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.delenv(adapter.SWITCH_VARIABLE, raising=False)
    monkeypatch.setattr("deep_moe.integrations.engine_version.version", no_version)
    adapter.register()
    assert "install vllm>=0.33" in caplog.text


def test_switched_off_it_does_not_even_look_for_vllm(monkeypatch):
    monkeypatch.setenv(adapter.SWITCH_VARIABLE, "0")
    adapter.register()


def test_the_switch(monkeypatch):
    for value, expected in (
        ("", Switch(True, None)),
        ("1", Switch(True, None)),
        ("0", Switch(False, None)),
        ("sm_90a", Switch(True, "sm_90a")),
    ):
        monkeypatch.setitem(os.environ, "DEEP_MOE_TEST", value)
        assert read_switch("DEEP_MOE_TEST") == expected
    monkeypatch.setitem(os.environ, "DEEP_MOE_TEST", "off")
    with pytest.raises(ValueError, match=r"DEEP_MOE_TEST must be 1 .* 0 to turn deep_moe off"):
        read_switch("DEEP_MOE_TEST")


def test_the_pool_of_engines_buffers_may_be_bounded(monkeypatch):
    monkeypatch.delenv("DEEP_MOE_NUM_POOL_TOKENS", raising=False)
    assert read_num_pool_tokens() == 24_576
    assert read_num_pool_tokens(default=None) is None
    monkeypatch.setenv("DEEP_MOE_NUM_POOL_TOKENS", "0")
    assert read_num_pool_tokens() is None
    monkeypatch.setenv("DEEP_MOE_NUM_POOL_TOKENS", "768")
    assert read_num_pool_tokens() == 768
    assert plan_of(layer(), "mxfp4", "mxfp8", 1, num_pool_tokens=768).sizes.num_pool_tokens == 768
    monkeypatch.setenv("DEEP_MOE_NUM_POOL_TOKENS", "few")
    with pytest.raises(ValueError, match=r"DEEP_MOE_NUM_POOL_TOKENS must be a number .* got 'few'"):
        read_num_pool_tokens()


def test_layers_run_in_one_kernel_or_in_three_steps(monkeypatch):
    monkeypatch.delenv("DEEP_MOE_VLLM_PATH", raising=False)
    assert read_path() == "fused"
    for value in ("fused", "low_latency"):
        monkeypatch.setenv("DEEP_MOE_VLLM_PATH", value)
        assert read_path() == value
    monkeypatch.setenv("DEEP_MOE_VLLM_PATH", "split")
    with pytest.raises(ValueError, match=r"must be fused .* or low_latency, .* got 'split'"):
        read_path()


def test_which_scales_tokens_get(monkeypatch):
    monkeypatch.delenv("DEEP_MOE_TOKEN_SCALES", raising=False)
    assert not read_static_scales()
    for value, is_static in (("own", False), ("", False), ("checkpoint", True)):
        monkeypatch.setenv("DEEP_MOE_TOKEN_SCALES", value)
        assert read_static_scales() == is_static
    monkeypatch.setenv("DEEP_MOE_TOKEN_SCALES", "static")
    message = r"DEEP_MOE_TOKEN_SCALES must be own .*or checkpoint, .*; got 'static'"
    with pytest.raises(ValueError, match=message):
        read_static_scales()


def test_what_low_latency_steps_do_not_take():
    check_steps(layer(), 1)
    check_steps(layer(**EP), 2)
    with pytest.raises(UnsupportedError, match="ranks hold slices of experts"):
        check_steps(layer(), 2)
    sizes = LayerSizes(8, 2, 256, 128, "mxfp4", "mxfp8")
    check_step_sizes(sizes, 4, 1024)
    for changes, most, words in (
        ({}, 1025, "num_max_tokens_per_rank must be 1 to 1024; got 1025"),
        ({"hidden": 2880}, 32, "hidden must be a positive multiple of 128; got 2880"),
        ({"num_pool_tokens": 100}, 32, "num_pool_tokens must be"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            check_step_sizes(sizes._replace(**changes), 4, most)


def test_gpt_oss():
    plan = plan_of(layer("swigluoai", has_bias=True), "mxfp4", "mxfp8", 1, is_gpt_oss=True)
    assert plan.activation == SwigluOai(1.702, 7.0)
    assert plan.sizes.biases
    for activation, changes in (("silu", {}), ("swigluoai", {"swiglu_limit": 5.0})):
        with pytest.raises(UnsupportedError, match=f"no activation {activation}"):
            plan_of(
                layer(activation, has_bias=True, **changes), "mxfp4", "mxfp8", 1, is_gpt_oss=True
            )


def test_vllm_finds_the_adapter_by_its_entry_point():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    group = text.split('[project.entry-points."vllm.general_plugins"]\n')[1].split("\n\n")[0]
    assert group == 'deep_moe = "deep_moe.integrations.vllm:register"'
