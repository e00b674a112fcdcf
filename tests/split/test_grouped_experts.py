"""Experts on rows that are there: both layouts, all formats, against the reference."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import GroupedExperts
from deep_moe.activations import Situ
from deep_moe.errors import MegaMoEError
from deep_moe.fused.bounded_cache import BoundedCache
from deep_moe.trial.comparison import compare
from deep_moe.trial.grouped_calls import (
    COUNTS,
    UNTOUCHED,
    Case,
    exact_case,
    random_case,
    run_behind_each_other,
    run_padded,
)
from tests.pairs import formats, usual_pairs

# The package's name is the function.
grouped_experts = importlib.import_module("deep_moe.split.grouped_experts")

ARCHS = ("sm_90a", "sm_100a")
each_kernel = pytest.mark.parametrize(
    ("arch", "weights"),
    [(name, pair) for name in ARCHS for pair in usual_pairs(name)],
)


@each_kernel
def test_rows_of_each_expert_are_right(arch: str, weights: str) -> None:
    case = random_case(arch, **formats(weights))
    assert compare(run_padded(case), case.bounds()).is_right


@pytest.mark.parametrize("arch", ARCHS)
def test_both_layouts_give_the_same_bits(arch: str) -> None:
    case = random_case(arch)
    assert torch.equal(run_padded(case), run_behind_each_other(case))


@pytest.mark.parametrize("token_format", ["fp8_128_ue8m0", "fp8_128_pow2"])
@pytest.mark.parametrize("arch", ARCHS)
def test_scales_of_128_values(arch: str, token_format: str) -> None:
    # Of four blocks, so that there are whole words of bytes.
    case = random_case(arch, (9, 40), token_format=token_format, hidden=512)
    assert compare(run_padded(case, token_format=token_format), case.bounds()).is_right


def test_float_scales_of_any_size() -> None:
    case = random_case("sm_90a", weights="fp8", token_format="fp8_128")
    assert case.scales is not None
    assert (case.scales.view(torch.int32) & 0x7FFFFF != 0).float().mean() > 0.9
    assert compare(run_padded(case), case.bounds()).is_right


def test_float_scales_in_the_other_layout_and_a_small_pool() -> None:
    """Where rows are neighbours' of another expert's, and places of the pool are used again."""
    shape = {"weights": "fp8", "token_format": "fp8_128", "num_pool_tokens": 384}
    case = exact_case("sm_90a", (310, 0, 190, 70), **shape)
    y = run_behind_each_other(case, num_pool_tokens=384)
    assert compare(y, case.exact()).is_exact


@pytest.mark.parametrize(
    ("arch", "weights"), [("sm_100a", "fp8"), ("sm_103a", "mxfp4"), ("sm_90a", "mxfp4")]
)
def test_who_does_not_take_float_scales_of_any_size(arch: str, weights: str) -> None:
    words = (
        rf"token_format must be 'mxfp8' or .* with {weights} weights on {arch}; got 'fp8_128': its"
    )
    with pytest.raises(ValueError, match=words):
        GroupedExperts(
            8, 256, 128, 2, weights=weights, token_format="fp8_128", arch=arch, device="cpu"
        )


@pytest.mark.parametrize("arch", ARCHS)
def test_biases_and_another_activation(arch: str) -> None:
    case = random_case(arch, biases=True)
    activation = Situ()
    bounds = case.bounds(activation=activation)
    assert compare(run_padded(case, activation=activation), bounds).is_right


@pytest.mark.slow
@each_kernel
def test_a_small_pool_is_used_again(arch: str, weights: str) -> None:
    case = exact_case(arch, (310, 0, 190, 70), **formats(weights), num_pool_tokens=384)
    y = run_behind_each_other(case, num_pool_tokens=384)
    assert compare(y, case.exact()).is_exact


def test_sm_103a() -> None:
    case = exact_case("sm_103a", (3, 20))
    assert compare(run_padded(case), case.exact()).is_exact


@pytest.mark.parametrize("arch", ARCHS)
def test_a_call_finds_nothing_of_the_one_before(arch: str) -> None:
    cases = [exact_case(arch, counts) for counts in (COUNTS, (0, 108, 0, 0), (1, 1, 1, 1), COUNTS)]
    with cases[0].experts() as experts:
        for case in cases:
            assert compare(run_padded(case, 120, experts), case.exact()).is_exact
            assert compare(run_behind_each_other(case, 16, experts), case.exact()).is_exact


@each_kernel
def test_one_layer_s_weights_with_kernels_for_few_and_many_rows(arch: str, weights: str) -> None:
    """The very tensors of the call before, with another tile: tensor maps follow from it."""
    case = exact_case(arch, **formats(weights))
    given_weights = case.weights()
    x, scales, begin = case.behind_each_other(8)
    counts = torch.tensor(case.counts, dtype=torch.int32)
    tiles = []
    with case.experts() as experts:
        for expected_rows in (1, sum(COUNTS), 1):
            y = experts(
                x,
                scales,
                expert_count=counts,
                expert_begin=begin,
                expected_rows=expected_rows,
                **given_weights,
            )
            rows = [y[b : b + n] for b, n in zip(begin.tolist(), case.counts, strict=True)]
            assert compare(torch.cat(rows), case.exact()).is_exact
            assert experts._plan is not None
            tiles.append(experts._plan.config.block_m)
    assert tiles[0] == tiles[2] != tiles[1]


def test_no_rows_at_all() -> None:
    case = exact_case("sm_90a", (0, 0))
    assert run_padded(case).shape == (0, case.shape.hidden)
    empty = torch.empty(0, case.shape.hidden, dtype=torch.float8_e4m3fn)
    scales = torch.empty(0, case.shape.hidden // 128, dtype=torch.int32)
    none = torch.zeros(2, dtype=torch.int32)
    with case.experts() as experts:
        y = experts(empty, scales, expert_count=none, expert_begin=none, **case.weights())
    assert y.shape == empty.shape


def test_as_a_function() -> None:
    case = exact_case("sm_100a", (5, 9))
    x, scales = case.padded(12)
    y = deep_moe.grouped_experts(
        x,
        scales,
        expert_count=torch.tensor(case.counts, dtype=torch.int32),
        intermediate_hidden=case.shape.intermediate_hidden,
        max_rows=14,
        arch="sm_100a",
        **case.weights(),
    )
    assert compare(torch.cat([y[0, :5], y[1, :9]]), case.exact()).is_exact


# Two values of all that a kept object is made from.
KEPT_BY: dict[str, tuple[Any, Any]] = {
    "max_rows": (7, 8),
    "hidden": (128, 256),
    "intermediate_hidden": (128, 256),
    "num_local_experts": (2, 3),
    "weights": ("mxfp4", "fp8"),
    "biases": (False, True),
    "token_format": ("mxfp8", "fp8_128_pow2"),
    "activation": (Situ(beta=1.0), Situ(beta=2.0)),
    "activation_clamp": (7.0, 8.0),
    "fast_math": (True, False),
    "num_pool_tokens": (384, 768),
    "device": ("cpu", "meta"),
    "num_sms": (2, 4),
    "arch": ("sm_90a", "sm_100a"),
    "overrides": ({"num_stages": 2}, {"num_stages": 3}),
    "timeout_s": (1.0, 2.0),
    "checked": (True, False),
    "schedule_seed": (1, 2),
}
OF_TENSORS = ("hidden", "num_local_experts", "weights", "biases", "device")


def test_every_argument_of_a_kept_object_has_values_to_try() -> None:
    assert list(inspect.signature(GroupedExperts).parameters) == list(KEPT_BY)


@pytest.mark.parametrize("name", KEPT_BY)
def test_no_argument_is_forgotten_by_the_function(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It keeps an object for each kind of arguments."""

    class Recorder:
        def __init__(self, *sizes: int, **given: Any) -> None:
            self.given = dict(zip(KEPT_BY, sizes, strict=False)) | given

        def __call__(self, *_: Any, **__: Any) -> dict[str, Any]:
            return self.given

    monkeypatch.setattr(grouped_experts, "GroupedExperts", Recorder)
    monkeypatch.setattr(grouped_experts, "_kept", BoundedCache(16))

    weights = deep_moe.empty_weights_for_mega_moe(1, 128, 128)

    def call(value: Any) -> Any:
        own = {key: values[0] for key, values in KEPT_BY.items()} | {name: value}
        device = own["device"]
        made: Any = deep_moe.grouped_experts(
            torch.empty(4, own["hidden"], device=device),
            None,
            replace(weights, weights=own["weights"]),
            torch.empty(own["num_local_experts"], device=device),
            l1_bias=torch.empty(0) if own["biases"] else None,
            **{key: kept for key, kept in own.items() if key not in OF_TENSORS},
        )
        return str(made[name]) if name == "device" else made[name]

    first, second = KEPT_BY[name]
    assert [call(value) for value in (first, second, first)] == [first, second, first]


