"""Experts that are chosen from a router's logits, beside the rule in float64."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import Router
from deep_moe.fused.buffer import SymmBuffer
from deep_moe.trial.synthetic import exact_layer
from tests.everyday import parametrize

from .conftest import FILL, VIEWS, Target, bits

CPU = Target("cpu", None)
ARCHS = ("sm_100a", "sm_90a")
DTYPES = (torch.float32, torch.bfloat16)
NUM_TOKENS, NUM_TOPK = 11, 4
RULES = {
    "softmax": Router(),
    "softmax, weights as they are": Router(renormalize=False, scale=0.75),
    "softmax, groups": Router(num_groups=4, num_chosen_groups=2),
    "sigmoid": Router("sigmoid", renormalize=False),
    "sigmoid, groups": Router("sigmoid", num_groups=8, num_chosen_groups=3, scale=2.5),
    "sqrt_softplus": Router("sqrt_softplus", scale=1.5),
    "tanh_sigmoid, groups": Router("tanh_sigmoid", num_groups=4, num_chosen_groups=2, scale=1.8),
    "fast_softmax": Router("fast_softmax", scale=1.5),
    "fast_sigmoid": Router("fast_sigmoid", scale=2.5),
}


def logits_of(num_experts: int, dtype: torch.dtype, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    """Of a token no two of the 256 largest are equal, and BF16 holds them: multiples of 1/64."""
    generator = torch.Generator().manual_seed(num_experts)
    order = torch.stack(
        [torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)]
    )
    return ((order - 128) / 64).where(order < 256, -8.0).to(dtype)


def bias_of(num_experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_experts + 1)
    return torch.randn(num_experts, generator=generator) / 4


def expected(
    router: Router, logits: torch.Tensor, bias: torch.Tensor | None, num_topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts, and weights in float64."""
    x = logits.double()
    if router.scoring in ("softmax", "fast_softmax"):
        scores = x.softmax(-1)
    elif router.scoring in ("sigmoid", "tanh_sigmoid", "fast_sigmoid"):
        scores = x.sigmoid()
    else:
        scores = x.exp().log1p().sqrt()
    choice = x if router.scoring == "fast_softmax" else scores
    choice = choice if bias is None else choice + bias.double()
    if router.num_groups > 1:
        groups = choice.unflatten(1, (router.num_groups, -1))
        of_group = groups.amax(-1) if bias is None else groups.topk(2, -1)[0].sum(-1)
        kept = of_group.topk(router.num_chosen_groups, -1)[1]
        is_kept = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, kept, True)
        choice = groups.where(is_kept[..., None], -torch.inf).flatten(1)
    values, experts = choice.sort(dim=-1, descending=True, stable=True)
    # Otherwise rounding could order them.
    gaps = values[:, :num_topk] - values[:, 1 : num_topk + 1]
    assert bool((gaps > 1e-6).all())
    experts = experts[:, :num_topk]
    weights = scores.gather(1, experts)
    if router.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights * router.scale


def routed(
    target: Target,
    router: Router,
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    num_topk: int = NUM_TOPK,
    **options: Any,
) -> tuple[SymmBuffer, torch.Tensor, torch.Tensor]:
    """The buffer, and the experts and weights in it."""
    buffer = target.buffer(num_topk=num_topk)
    num_tokens = len(logits)
    x = torch.randn(num_tokens, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    if bias is not None:
        options["correction_bias"] = bias.to(target.device)
    deep_moe.route_and_prepare_inputs(
        x.to(target.device), logits.to(target.device), buffer, router, arch=target.arch, **options
    )
    beside = target.buffer(num_topk=num_topk)
    ids = torch.zeros(num_tokens, num_topk, dtype=torch.int64, device=target.device)
    deep_moe.prepare_inputs(x.to(target.device), ids, ids.float(), beside, arch=target.arch)
    for name in VIEWS[:2]:  # tokens are what they are without a router
        assert torch.equal(bits(getattr(buffer, name)), bits(getattr(beside, name))), name
    for name in VIEWS[2:]:
        assert bool((bits(getattr(buffer, name)[num_tokens:]) == FILL).all()), name
    kept = buffer.topk_idx[:num_tokens].cpu(), buffer.topk_weights[:num_tokens].cpu()
    return buffer, *kept


def check_experts_and_weights(
    target: Target, rule: str, dtype: torch.dtype, has_bias: bool
) -> None:
    logits, bias = logits_of(64, dtype), bias_of(64) if has_bias else None
    _, experts, weights = routed(target, RULES[rule], logits, bias)
    expected_experts, expected_weights = expected(RULES[rule], logits, bias, NUM_TOPK)
    assert torch.equal(experts, expected_experts)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=2e-6, atol=0)


