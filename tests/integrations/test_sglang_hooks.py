"""What the SGLang adapter does without SGLang. tests/serving runs the rest, with SGLang's files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deep_moe.activations import Swiglu
from deep_moe.errors import DeepMoEError
from deep_moe.integrations import served_experts
from deep_moe.integrations import sglang as adapter
from deep_moe.integrations.sglang import engine, hooks, loading

from .test_served_experts import CPU, IDS, SIZES, ServedExperts, source


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("SGLang's own function was called")


@pytest.fixture
def experts() -> Iterator[Any]:
    """A layer that was taken over."""
    served = ServedExperts(SIZES, Swiglu(7.0), None, CPU, 8, "sm_100a")
    l1, l2 = source(0)
    served.load(l1, l2)
    layer = torch.nn.Module()
    layer.layer_id = 3
    for name, tensor in zip(loading.TENSORS, (*l1, *l2), strict=True):
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    loading.await_replacement(layer, served)
    layer.__dict__[hooks._STATE] = served
    yield layer
    served_experts.buffers.close()


def call(experts: Any, x: torch.Tensor, ids: Any, weights: Any, **options: Any) -> torch.Tensor:
    given = {
        "hidden_size": 256,
        "intermediate_size": 128,
        "top_k": 2,
        "num_tokens": x.shape[0],
        "activation_clamp": 7.0,
    }
    return hooks.run(never, experts, x, ids, weights, **{**given, **options})


def test_it_runs_what_it_took_over(experts, monkeypatch):
    monkeypatch.setattr(engine, "tokens_of_ranks", lambda: [3, 8])
    x = torch.randn(3, 256).bfloat16()
    weights = torch.full((3, 2), 0.5)
    y = call(experts, x, IDS.short(), weights, routed_scaling_factor=2.0)
    expected = torch.empty_like(x)
    hooks.served_of(experts).run(expected, x, IDS, 2 * weights)
    assert torch.equal(y, expected)


@pytest.mark.parametrize(
    ("of_ranks", "expected"),
    [(None, 3), ([3, 8], 6), ([3, 0, 0, 0], 1), ([0, 8], 4), ([], 3)],
)
def test_ranks_with_unequal_tokens_expect_their_mean(experts, of_ranks, expected, monkeypatch):
    told = []
    run = ServedExperts.run

    def noting(self: ServedExperts, *call: Any, expected_tokens_per_rank: int | None) -> None:
        told.append(expected_tokens_per_rank)
        run(self, *call, expected_tokens_per_rank=expected_tokens_per_rank)

    monkeypatch.setattr(engine, "tokens_of_ranks", lambda: of_ranks)
    monkeypatch.setattr(ServedExperts, "run", noting)
    call(experts, torch.zeros(3, 256).bfloat16(), IDS, torch.ones(3, 2))
    assert told == [expected]


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_padding_behind_a_ranks_tokens_is_left_out(experts, num_tokens, monkeypatch):
    """SGLang pads what it captures."""
    monkeypatch.setattr(engine, "tokens_of_ranks", lambda: None)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights = torch.tensor([[0.5, 1.0], [2.0, 0.25], [1.0, 1.0]])
    y = call(experts, x, IDS, weights, num_tokens=num_tokens)
    own = x[:num_tokens]
    expected = torch.empty_like(own)
    hooks.served_of(experts).run(expected, own, IDS[:num_tokens], weights[:num_tokens])
    assert torch.equal(y, expected)


def test_an_idle_rank_calls_without_routing(experts, monkeypatch):
    monkeypatch.setattr(engine, "tokens_of_ranks", lambda: None)
    assert call(experts, torch.empty(0, 256).bfloat16(), None, None).shape == (0, 256)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden_size": 512}, "hidden_size must be 256, .* got 512"),
        ({"num_shared_experts": 1}, "num_shared_experts must be 0, .* got 1"),
        ({"routing_in_buffer": True}, "routing_in_buffer must be False, .* got True"),
        ({"activation_clamp": None}, r"activation_clamp must be that of Swiglu\(clamp=7.0\)"),
    ],
)
def test_a_call_for_something_else_is_refused(experts, options, words):
    with pytest.raises(ValueError, match=words):
        call(experts, torch.zeros(3, 256).bfloat16(), IDS, torch.ones(3, 2), **options)


def test_other_layers_are_sglangs():
    other, moe = torch.nn.Module(), SimpleNamespace(experts=torch.nn.Module())
    assert hooks.is_ready(lambda experts: experts is other, other)
    assert hooks.should_use_mega_moe(lambda *given: given == (moe, 1), moe, 1)
    assert hooks.should_fuse_shared_experts(lambda given: given is moe, moe)
    assert hooks.should_use_gate(lambda *given: given == (moe, 1, 2), moe, 1, 2)
    assert hooks.run(lambda *given, top_k: (given, top_k), other, 1, 2, 3, top_k=4) == (
        (other, 1, 2, 3),
        4,
    )


def test_memory_that_another_gave_a_parameter_is_refused(experts):
    experts.w2_weight.data = experts.w2_weight.data.clone()
    with pytest.raises(DeepMoEError, match=r"^layer 3: w2_weight has other memory .* not laid out"):
        call(experts, torch.zeros(3, 256).bfloat16(), IDS, torch.ones(3, 2))
    with pytest.raises(DeepMoEError, match=r"^layer 3: w2_weight has other memory"):
        hooks.build(never, experts)


def test_our_layers_take_no_other_way(experts):
    moe = SimpleNamespace(experts=experts)
    assert hooks.is_ready(never, experts)
    assert hooks.should_use_mega_moe(never, moe, None)
    assert not hooks.should_fuse_shared_experts(never, moe)
    assert not hooks.should_use_gate(never, moe, None, None)
    assert hooks.build(never, experts) is None


@pytest.mark.parametrize("version", ["0.5.22.post1", "0.5.24", "0.6.0"])
def test_another_sglang_starts_and_one_line_says_that_it_runs_without(version, monkeypatch, caplog):
    monkeypatch.delenv(adapter.SWITCH_VARIABLE, raising=False)
    monkeypatch.setattr("deep_moe.integrations.engine_version.version", lambda _: version)
    monkeypatch.setattr(hooks, "install", never)
    adapter.register()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("sglang.deep_moe", "WARNING")
    assert record.getMessage() == (
        "SGLang runs all experts itself, without deep_moe: sglang must be at least 0.5.23 and "
        f"older than 0.5.24, whose interfaces deep_moe's adapter was written for; got {version}"
    )


def test_an_sglang_that_the_adapter_cannot_join_starts(monkeypatch, caplog):
    def install(emulated_arch: str | None) -> None:
        raise ImportError("cannot import name 'HookType'")

    monkeypatch.delenv(adapter.SWITCH_VARIABLE, raising=False)
    monkeypatch.setattr("deep_moe.integrations.engine_version.version", lambda _: "0.5.23")
    monkeypatch.setattr(hooks, "install", install)
    adapter.register()
    assert caplog.messages == [
        "SGLang runs all experts itself, without deep_moe: cannot import name 'HookType'"
    ]


def test_sglang_finds_the_adapter_by_its_entry_point():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    group = text.split('[project.entry-points."sglang.srt.plugins"]\n')[1].split("\n\n")[0]
    assert group == 'deep_moe = "deep_moe.integrations.sglang:register"'