def given(case: Case) -> dict[str, Any]:
    x, scales = case.padded(20)
    counts = torch.tensor(case.counts, dtype=torch.int32)
    return {"x": x, "scales": scales, "expert_count": counts, **case.weights()}


def check_rows_outside(arch: str) -> None:
    """Counts that name rows behind an expert's, or behind x, stop the call in words."""
    case = exact_case(arch, (5, 9))
    arguments = given(case)
    x, scales, begin = case.behind_each_other(8)
    counts = arguments.pop("expert_count")
    for more, words in (
        ({"expert_count": counts + torch.tensor([16, 0])}, "0, 21 rows"),
        ({"expert_count": counts - torch.tensor([0, 10])}, "1, -1 rows"),
        (
            {"x": x, "scales": scales, "expert_count": counts, "expert_begin": begin + len(x) - 12},
            r"\d, \d rows",
        ),
    ):
        with case.experts() as experts:
            out = torch.full((more.get("x", arguments["x"])).shape, UNTOUCHED).bfloat16()
            more = {name: t.int() if name.startswith("expert") else t for name, t in more.items()}
            match = f"must name rows of x; those of local expert {words}, do not"
            with pytest.raises(MegaMoEError, match=match):
                experts(**{**arguments, **more}, out=out)
            assert (out == UNTOUCHED).all()
            with pytest.raises(MegaMoEError, match="call its reset"):
                experts(**arguments, expert_count=counts)
            experts.reset()
            y = experts(**arguments, expert_count=counts)
        assert compare(torch.cat([y[0, :5], y[1, :9]]), case.exact()).is_exact


