"""What is kept from call to call: a later call gets the arguments that a first one would get."""

from __future__ import annotations

import dataclasses
import logging
import threading
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import deep_moe
from deep_moe.activations import Situ
from deep_moe.fused.bounded_cache import BoundedCache
from deep_moe.fused.buffer import SymmBuffer
from deep_moe.fused.call_plan import CallPlan, config_chooser, prepare_call
from deep_moe.fused.call_tensors import with_statistics
from deep_moe.fused.config_chooser import ConfigChooser
from deep_moe.fused.emulated_call import prepare_launch
from deep_moe.fused.options import (
    OPTION_TENSORS,
    CallArguments,
    CallOptions,
    given_tensors,
    without_tensors,
)
from deep_moe.jit.kernel_args import RECEIVED_UNEVENLY
from deep_moe.targets.config import MegaMoEConfig

Weights = tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Calls:
    """Calls that are prepared, not run."""

    def __init__(self, example) -> None:
        self.buffer: SymmBuffer = example.sym_buffer
        self.y: torch.Tensor = example.y
        layer = example.layer
        self.weights: dict[str, Weights] = {
            arch: deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2, arch=arch)
            for arch in ("sm_100a", "sm_90a")
        }
        self.stats = torch.zeros(4, dtype=torch.int32)
        self.masked_ranks = torch.zeros(1, dtype=torch.int32)

    def prepare(
        self, *, y: torch.Tensor | None = None, weights: Weights | None = None, **changes: Any
    ) -> tuple[CallPlan, bytes]:
        """The plan and the kernel's arguments."""
        stats = changes.pop("stats", None)
        options = CallOptions(**changes)
        l1, l2 = weights or self.weights[options.get("arch", "sm_100a")]
        y = self.y if y is None else y
        tensors = {**with_statistics(stats), **given_tensors(options)}
        plan, args = prepare_call(y, l1, l2, self.buffer, tensors, without_tensors(options))
        return plan, bytes(args)

    def prepare_anew(self, **changes: Any) -> tuple[CallPlan, bytes]:
        """As if nothing had been kept."""
        self.buffer.caches.clear()
        return self.prepare(**changes)


@pytest.fixture
def calls(example) -> Calls:
    return Calls(example)


def kinds_of_calls(calls: Calls) -> list[dict[str, Any]]:
    """No two of them may be taken for each other."""
    y = calls.y
    own = calls.weights["sm_100a"]
    other = own.with_tensors([tensor.clone() for tensor in own.tensors])
    swapped = own.with_tensors([*own.tensors[:2], *other.tensors[2:]])
    return [
        {},
        {"y": y[:5]},
        {"y": y[:0]},
        {"y": y[4:]},
        {"y": torch.empty_like(y)},
        {"stats": calls.stats},
        {"stats": torch.zeros_like(calls.stats)},
        {"masked_ranks": calls.masked_ranks},
        {"masked_ranks": torch.zeros_like(calls.masked_ranks)},
        {"weights": other},
        {"weights": swapped},
        {"arch": "sm_90a"},
        {"arch": "sm_90a", "overrides": {"block_m": 64}},
        {"arch": "sm_90a", "overrides": {"block_m": 128}},
        {"arch": "sm_90a", "overrides": {"block_m": 128, "block_m_step": 32}},
        {"overrides": {"block_m": 64}},
        {"overrides": {"block_m": 64, "num_stages": 3}},
        {"activation_clamp": 7.0},
        {"activation_clamp": 7.5},
        {"activation": "swiglu_oai"},
        {"activation": "situ"},
        {"activation": Situ(beta=3.0)},
        {"fast_math": False},
        {"num_sms": 2},
        {"timeout_s": 3.0},
    ]


def test_a_later_call_is_given_the_arguments_of_a_first_one(calls: Calls) -> None:
    kinds = kinds_of_calls(calls)
    first = [calls.prepare_anew(**kind) for kind in kinds]
    assert len(set(first)) == len(kinds)
    calls.prepare_anew()
    for _ in range(2):
        assert [calls.prepare(**kind) for kind in kinds] == first
        assert [calls.prepare(**kind) for kind in reversed(kinds)] == first[::-1]


def test_a_recorded_call_has_a_kernel_of_its_own(calls: Calls) -> None:
    records = torch.zeros(64, dtype=torch.uint8)
    recorder = SimpleNamespace(attach=lambda config: records, capacity=1)
    traces = []
    for own in (None, recorder, None, recorder):
        calls.buffer.recorder = own  # type: ignore[assignment]
        traces.append(calls.prepare()[0].config.trace)
    calls.buffer.recorder = None
    assert traces == [False, True, False, True]


