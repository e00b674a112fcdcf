"""Around SGLang's functions for experts that one kernel dispatches, computes and combines.

Each hook gets the function that it stands around, and calls it for layers that the kernel does not
run. All of them decide by the layer: experts that were taken over, when their weights were loaded,
carry the state that `_STATE` names.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.activations import Activation, Swiglu, SwigluOai
from deep_moe.errors import CheckpointError, DeepMoEError

from ..engine_form import check_known, own_tensors
from ..served_experts import ServedExperts, arch_on, static_scales
from ..shared_buffers import LayerSizes
from ..shares import mean_tokens
from ..switch import read_num_pool_tokens, read_token_format
from ..token_format import served_token_format
from ..unsupported import UnsupportedError
from . import engine, loading, routing
from .forms import check_supported, form_of

if TYPE_CHECKING:
    from deep_moe.weights import WeightsName

# SGLang shows the lines of every logger.
logger = logging.getLogger("sglang.deep_moe")

_STATE = "_deep_moe_experts"
_PACKED = (torch.int8, torch.uint8)

_emulated_arch: str | None = None


def install(emulated_arch: str | None) -> None:
    """Register the hooks; SGLang applies them when all plugins are loaded.

    emulated_arch: the target that is emulated where there is no GPU; None: SGLang runs experts
    there.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    global _emulated_arch
    _emulated_arch = emulated_arch
    for target, hook in HOOKS.items():
        if all(known is not hook for _, known, _ in HookRegistry._hooks[target]):
            HookRegistry.register(target, hook, HookType.AROUND)


def served_of(experts: Any) -> ServedExperts | None:
    """What the kernel runs a layer with, None if SGLang runs it."""
    return experts.__dict__.get(_STATE)


def build(original: Callable[..., Any], experts: Any) -> Any:
    """Lay a layer's weights out, when they have been loaded, on every rank. The layer's parameters
    become the kernel's own tensors, which a load balancer permutes. SGLang calls this again when
    it has loaded other weights.

    Raises CheckpointError, on all ranks, if the checkpoint lacks an expert of one of them.
    """
    if served_of(experts) is not None:
        loading.require_own_memory(experts)
        return None
    if experts._mega_moe_weights_built:
        return original(experts)
    name = loading.name_of(experts)
    served: ServedExperts | None = None
    refusal: Exception | None = None
    try:
        served = _taken_over(experts)
    except (UnsupportedError, CheckpointError) as error:
        refusal = error
    refusal = engine.first_of_ranks(refusal)  # a rank alone cannot go SGLang's way
    if isinstance(refusal, CheckpointError):
        raise refusal
    if served is not None and refusal is None:
        try:
            served.prepare()  # before SGLang looks how much memory is left, and before any graph
        except UnsupportedError as error:  # on all ranks
            refusal = error
    if served is None or refusal is not None:
        logger.warning("%s: experts run by SGLang: %s", name, refusal)
        return original(experts)
    loading.await_replacement(experts, served)
    experts.__dict__[_STATE] = served
    experts.__dict__["forward"] = partial(_refuse_forward, name)
    experts._mega_moe_weights_built = True
    routing.note(experts)
    ranks = engine.expert_group().world_size
    logger.info(
        "%s: experts run by deep_moe (%s, %d rank%s%s%s)",
        name,
        served.sizes.weights,
        ranks,
        "" if ranks == 1 else "s",
        "" if served.token_scale is None else ", tokens by the checkpoint's scale",
        served.rounding_words,
    )
    return None


def build_nvfp4(original: Callable[..., Any], method: Any, layer: Any) -> Any:
    """The same, where SGLang's method of NVFP4 lays weights out for its own kernel."""
    return build(lambda own: original(method, own), layer)


def build_by_method(original: Callable[..., Any], method: Any, layer: Any) -> Any:
    """The same, where a method lays weights out for kernels of single products: SGLang has none of
    whole layers for them."""
    if not engine.is_megamoe() or form_of(layer) is None:
        return original(method, layer)
    return build(lambda own: original(method, own), layer)


def restore(original: Callable[..., Any], method: Any, layer: Any) -> Any:
    """Before others are loaded: the parameters of our layers stay the kernel's own tensors."""
    return None if served_of(layer) is not None else original(method, layer)


def is_ready(original: Callable[..., bool], experts: Any) -> bool:
    return served_of(experts) is not None or original(experts)


def should_use_mega_moe(original: Callable[..., bool], moe: Any, hidden_states: Any) -> bool:
    """Of our layers always, however many tokens there are: their weights are no longer such that
    SGLang's other path could take them."""
    return served_of(moe.experts) is not None or original(moe, hidden_states)


def should_fuse_shared_experts(original: Callable[..., bool], moe: Any) -> bool:
    """Not into our layers: SGLang then runs them beside the kernel."""
    return served_of(moe.experts) is None and original(moe)


def should_use_gate(
    original: Callable[..., bool], moe: Any, hidden_states: Any, forward_batch: Any
) -> bool:
    """Not for our layers: SGLang's fused gate writes into its own kernel's buffer."""
    return served_of(moe.experts) is None and original(moe, hidden_states, forward_batch)