def test_rows_outside() -> None:
    check_rows_outside("sm_90a")


def test_more_rows_than_there_is_room_for() -> None:
    case = exact_case("sm_100a", (5, 9))
    arguments = given(case)
    arguments["expert_count"] = torch.tensor([7, 9], dtype=torch.int32)
    with (
        case.experts() as experts,
        pytest.raises(MegaMoEError, match=r"at most max_rows \(14\) .*; got 1[56]"),
    ):
        experts(**arguments)


def check_call_behind_a_failed_one(arch: str) -> None:
    """It was launched before the host knew, and must not compute with what that one has left."""
    case = exact_case(arch, (5, 9))
    arguments = given(case)
    wrong = {**arguments, "expert_count": torch.tensor([21, 9], dtype=torch.int32)}
    with case.experts() as experts:
        with pytest.raises(MegaMoEError, match="must name rows"):
            experts(**wrong)
        experts._work_space.raise_if_unusable = lambda: None
        out = torch.full(arguments["x"].shape, UNTOUCHED, dtype=torch.bfloat16)
        with pytest.raises(MegaMoEError, match="must name rows"):
            experts(**arguments, out=out)
    assert (out == UNTOUCHED).all()


def test_a_call_behind_a_failed_one_computes_nothing() -> None:
    check_call_behind_a_failed_one("sm_90a")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 320}, "hidden must be a positive multiple of 128"),
        ({"max_rows": 0}, "max_rows must be 1 to 2097152; got 0"),
        ({"weights": "nvfp3"}, "weights must be one of"),
        ({"token_format": "fp8_128"}, "token_format must be 'mxfp8' or .*no powers of two"),
        (
            {"weights": "fp8", "token_format": "bf16"},
            "token_format must be .*quantized when they are dispatched",
        ),
        ({"token_format": "fp7"}, "got 'fp7'"),
        ({"weights": "bf16", "token_format": "mxfp8"}, "token_format must be 'bf16' with bf16"),
        ({"num_pool_tokens": 100}, "num_pool_tokens must be a positive multiple of 384"),
        ({"overrides": {"block_q": 1}}, "overrides must name one of"),
        ({"timeout_s": 0}, "timeout_s must be a positive number"),
        ({"schedule_seed": -1}, "schedule_seed must be at least 0; got -1"),
        ({"device": "gpu"}, "device must be a CPU or a CUDA device; got 'gpu'"),
        ({"device": "cuda:99"}, "device must be a CPU or one of the .* got cuda:99"),
    ],
)
def test_sizes_that_are_refused(changes: dict[str, Any], words: str) -> None:
    sizes = {"max_rows": 8, "hidden": 256, "intermediate_hidden": 128, "num_local_experts": 2}
    with pytest.raises(ValueError, match=words):
        GroupedExperts(**{**sizes, "device": "cpu", **changes})