@pytest.mark.parametrize("place", range(4))
def test_views_of_known_weights_are_looked_at(calls: Calls, place: int) -> None:
    """They have the addresses of the known ones."""
    own = calls.weights["sm_100a"]
    calls.prepare()
    tensors = list(own.tensors)
    tensors[place] = tensors[place].view(torch.int16)
    with pytest.raises(TypeError, match=r"l[12]_weights\[[01]\] must be torch\..*got torch.int16"):
        calls.prepare(weights=own.with_tensors(tensors))


def test_uneven_counts_are_not_taken_for_many(calls: Calls) -> None:
    status = calls.buffer.memory.status
    status.received = 3
    even, _ = calls.prepare(y=calls.y[:1])
    status.received = 3 | RECEIVED_UNEVENLY
    uneven, _ = calls.prepare(y=calls.y[:1])
    status.received = 0
    assert even.config.decision.num_tokens < calls.buffer.shape.num_max_tokens_per_rank
    assert even.config.decision.num_tokens == uneven.config.decision.num_tokens


# Values of every option, and what of a call's plan must follow from them.
OPTION_VALUES: dict[str, tuple[Any, Any, str]] = {
    "arch": ("sm_100a", "sm_90a", "config.arch"),
    "num_sms": (2, 4, "config.num_sms"),
    "expected_tokens_per_rank": (0, 16, "config.decision.num_tokens"),
    "overrides": ({"num_stages": 2}, {"num_stages": 3}, "config.num_stages"),
    "timeout_s": (1.0, 2.0, "wait_timeout_ns"),
    "accumulate": (False, True, "config.accumulate"),
    "checked": (False, True, "is_checked"),
    "activation": ("situ", "swiglu_oai", "config.activation"),
    "activation_clamp": (7.0, 7.5, "config.activation"),
    "fast_math": (False, True, "config.fast_math"),
}
WITHOUT_A_PLAN = {"schedule_seed"}  # the emulator asks for it in each call


def test_every_option_has_values_to_try() -> None:
    options = CallOptions.__annotations__ | CallArguments.__annotations__
    assert set(OPTION_VALUES) | WITHOUT_A_PLAN | OPTION_TENSORS.keys() == set(options)


def test_calls_with_masked_ranks_have_kernels_of_their_own(calls: Calls) -> None:
    """Those that `compile_ahead` is asked for by masks_ranks=True."""
    plan, _ = calls.prepare(masked_ranks=calls.masked_ranks)
    other, _ = calls.prepare()
    assert (plan.config.masks_ranks, other.config.masks_ranks) == (True, False)
    assert dataclasses.replace(plan.config, masks_ranks=False) == other.config
    choose = config_chooser(calls.buffer, {}, masks_ranks=True)
    assert choose(plan.config.decision.num_tokens) == plan.config


@pytest.mark.parametrize("name", OPTION_VALUES)
def test_no_option_is_forgotten_by_the_next_call(calls: Calls, name: str) -> None:
    *values, decided = OPTION_VALUES[name]
    calls.buffer.caches.clear()
    seen = []
    for value in (*values, *values):
        weights = calls.weights[value if name == "arch" else "sm_100a"]
        plan, _ = calls.prepare(weights=weights, **{name: value})
        seen.append(attrgetter(decided)(plan))
    assert seen[:2] == seen[2:]
    assert seen[0] != seen[1]


def other_value(value: Any) -> Any:
    """One of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 8
    if isinstance(value, str):
        return f"{value}_"
    return Situ(beta=3.0)  # None, or an activation


CONFIG_FIELDS = [field.name for field in dataclasses.fields(MegaMoEConfig) if field.compare]


@pytest.mark.parametrize("name", CONFIG_FIELDS)
def test_no_field_of_a_config_is_forgotten_by_what_is_kept(calls: Calls, name: str) -> None:
    """Which fields the arguments of a kernel follow from is each target's own affair."""
    plan, _ = calls.prepare()
    value = other_value(getattr(plan.config, name))
    config = dataclasses.replace(plan.config, **{name: value})
    caches = calls.buffer.caches
    assert caches.number_of(config) != plan.config_number
    assert caches.number_of(dataclasses.replace(plan.config)) == plan.config_number


