"""`choose_config`: the kernel for a call, whatever its target."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from deep_moe.activations import DEFAULT_ACTIVATION, Activation, activation_of
from deep_moe.heuristics.shape import MAX_TOPK, MoEShape, require_int
from deep_moe.heuristics.tuning import TunedLayerKey, Tuning, TuningResult

from .config import Decision, MegaMoEConfig
from .registry import EMULATED, target_of


def choose_config(
    shape: MoEShape,
    num_tokens: int,
    *,
    is_uneven: bool = False,
    arch: str | None = None,
    num_sms: int | None = None,
    smem_capacity: int | None = None,
    activation: str | Activation = DEFAULT_ACTIVATION,
    activation_clamp: float | None = None,
    fast_math: bool = True,
    accumulate: bool = False,
    masks_ranks: bool = False,
    trace: bool = False,
    overrides: Mapping[str, int] | None = None,
    tuning: Tuning | None = None,
) -> MegaMoEConfig:
    """The kernel for `num_tokens` tokens per rank of `shape`.

    is_uneven: the experts' counts differ by more than chance makes them; SM90's tiles are then for
    such. arch: a name of `deep_moe.targets.TARGETS`, by default what a CPU emulates. num_sms: CTAs
    of the launch, one per SM, in whole clusters; by default the SMs of a GPU of that architecture.
    smem_capacity: bytes of shared memory that a CTA may ask for; by default what the architecture
    allows (232448, that is 227 KiB). activation: a name of `deep_moe.activations.ACTIVATIONS` or an
    object. activation_clamp: of a named one, the positive bound of gate and up, None for its
    default. accumulate: the call adds to what y holds. masks_ranks: it is given `masked_ranks`.
    trace: the kernel records time stamps (deep_moe.trial.trace). overrides: values by field name,
    taken instead of the heuristic's; `block_m` brings along the rest of its table row. A value that
    breaks a limit is a ValueError that names the limit. tuning: measurements on the device of the
    call, which come before the formula and after `overrides`.

    >>> shape = MoEShape(8, 256, 8, 7168, 2048, 1024)
    >>> config = choose_config(shape, 1024, overrides={"block_m": 128})
    >>> config.num_stages, config.num_turn_m_blocks, config.num_lead_m_blocks
    (7, 1, 14)
    """
    target = EMULATED if arch is None else target_of(arch)
    if not isinstance(shape, MoEShape):
        raise TypeError(f"shape must be a MoEShape; got {type(shape).__name__}")
    target.weights_of(shape.weights, shape.token_format)
    allowed_tokens = f"0 to num_max_tokens_per_rank ({shape.num_max_tokens_per_rank})"
    require_int("num_tokens", num_tokens, allowed_tokens)
    if not 0 <= num_tokens <= shape.num_max_tokens_per_rank:
        raise ValueError(f"num_tokens must be {allowed_tokens}; got {num_tokens}")
    if smem_capacity is None:
        smem_capacity = target.smem_capacity
    require_int("smem_capacity", smem_capacity, "a number of bytes")
    flags = {"fast_math": fast_math, "is_uneven": is_uneven}
    flags |= {"accumulate": accumulate, "masks_ranks": masks_ranks}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool; got {flag!r}")
    if accumulate and shape.num_slots == MAX_TOPK:
        raise ValueError(
            f"accumulate must be False with {MAX_TOPK} slots, routed and shared: y's own row would "
            "be one more than combine adds up; got True"
        )
    chosen_activation = activation_of(activation, activation_clamp)
    shape = shape.with_gate(chosen_activation.has_gate)
    overrides = _checked_overrides(overrides, target.overridable)
    if num_sms is None:
        num_sms = target.default_num_sms
    num_sms = overrides.get("num_sms", num_sms)
    require_int("num_sms", num_sms, "a number of CTAs")

    padded = shape.padded
    choose_fields = partial(
        target.choose_fields,
        padded,
        num_tokens,
        is_uneven=is_uneven,
        num_sms=num_sms,
        smem_capacity=smem_capacity,
    )
    chosen, reasons = choose_fields(overrides=overrides)
    tuning_result = TuningResult("formula: no device is named")
    if tuning is not None:
        key = TunedLayerKey.of(shape, device=tuning.device, arch=target.name, num_sms=num_sms)
        formula = {name: chosen[name] for name in target.tunable}
        tuning_result = tuning.look_up(key, num_tokens, formula, overrides)
    if tuning_result.overrides:
        try:
            chosen, reasons = choose_fields(
                overrides={**overrides, **dict(tuning_result.overrides)}
            )
        except ValueError as error:
            if tuning_result.is_of_own_layer:
                raise ValueError(f"tuning table: {error}; {tuning_result.outcome}") from None
            # More experts take more shared memory, for one.
            tuning_result = TuningResult(f"formula: {error}; {tuning_result.outcome}")
        reasons.update(tuning_result.reasons)
    for name in overrides:
        reasons[name] = "set by the caller"
    for name in ("fast_math", "accumulate", "masks_ranks", *chosen_activation.to_dict()):
        reasons[name] = "argument of the call"
    reasons["trace"] = "on while a call is recorded (deep_moe.trial.trace)"
    problem = {
        "num_ranks": shape.num_ranks,
        "num_experts": shape.num_experts,
        "num_experts_per_rank": shape.num_experts_per_rank,
        "num_topk": shape.num_topk,
        "num_shared_experts": shape.num_shared_experts,
        "num_max_tokens_per_rank": shape.num_max_tokens_per_rank,
        "hidden": padded.hidden,
        "intermediate_hidden": padded.intermediate_hidden,
        "output_hidden": shape.hidden,
        "num_pool_tokens": shape.num_pool_rows,
        "num_max_pool_blocks": shape.num_max_pool_blocks,
        "num_padded_sf_pool_tokens": shape.num_padded_sf_pool_tokens,
    }
    reasons = {**_SHAPE_REASONS, **reasons, **_pool_reasons(shape)}
    pool_wraps = bool(chosen.pop("pool_wraps"))
    return target.config(
        **problem,
        **chosen,
        pool_wraps=pool_wraps,
        fast_math=fast_math,
        accumulate=accumulate,
        masks_ranks=masks_ranks,
        trace=trace,
        activation=chosen_activation,
        target=target,
        weights=shape.weights,
        biases=shape.biases,
        token_format=shape.token_format,
        local_tokens=None,
        decision=Decision(num_tokens, smem_capacity, reasons, tuning, tuning_result),
    )


_SHAPE_REASONS = {
    "num_ranks": "problem",
    "num_experts": "problem",
    "num_experts_per_rank": "num_experts / num_ranks",
    "num_topk": "problem",
    "num_shared_experts": "argument of the buffer",
    "num_max_tokens_per_rank": "problem",
    "hidden": "problem",
    "intermediate_hidden": "problem",
    "output_hidden": "problem; hidden is this, up to a multiple of 128",
    "num_max_pool_blocks": "rows of a pool without bound / 8, the smallest block there is",
}


def _pool_reasons(shape: MoEShape) -> dict[str, str]:
    own = f" + max tokens * {shape.num_shared_experts}" if shape.num_shared_experts else ""
    if shape.is_bounded:
        return {
            "num_pool_tokens": (
                f"argument of the buffer: a ring; a call may bring {shape.most_pool_tokens} rows"
            ),
            "num_padded_sf_pool_tokens": "two for each row of the ring",
        }
    return {
        "num_pool_tokens": (
            f"ranks * max tokens * topk{own} + 191 per local expert, up to a multiple of 384"
        ),
        "num_padded_sf_pool_tokens": "pool tokens / 16 * 128: every block's scales padded to 128",
    }


def _checked_overrides(
    overrides: Mapping[str, int] | None, allowed: tuple[str, ...]
) -> dict[str, int]:
    checked = dict(overrides or {})
    for name, value in checked.items():
        if name not in allowed:
            raise ValueError(f"overrides must name one of {', '.join(allowed)}; got {name!r}")
        require_int(f"overrides[{name!r}]", value, "the field's value")
    return checked