def test_arguments_that_are_refused() -> None:
    case = exact_case("sm_100a", (5, 9))
    arguments = given(case)
    begin = torch.zeros(2, dtype=torch.int32)
    floats = torch.ones(arguments["scales"].shape)
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"x": arguments["x"].flatten(0, 1)}, ValueError, "expert_begin must be given"),
        ({"expert_begin": begin}, ValueError, "expert_begin must be None"),
        ({"x": arguments["x"].bfloat16()}, TypeError, "x must be torch.float8_e4m3fn"),
        ({"x": arguments["x"][..., :256]}, ValueError, "x must have shape"),
        ({"scales": floats}, TypeError, "token_format=.fp8_128_pow2. has, for powers of two"),
        ({"scales": None}, TypeError, "scales must be a tensor with token_format 'mxfp8'"),
        ({"scales": arguments["scales"].mT.contiguous().mT}, ValueError, "scales must be contig"),
        ({"expert_count": begin.long()}, TypeError, "expert_count must be torch.int32"),
        ({"expert_count": None}, TypeError, "expert_count must be a tensor; got NoneType"),
        ({"out": torch.empty(3)}, TypeError, "out must be torch.bfloat16"),
        ({"expected_rows": 15}, ValueError, r"expected_rows must be 0 to max_rows \(14\)"),
        ({"l1_bias": floats}, ValueError, "l1_bias must be None"),
    ]
    with case.experts() as experts:
        for changes, error, words in refused:
            with pytest.raises(error, match=words):
                experts(**{**arguments, **changes})
    with pytest.raises(ValueError, match="this one is closed"):
        experts(**arguments)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checked": "yes"}, "checked must be a bool or None; got str"),
        ({"device": 0.5}, "device must be a CPU or a CUDA device; got 0.5"),
    ],
)
def test_types_that_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        GroupedExperts(8, 256, 128, 2, **{"device": "cpu", **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation": ["swiglu"]}, "activation must be '.*got list"),
        ({"intermediate_hidden": []}, "intermediate_hidden must be an int"),
        ({"device": "cpu"}, "device must not be given, it is that of x; got 'cpu'"),
    ],
)
def test_options_of_the_function_that_are_refused(changes: dict[str, Any], words: str) -> None:
    arguments = given(exact_case("sm_100a", (5, 9)))
    with pytest.raises(TypeError, match=words):
        deep_moe.grouped_experts(**{**arguments, "intermediate_hidden": 256, **changes})


def test_counts_are_looked_at_before_scales() -> None:
    """Whose rows' powers are checked."""
    case = random_case("sm_90a", (5, 9), token_format="fp8_128_pow2")
    with (
        case.experts(token_format="fp8_128_pow2") as experts,
        pytest.raises(TypeError, match="expert_count must be a tensor; got NoneType"),
    ):
        experts(**{**given(case), "expert_count": None})


def test_scales_that_are_no_powers_of_two() -> None:
    case = random_case("sm_90a", (5, 9), token_format="fp8_128_pow2")
    arguments = given(case)
    arguments["scales"][1, 8, 2] *= 1.5
    with (
        case.experts(token_format="fp8_128_pow2") as experts,
        pytest.raises(ValueError, match=r"must be powers of two .* row 8 of local expert 1"),
    ):
        experts(**arguments)


def test_size_is_known_before() -> None:
    case = exact_case("sm_90a", (5, 9))
    with case.experts() as experts:
        assert experts.nbytes == deep_moe.grouped_experts_workspace_size(14, 384, 256, 2)


def test_weights_of_another_kind_are_refused_by_name() -> None:
    case = exact_case("sm_100a", (5, 9))
    arguments = given(case)
    weights = arguments["weights"]
    refused: list[tuple[Any, type[Exception], str]] = [
        ((weights.l1, weights.l2), TypeError, "weights must be MegaMoEWeights, as .*; got tuple"),
        (
            replace(weights, kernel="sm90"),
            ValueError,
            "weights must be mxfp4 .* for sm100, .* sm90",
        ),
        (replace(weights, weights="fp8"), ValueError, "weights must be mxfp4 .*; got fp8 weights"),
        (weights.expert(0), ValueError, r"weights.l1\[0\] must have shape"),
    ]
    with case.experts() as experts:
        for wrong, error, words in refused:
            with pytest.raises(error, match=words):
                experts(**{**arguments, "weights": wrong})