def everyday_cases() -> Iterator[tuple[str, torch.dtype, bool, str]]:
    """Two of each rule that differ in all else, so every rule is seen with every other value."""
    for number, rule in enumerate(RULES):
        for first in (0, 1):
            other_bias, other_arch = first ^ (number & 1), first ^ (number >> 1 & 1)
            yield rule, DTYPES[first], bool(other_bias), ARCHS[other_arch]


@parametrize(
    ("rule", "dtype", "has_bias", "arch"),
    itertools.product(RULES, DTYPES, (False, True), ARCHS),
    everyday=list(everyday_cases()),
)
def test_experts_and_weights(rule: str, dtype: torch.dtype, has_bias: bool, arch: str) -> None:
    check_experts_and_weights(Target("cpu", arch), rule, dtype, has_bias)


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_experts_and_weights_on_a_gpu(rule: str, dtype: torch.dtype, has_bias: bool) -> None:
    check_experts_and_weights(Target("cuda", None), rule, dtype, has_bias)


@pytest.mark.parametrize(
    ("num_experts", "num_topk", "dtype"),
    [
        (1, 1, torch.float32),
        (5, 2, torch.bfloat16),
        (60, 4, torch.bfloat16),
        (128, 8, torch.bfloat16),
        (192, 8, torch.bfloat16),
        (288, 8, torch.float32),
        (512, 22, torch.bfloat16),
        (896, 16, torch.float32),
        (1024, 32, torch.float32),
    ],
)
def test_numbers_of_experts(num_experts: int, num_topk: int, dtype: torch.dtype) -> None:
    """Whatever their logits take up; places say which experts they are."""
    # Far from 0, sigmoids in float32 are closer to each other than their rounding.
    logits = logits_of(num_experts, dtype, 3) / 8
    router = Router("sigmoid", scale=0.5)
    experts, expected_weights = expected(router, logits, None, num_topk)
    places_of = torch.arange(num_experts) + 1000
    _, places, weights = routed(CPU, router, logits, num_topk=num_topk, expert_map=places_of)
    assert torch.equal(places - 1000, experts)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=2e-6, atol=0)


def test_of_equal_choices_the_lower_expert_comes_first(target: Target) -> None:
    logits = torch.zeros(3, 64)
    logits[1, 40:44] = 1.0
    logits[2, [63, 5]] = 2.0
    _, experts, weights = routed(target, Router(), logits)
    assert experts.tolist() == [[0, 1, 2, 3], [40, 41, 42, 43], [5, 63, 0, 1]]
    assert (weights[:2] - 0.25).abs().max() < 1e-7
    _, experts, _ = routed(target, Router("sigmoid", num_groups=4, num_chosen_groups=1), logits)
    assert experts.tolist() == [[0, 1, 2, 3], [40, 41, 42, 43], [5, 0, 1, 2]]


def test_logits_that_are_no_numbers_or_infinite(target: Target) -> None:
    logits = torch.full((3, 64), -torch.inf)
    logits[0, [9, 3]] = 0.0  # others are chosen, too, with weights of 0
    logits[1] = torch.nan
    logits[1, 50:] = 1.0
    logits[2, 1:] = torch.nan  # softmax of them has no number
    logits[2, 0] = 1.0
    _, experts, weights = routed(target, Router("sigmoid", renormalize=False), logits)
    assert experts.tolist() == [[3, 9, 0, 1], [50, 51, 52, 53], [0, 1, 2, 3]]
    assert weights[0].tolist() == [0.5, 0.5, 0, 0]
    assert bool((weights[1] > 0.7).all())
    assert weights[2, 0] > 0.7
    assert not weights[2, 1:].any()
    _, experts, weights = routed(target, Router(), logits[2:])
    assert experts.tolist() == [[0, 1, 2, 3]]
    assert not weights.any()
    # The fast ones leave scores as they are, and choose such experts last.
    rule = Router("fast_sigmoid", renormalize=False)
    _, experts, weights = routed(target, rule, logits)
    assert experts.tolist() == [[3, 9, 0, 1], [50, 51, 52, 53], [0, 1, 2, 3]]
    assert weights[2].isnan().tolist() == [False, True, True, True]
    _, experts, weights = routed(target, Router("fast_softmax"), logits[2:])
    assert experts.tolist() == [[0, 1, 2, 3]]
    assert bool(weights.isnan().all())