def choose(
    original: Callable[..., Any],
    topk: Any,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    **options: Any,
) -> Any:
    """A router's experts and weights; see routing.py."""
    return routing.choose(original, topk, hidden_states, router_logits, served_of, options)


def run(
    original: Callable[..., torch.Tensor],
    experts: Any,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """The weighted sums of this rank's tokens, bfloat16 [tokens, hidden]. Ranks without tokens come
    here too, with neither ids nor weights."""
    served = served_of(experts)
    if served is None:
        return original(experts, hidden_states, topk_ids, topk_weights, **options)
    loading.require_own_memory(experts)
    _check_call(served, options)
    num_tokens = options["num_tokens"]
    if topk_ids is None or topk_weights is None:
        shape = (num_tokens, served.sizes.num_topk)
        topk_ids = hidden_states.new_full(shape, -1, dtype=torch.int32)
        topk_weights = hidden_states.new_zeros(shape, dtype=torch.float32)
    # Not the engine's integers of other widths.
    if topk_ids.dtype not in (torch.int32, torch.int64):
        topk_ids = topk_ids.to(torch.int32)
    topk_weights = topk_weights.float()
    scale = options.get("routed_scaling_factor", 1.0)
    if scale != 1.0:
        # Those of `choose` lie in the kernel's buffer, and would be taken as they are.
        topk_ids, topk_weights = topk_ids.clone(), topk_weights * scale
    x = hidden_states[:num_tokens]
    y = torch.empty_like(x)
    expected = mean_tokens(engine.tokens_of_ranks(), x.shape[0])
    served.run(
        y, x, topk_ids[:num_tokens], topk_weights[:num_tokens], expected_tokens_per_rank=expected
    )
    return y


_MEGA_MOE = "sglang.srt.layers.moe.mega_moe"
_QUANTIZATION = "sglang.srt.layers.quantization"
_NVFP4 = f"{_QUANTIZATION}.modelopt_quant.ModelOptNvFp4FusedMoEMethod"
_UNQUANTIZED = f"{_QUANTIZATION}.unquant.UnquantizedFusedMoEMethod"
_COMPRESSED = (
    f"{_QUANTIZATION}.compressed_tensors.compressed_tensors.CompressedTensorsFusedMoEMethod"
)
_BY_METHOD = (
    _COMPRESSED,
    _UNQUANTIZED,
    f"{_QUANTIZATION}.fp8.Fp8MoEMethod",
    f"{_QUANTIZATION}.modelopt_quant.ModelOptFp8MoEMethod",
    f"{_QUANTIZATION}.w4afp8.W4AFp8MoEMethod",
    f"{_QUANTIZATION}.awq.awq.AWQMoEMethod",
    f"{_QUANTIZATION}.quark.quark.QuarkFusedMoEMethod",
)
HOOKS: dict[str, Callable[..., Any]] = {
    f"{_MEGA_MOE}.build_mega_moe_experts_weights": build,
    f"{_MEGA_MOE}_sm90.build_sm90_mega_moe_experts_weights": build,
    f"{_NVFP4}._build_mega_moe_weights": build_nvfp4,
    **{f"{method}.process_weights_after_loading": build_by_method for method in _BY_METHOD},
    f"{_COMPRESSED}.restore_weights_before_loading": restore,
    f"{_UNQUANTIZED}.restore_weights_before_loading": restore,
    f"{_MEGA_MOE}.is_mega_moe_experts_ready": is_ready,
    f"{_MEGA_MOE}.should_use_mega_moe": should_use_mega_moe,
    f"{_MEGA_MOE}.should_fuse_mega_moe_shared_experts": should_fuse_shared_experts,
    f"{_MEGA_MOE}.run_mega_routed_experts": run,
    "sglang.srt.layers.moe.mega_gate.should_use_mega_gate": should_use_gate,
    "sglang.srt.layers.moe.topk.TopK.forward_cuda": choose,
    **loading.HOOKS,
}


def _taken_over(experts: Any) -> ServedExperts:
    """The layer's experts, laid out, or UnsupportedError; CheckpointError for experts that a
    checkpoint lacks."""
    config = experts.moe_runner_config
    for is_unsupported, reason in (
        (experts.with_bias, "experts have biases"),
        (config.num_fused_shared_experts, "shared experts are fused into the routed ones"),
        (experts._mega_moe_nvfp4, "weights are NVFP4"),
        (experts._mega_moe_w4a4, "activations in FP4 were asked for"),
        (config.apply_router_weight_on_input, "routing weights are applied to the input"),
        (experts.num_experts % experts.moe_ep_size, "experts are unevenly spread over ranks"),
        (experts.moe_tp_size != 1, "ranks hold slices of experts"),
        (engine.is_elastic(), "expert parallelism is elastic"),
        (getattr(experts, "use_triton_kernels", False), "weights are transposed for Triton"),
    ):
        if is_unsupported:
            raise UnsupportedError(reason)
    activation = _activation_of(config)
    check_supported(experts)
    form = form_of(experts)
    names = loading.tensors_of(experts)
    check_known(experts, names)
    loading.check_order(experts)
    tensors = [*own_tensors(experts, names).values()]
    l1, l2 = tuple(tensors[: len(tensors) // 2]), tuple(tensors[len(tensors) // 2 :])
    w13 = l1[0]
    for name, values in ((names[0], w13), (names[len(l1)], l2[0])):
        if values.dim() != 3:
            raise UnsupportedError(
                f"{name} must be a matrix of each expert; got shape {[*values.shape]}"
            )
    if form is None:
        is_packed = w13.dtype in _PACKED
        if not is_packed and w13.dtype != torch.float8_e4m3fn:
            raise UnsupportedError(f"{names[0]} of {w13.dtype} is not supported")
        weights: WeightsName = "mxfp4" if is_packed else "fp8"
        rows, hidden = w13.shape[1], w13.shape[2] * (2 if is_packed else 1)
        w2_rows = l2[0].shape[1]
    else:
        weights = form.weights
        rows, hidden = form.size_of(w13)
        w2_rows, _ = form.size_of(l2[0])
    if rows % 2 or w2_rows != hidden:
        raise UnsupportedError(
            f"{names[0]} and {names[len(l1)]} must be of the same sizes; got shapes "
            f"{[*w13.shape]} and {[*l2[0].shape]}"
        )
    arch = arch_on(w13.device, _emulated_arch)
    group = engine.expert_group()
    served = ServedExperts(
        LayerSizes(
            experts.num_experts,
            experts.top_k,
            hidden,
            rows // 2,
            weights,
            (form and form.token_format)
            or served_token_format(weights, read_token_format(), arch, w13.device),
            num_pool_tokens=read_num_pool_tokens(),
        ),
        activation,
        group.device_group if group.world_size > 1 else None,
        w13.device,
        engine.max_tokens_per_rank(),
        arch,
        form,
        names,
    )
    scales = static_scales(form, served.sizes)
    has_scales = scales is not None and loading.has_begun(experts, scales)
    is_loaded = loading.require_all(experts, [scales] if scales is not None and has_scales else [])
    if not is_loaded and not engine.is_dummy():
        raise UnsupportedError(
            "weights came past SGLang's loaders of experts, and may have the layout of another "
            "kernel"
        )
    served.load(l1, l2, are_made_up=engine.is_dummy() and not is_loaded)
    served.has_static_scales = scales is not None
    if has_scales and form is not None:
        served.local_token_scale = form.token_scale_of(experts)
    return served


def _activation_of(config: Any) -> Activation:
    """The kernel's activation that computes what SGLang's does with this configuration."""
    limit, alpha, beta = config.swiglu_limit, config.gemm1_alpha, config.gemm1_beta
    clamp = config.gemm1_clamp_limit
    try:
        if config.activation == "silu" and config.is_gated:
            if alpha is None and clamp is None and beta in (None, 0.0):
                return Swiglu(math.inf if limit is None else limit)
            is_plain = beta == 1.0 and limit in (None, clamp) and not config.gate_up_interleaved
            if alpha is not None and clamp is not None and is_plain:
                return SwigluOai(alpha, clamp)
    except (TypeError, ValueError) as error:
        raise UnsupportedError(str(error)) from None
    raise UnsupportedError(
        f"the kernel has no activation {config.activation}, gemm1_alpha={alpha}, "
        f"gemm1_beta={beta}, gemm1_clamp_limit={clamp}"
    )


def _refuse_forward(name: str, *_: Any, **__: Any) -> torch.Tensor:
    """In place of a layer's own forward pass, which knows other layouts of weights."""
    raise DeepMoEError(
        f"{name}: deep_moe runs its experts as one kernel, but the model does not call them as "
        "SGLang's models with --moe-a2a-backend megamoe do. DEEP_MOE_SGLANG=0 serves it without "
        "deep_moe"
    )


def _check_call(served: ServedExperts, options: dict[str, Any]) -> None:
    """A call asks for what was taken over when the weights were loaded."""
    sizes, own = served.sizes, served.activation
    assert isinstance(own, (Swiglu, SwigluOai))
    taken = {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate_hidden,
        "top_k": sizes.num_topk,
        "activation": "swigluoai" if isinstance(own, SwigluOai) else "swiglu",
        "num_shared_experts": 0,
        "routing_in_buffer": False,
    }
    for name, value in taken.items():
        if options.get(name, value) != value:
            raise ValueError(
                f"{name} must be {value!r}, as it was when the weights were loaded; "
                f"got {options[name]!r}"
            )
    clamp = options.get("activation_clamp")
    limit = own.limit if isinstance(own, SwigluOai) else own.clamp
    if (math.inf if clamp is None else clamp) != limit:
        raise ValueError(
            f"activation_clamp must be that of {own!r}, as it was when the weights were loaded; "
            f"got {clamp!r}"
        )