def test_what_chooses_a_config_is_its_key(calls: Calls) -> None:
    """All of its fields: a shape has fields of its own, which are compared with it."""
    chooser = config_chooser(calls.buffer, {})
    for field in dataclasses.fields(ConfigChooser):
        value = other_value(getattr(chooser, field.name))
        other = dataclasses.replace(chooser, **{field.name: value})
        assert other != chooser, field.name


def test_a_later_call_looks_nothing_up_again(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = calls.prepare()

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("worked out a second time")

    for name in ("_make_plan", "_make_args", "check_tensor", "target_of"):
        monkeypatch.setattr(f"deep_moe.fused.call_plan.{name}", refuse)
    assert calls.prepare() == expected
    with pytest.raises(pytest.fail.Exception, match="second time"):
        calls.prepare(y=calls.y[:3])


def test_weights_behind_new_tensors(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller may make views of its weights for each call."""
    expected = calls.prepare()
    monkeypatch.setattr("deep_moe.fused.call_plan._make_args", lambda *_: pytest.fail("made again"))
    for _ in range(2):
        views = tuple(
            tuple(tensor.view_as(tensor) for tensor in pair) for pair in calls.weights["sm_100a"]
        )
        assert calls.prepare(weights=views) == expected


def test_weights_at_the_address_of_freed_ones(calls: Calls) -> None:
    """What was kept for a tensor says nothing wrong of the next one there."""
    l1, l2 = calls.weights["sm_100a"]
    shape = l1[0].shape
    storage = torch.zeros(l1[0].numel() + 4096, dtype=torch.int8)

    def weights(tensor: torch.Tensor) -> Weights:
        assert tensor.data_ptr() == storage.data_ptr()
        return (tensor, l1[1]), l2

    same_form = storage[: l1[0].numel()].view(shape)
    expected = calls.prepare(weights=weights(same_form))
    del same_form
    assert calls.prepare(weights=weights(storage[: l1[0].numel()].view(shape))) == expected

    padded = storage.as_strided(shape, (shape[1] * shape[2] + 1024, shape[2], 1))
    refused = "must have evenly spaced rows"
    with pytest.raises(ValueError, match=refused):
        calls.prepare(weights=weights(padded))
    with pytest.raises(ValueError, match=refused):
        calls.prepare(weights=weights(padded))
    bytes_of_another_type = storage.view(torch.uint8)[: l1[0].numel()].view(shape)
    with pytest.raises(TypeError, match=r"l1_weights\[0\] must be torch.int8; got torch.uint8"):
        calls.prepare(weights=weights(bytes_of_another_type))
    fewer = storage[: l1[0].numel() // 2].view(2, *shape[1:])
    with pytest.raises(ValueError, match=r"l1_weights\[0\] must have shape"):
        calls.prepare(weights=weights(fewer))


def test_what_is_kept_does_not_let_a_shifted_y_through(calls: Calls) -> None:
    values = torch.empty(calls.y.numel() + 8, dtype=torch.bfloat16)
    for first, is_right in ((0, True), (1, False), (8, True), (4, False)):
        y = values[first : first + calls.y.numel()].view_as(calls.y)
        if is_right:
            calls.prepare(y=y)
        else:
            with pytest.raises(ValueError, match="y must start at a multiple of 16 bytes"):
                calls.prepare(y=y)


def test_a_tensor_that_was_given_other_memory(calls: Calls) -> None:
    """The object is the same, the weights are not."""
    l1, l2 = (tuple(tensor.clone() for tensor in pair) for pair in calls.weights["sm_100a"])
    before = calls.prepare(weights=(l1, l2))
    moved = l1[0].clone()
    l1[0].data = moved
    after = calls.prepare(weights=(l1, l2))
    assert after[1] != before[1]
    assert after == calls.prepare(weights=((moved, l1[1]), l2))
    l1[0].data = l1[0].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match=r"l1_weights\[0\] must have contiguous rows"):
        calls.prepare(weights=(l1, l2))


def test_a_call_that_is_prepared_before_another_one_runs(calls: Calls) -> None:
    """As those in a row are in the emulator."""
    others = torch.empty_like(calls.y)
    first, second = (
        prepare_launch(y, *calls.weights["sm_90a"], calls.buffer, {}, CallOptions(arch="sm_90a"))
        for y in (calls.y, others[:5])
    )
    assert (first.args.y, first.args.num_tokens) == (calls.y.data_ptr(), len(calls.y))
    assert (second.args.y, second.args.num_tokens) == (others.data_ptr(), 5)


def test_a_buffer_that_is_made_again(calls: Calls) -> None:
    plan, _ = calls.prepare()
    calls.buffer.close()
    caches = calls.buffer.caches
    assert len(caches.plans) == len(caches.known_tensors) == len(caches.known_forms) == 0
    with pytest.raises(ValueError, match="open buffer"):
        calls.prepare()
    calls.buffer = deep_moe.get_symm_buffer_for_mega_moe(None, 4, 16, 2, 256, 128, device="cpu")
    again = calls.prepare()
    assert again[0] == plan
    assert again == calls.prepare_anew()


def test_a_call_after_a_failed_one_is_refused_until_reset(calls: Calls) -> None:
    expected = calls.prepare()
    calls.buffer.memory.status.code = 2
    with pytest.raises(deep_moe.MegaMoEError, match="do not fit the pool"):
        calls.prepare()
    with pytest.raises(deep_moe.MegaMoEError, match="reset"):
        calls.prepare()
    calls.buffer.reset()
    assert calls.prepare() == expected


def test_expert_ids_are_looked_at_in_every_call(calls: Calls) -> None:
    calls.buffer.topk_idx.zero_()
    calls.prepare()
    calls.buffer.topk_idx[3, 1] = 4
    with pytest.raises(ValueError, match="got 4 for token 3, slot 1"):
        calls.prepare()
    calls.prepare(checked=False)


def test_what_is_kept_is_bounded(calls: Calls) -> None:
    caches = calls.buffer.caches
    caches.plans.capacity, caches.known_tensors.capacity, caches.known_forms.capacity = 3, 1, 2
    kinds = kinds_of_calls(calls)
    first = [calls.prepare_anew(**kind) for kind in kinds]
    for _ in range(2):
        assert [calls.prepare(**kind) for kind in kinds] == first
    assert (len(caches.plans), len(caches.known_tensors), len(caches.known_forms)) == (3, 1, 2)


def test_threads_get_the_arguments_of_their_own_calls(calls: Calls) -> None:
    kinds = kinds_of_calls(calls)
    expected = [calls.prepare_anew(**kind) for kind in kinds]
    caches = calls.buffer.caches
    caches.plans.capacity = 4  # so that threads also make and drop
    caches.known_tensors.capacity = caches.known_forms.capacity = 2
    wrong: list[int] = []
    turn = threading.Lock()  # as calls have it

    def work(first_kind: int) -> None:
        for step in range(150):
            kind = (first_kind + step) % len(kinds)
            with turn:
                if calls.prepare(**kinds[kind]) != expected[kind]:
                    wrong.append(kind)

    threads = [threading.Thread(target=work, args=(7 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_oldest_entry_makes_room() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    assert cache.get("a") is None
    assert cache.put("a", 1) == 1
    cache.put("b", 2)
    cache.put("a", 3)  # no new entry
    assert (cache.get("a"), cache.get("b"), len(cache)) == (3, 2, 2)
    cache.put("c", 4)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (None, 2, 4)
    cache.clear()
    assert cache.get("b") is None


class SeenOperators(TorchDispatchMode):
    """Notes the operators that are called, and calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_later_calls_are_still_operators(example, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever watches operators sees every call."""
    launches: list[object] = []
    monkeypatch.setattr(
        "deep_moe.fused.emulated_call.run_emulated", lambda *_, **__: launches.append(1)
    )
    example()
    with SeenOperators() as seen:
        example()
        example()
    assert seen.names.count("deep_moe.mega_moe.default") == 2
    assert len(launches) == 3


def test_a_later_call_with_fake_tensors_runs_nothing(
    example, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    launches: list[object] = []
    monkeypatch.setattr(
        "deep_moe.fused.emulated_call.run_emulated", lambda *_, **__: launches.append(1)
    )
    example()
    with FakeTensorMode(allow_non_fake_inputs=True):
        example(y=torch.empty_like(example.y))
    assert len(launches) == 1


def test_a_new_kind_of_calls_is_logged_once(calls: Calls, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="deep_moe.fused")
    for _ in range(2):
        plan, _ = calls.prepare(expected_tokens_per_rank=5)
    (message,) = caplog.messages
    assert "about 5 tokens per rank" in message
    assert f"block_m {plan.config.block_m}" in message