def test_a_tokens_experts_do_not_depend_on_other_tokens(target: Target) -> None:
    logits, router = torch.randn(NUM_TOKENS, 64), Router("sqrt_softplus")
    _, experts, weights = routed(target, router, logits)
    for token in (0, 7):
        _, one, its_weights = routed(target, router, logits[token : token + 1].clone())
        assert torch.equal(one[0], experts[token])
        assert torch.equal(bits(its_weights[0]), bits(weights[token]))


def test_padding_as_vllm_marks_it(target: Target) -> None:
    logits = logits_of(64, torch.float32)
    padding = torch.arange(NUM_TOKENS) >= 7
    _, experts, _ = routed(target, Router(), logits, padding_mask=padding.to(target.device))
    chosen, _ = expected(Router(), logits, None, NUM_TOPK)
    assert torch.equal(experts, chosen.where(~padding[:, None], -1))


def test_padded_tokens_places_and_counters(target: Target) -> None:
    logits = logits_of(64, torch.float32)
    mask = torch.arange(NUM_TOKENS) != 5
    order = torch.randperm(64)
    load = torch.zeros(64, dtype=torch.int32, device=target.device)
    _, places, _ = routed(
        target,
        Router(),
        logits,
        token_mask=mask.to(target.device),
        expert_map=order.to(target.device),
        expert_load=load,
    )
    experts, _ = expected(Router(), logits, None, NUM_TOPK)
    assert torch.equal(places, order[experts].where(mask[:, None], -1))
    counted = torch.bincount(places[mask].flatten(), minlength=64)
    assert torch.equal(load.cpu().long(), counted)


@pytest.mark.parametrize("token_format", ["bf16", "fp8_token"])
def test_other_tokens(token_format: Any) -> None:
    """A CTA has a token whose values have one scale."""
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None,
        64,
        16,
        NUM_TOPK,
        256,
        128,
        weights="mxfp4" if token_format == "bf16" else "fp8",
        token_format=token_format,
    )
    logits, x = logits_of(64, torch.bfloat16), torch.randn(NUM_TOKENS, 256).bfloat16()
    deep_moe.route_and_prepare_inputs(x, logits, buffer, Router(), arch="sm_90a")
    experts, _ = expected(Router(), logits, None, NUM_TOPK)
    assert torch.equal(buffer.topk_idx[:NUM_TOKENS], experts)
    if token_format == "bf16":
        assert torch.equal(buffer.x[:NUM_TOKENS], x)
    values, scales = (bits(view[:NUM_TOKENS]).clone() for view in (buffer.x, buffer.x_sf))
    slots = torch.zeros(NUM_TOKENS, NUM_TOPK)
    deep_moe.prepare_inputs(x, slots.long(), slots, buffer, arch="sm_90a")
    assert torch.equal(bits(buffer.x[:NUM_TOKENS]), values)
    assert torch.equal(bits(buffer.x_sf[:NUM_TOKENS]), scales)


def test_no_tokens() -> None:
    buffer, experts, _ = routed(CPU, Router(), torch.empty(0, 64))
    assert experts.shape == (0, NUM_TOPK)
    assert bool((bits(buffer.topk_idx) == FILL).all())


class Model(torch.nn.Module):
    """A gate and its experts."""

    def __init__(self, buffer: SymmBuffer) -> None:
        super().__init__()
        self.buffer = buffer
        layer = exact_layer(buffer.shape)
        self.weights = deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2)

    def forward(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        deep_moe.route_and_prepare_inputs(x, logits + 0, self.buffer, Router("sigmoid"))
        y = torch.empty_like(x)
        deep_moe.fp8_fp4_mega_moe(y, *self.weights, self.buffer)
        return y * 1


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_call_reads_what_was_routed(is_compiled: bool) -> None:
    model = Model(CPU.buffer())
    x, logits = torch.randn(4, 256).bfloat16(), logits_of(64, torch.float32, 4)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if is_compiled else model
    with torch.no_grad():
        y = run(x, logits)
    buffer = CPU.buffer()
    experts, weights = (
        view[:4].clone() for view in (model.buffer.topk_idx, model.buffer.topk_weights)
    )
    deep_moe.prepare_inputs(x, experts, weights, buffer)
    beside = torch.empty_like(x)
    deep_moe.mega_moe(beside, model.weights, buffer)
    assert torch.equal(y, beside)
    assert bool(y.any())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"scoring": "tanh"},
            "scoring must be one of softmax, sigmoid, sqrt_softplus, tanh_sigmoid, fast_softmax, "
            "fast_sigmoid; got 'tanh'",
        ),
        ({"renormalize": 1}, "renormalize must be a bool; got 1"),
        ({"num_groups": 33}, "num_groups must be 1 to 32; got 33"),
        ({"num_groups": 4, "num_chosen_groups": 5}, "num_chosen_groups must be 1 to num_groups"),
        ({"num_groups": 2.0}, "num_groups must be an int, 1 to 32; got 2.0"),
        ({"scale": "2"}, "scale must be a finite number; got '2'"),
        ({"scale": float("inf")}, "scale must be a finite number; got inf"),
    ],
)
def test_rules_that_are_none(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        Router(**arguments)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"router_logits": None}, "router_logits must be a tensor; got None"),
        ({"router": "softmax"}, "router must be a Router; got str"),
        (
            {"router_logits": torch.zeros(3, 65)},
            "router_logits must be of at most num_experts (64)",
        ),
        ({"router_logits": torch.zeros(2, 64)}, "router_logits must have shape (3, 64)"),
        ({"router_logits": torch.zeros(3 * 64)}, "router_logits must be of at most num_experts"),
        ({"router_logits": torch.zeros(64)}, "router_logits must be 2-dimensional"),
        ({"router_logits": torch.zeros(3, 64).half()}, "router_logits must be"),
        ({"router_logits": torch.zeros(64, 3).T}, "router_logits must be contiguous"),
        ({"router_logits": torch.zeros(3 * 64 + 1)[1:].view(3, 64)}, "router_logits must start"),
        ({"correction_bias": torch.zeros(63)}, "correction_bias must have shape (64,)"),
        ({"correction_bias": torch.zeros(64).bfloat16()}, "correction_bias must be"),
        ({"router": Router(num_groups=5)}, "router.num_groups must divide the 64 experts"),
        (
            {"router": Router(num_groups=32)},
            f"router must leave at least {NUM_TOPK} experts to choose from; got 2",
        ),
        ({"x": torch.zeros(3, 128).bfloat16()}, "x must have shape (3, 256)"),
        ({"padding_mask": torch.zeros(2).bool()}, "padding_mask must have shape (3,)"),
        ({"padding_mask": torch.zeros(3)}, "padding_mask must be"),
        (
            {"padding_mask": torch.zeros(3).bool(), "token_mask": torch.ones(3).bool()},
            "padding_mask must be None beside a token_mask",
        ),
    ],
)
def test_arguments_that_are_refused(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "x": torch.zeros(3, 256).bfloat16(),
        "router_logits": torch.zeros(3, 64),
        "sym_buffer": CPU.buffer(num_topk=NUM_TOPK),
        "router": Router(),
    }
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        deep_moe.route_and_prepare_inputs(**given | changed)


def test_gradients_are_refused() -> None:
    logits = torch.zeros(3, 64, requires_grad=True)
    with pytest.raises(ValueError, match="router_logits must not require a gradient"):
        deep_moe.route_and_prepare_inputs(
            torch.zeros(3, 256).bfloat16(), logits, CPU.buffer(num_topk=NUM_TOPK), Router()
        )


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_experts", [8, 64, 128, 192, 256, 384, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_experts_and_weights_are_vllms_bit_for_bit(
    scoring: Any, dtype: torch.dtype, num_experts: int, has_bias: bool
) -> None:
    """Where logits are equal or are not numbers, too. BF16 ones often are equal."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import fused_topk_bias
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    x = torch.randn(512, 256, device="cuda").bfloat16()
    logits = 3 * torch.randn(512, num_experts, device="cuda").to(dtype)
    logits[1, 3], logits[2], logits[3, 5], logits[4] = torch.nan, torch.nan, torch.inf, -torch.inf
    bias = torch.randn(num_experts, device="cuda") / 4 if has_bias else None
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None, num_experts, 512, 8, 256, 128, device="cuda"
    )
    scales = (1.0, 2.5) if has_bias and scoring == "sigmoid" else (1.0,)
    for renormalize, scale in itertools.product((False, True), scales):
        router = Router(scoring, renormalize=renormalize, scale=scale)
        deep_moe.route_and_prepare_inputs(x, logits, buffer, router, correction_bias=bias)
        if bias is None:
            weights, ids, _ = fused_topk(x, logits, 8, renormalize, scoring_func=scoring)
        else:
            weights, ids = fused_topk_bias(
                x, logits, scoring, bias, 8, renormalize, routed_scaling_factor=scale
            )
        assert torch.equal(buffer.topk_idx.int(), ids)
        assert torch.equal(bits(buffer.topk_weights), bits(weights))


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [256, 384])
def test_deepseek_v4s_experts_and_weights_are_vllms_bit_for_bit(num_experts: int) -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.fused_moe.router.dsv4_topk import dsv4_topk

    x = torch.randn(512, 256, device="cuda").bfloat16()
    logits = 3 * torch.randn(512, num_experts, device="cuda")
    logits[:256] = logits[:256].bfloat16()  # of which some are equal
    logits[1, 3], logits[2], logits[3, 5], logits[4] = torch.nan, torch.nan, 90.0, -torch.inf
    bias = torch.randn(num_experts, device="cuda") / 4
    bias[::2] = 0.5
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None, num_experts, 512, 6, 256, 128, device="cuda"
    )
    for scale in (1.0, 1.5):
        router = Router("sqrt_softplus", scale=scale)
        deep_moe.route_and_prepare_inputs(x, logits, buffer, router, correction_bias=bias)
        weights, ids = dsv4_topk(logits, bias, torch.int64, scale)
        assert torch.equal(buffer.topk_idx, ids)
        own, numbers = buffer.topk_weights, ~weights.isnan()
        assert torch.equal(own.isnan(), ~numbers)
        assert torch.equal(bits(own[numbers]), bits(weights[numbers]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_experts", "num_groups", "num_chosen_groups", "num_topk"),
    [(256, 8, 4, 8), (64, 4, 2, 6)],
)
def test_grouped_experts_and_weights_are_vllms_bit_for_bit(
    num_experts: int, num_groups: int, num_chosen_groups: int, num_topk: int, dtype: torch.dtype
) -> None:
    """The sizes of DeepSeek-V3, and others. For one group vLLM has another kernel."""
    pytest.importorskip("vllm")
    from vllm import _custom_ops

    x = torch.randn(512, 256, device="cuda").bfloat16()
    logits = 3 * torch.randn(512, num_experts, device="cuda").to(dtype)
    logits[3, 5], logits[4, 7], logits[5] = 90.0, -90.0, 0.0
    bias = torch.randn(num_experts, device="cuda") / 4
    bias[::2] = 0.5
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None, num_experts, 512, num_topk, 256, 128, device="cuda"
    )
    for renormalize, scale in ((True, 1.0), (True, 2.827), (False, 2.5)):
        rule = Router("tanh_sigmoid", renormalize, num_groups, num_chosen_groups, scale)
        deep_moe.route_and_prepare_inputs(x, logits, buffer, rule, correction_bias=bias)
        weights, ids = _custom_ops.grouped_topk(
            logits, num_groups, num_chosen_groups, num_topk, renormalize, scale, bias, 1
        )
        assert torch.equal(buffer.topk_idx.int(), ids)
        assert torch.equal(bits(buffer.topk_weights), bits(weights))


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [64, 96, 128, 160, 256, 384, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_fast_experts_and_weights_are_sglangs_bit_for_bit(
    scoring: str, dtype: torch.dtype, num_experts: int
) -> None:
    """Where logits are equal, zeros of both signs or no numbers, too. The order of sums depends on
    Triton's version: see the adapter's `routing.py`."""
    gate = pytest.importorskip("sglang.kernels.ops.moe.moe_fused_gate")
    x = torch.randn(512, 256, device="cuda").bfloat16()
    logits = 3 * torch.randn(512, num_experts, device="cuda").to(dtype)
    logits[1, 3], logits[2], logits[3, 5], logits[4] = torch.nan, torch.nan, torch.inf, -torch.inf
    logits[5], logits[5, ::2] = 0.0, -0.0
    bias = torch.randn(num_experts, device="cuda") / 4 if scoring == "sigmoid" else None
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None, num_experts, 512, 8, 256, 128, device="cuda"
    )
    for renormalize, scale in ((True, 1.0), (False, 1.0), (True, 2.5)):
        rule = Router(f"fast_{scoring}", renormalize, scale=scale)  # type: ignore[arg-type]
        deep_moe.route_and_prepare_inputs(x, logits, buffer, rule, correction_bias=bias)
        weights, ids = gate.moe_fused_gate(
            logits,
            bias,
            8,
            scoring_func=scoring,
            renormalize=renormalize,
            routed_scaling_factor=scale,
            apply_routed_scaling_factor_on_output=scale != 1.0,
        )
        assert torch.equal(buffer.topk_idx.int(), ids)
        own, numbers = buffer.topk_weights, ~weights.isnan()
        assert torch.equal(own.isnan(), ~numbers)
        assert torch.equal(bits(own[numbers]), bits(weights[numbers]))
