"""Which of vLLM's layers of experts the kernel runs, by their configuration alone: before weights
are loaded, on all ranks alike. Nothing here imports vLLM."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from deep_moe.activations import (
    Activation,
    GeluTanh,
    Relu2,
    Situ,
    Swiglu,
    SwigluOai,
    SwigluStep,
)

from ..shared_buffers import LayerSizes
from ..unsupported import UnsupportedError

if TYPE_CHECKING:
    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName

# Backends that leave the layer's sizes and placement alone. "allgather_reducescatter" is the
# default. Others were chosen by the user.
_ALL2ALL_BACKENDS = ("allgather_reducescatter", "passthrough")


class Plan(NamedTuple):
    """How the kernel runs a layer. num_sharers: ranks that hold the same tokens and give the kernel
    a share each."""

    sizes: LayerSizes
    activation: Activation
    num_ranks: int
    num_sharers: int
    max_tokens_per_rank: int


def plan_of(
    layer: Any,
    weights: WeightsName,
    token_format: TokenFormatName,
    tp_size: int,
    *,
    is_gpt_oss: bool = False,
    num_pool_tokens: int | None = None,
) -> Plan:
    """The plan for a layer under construction, or UnsupportedError.

    layer: a RoutedExperts with its `moe_config` and `expert_map_manager`. weights, token_format:
    the formats. tp_size: ranks of the tensor parallel group. is_gpt_oss: experts have biases, and
    rows of gate and up alternate. num_pool_tokens: of the buffer.
    """
    moe, placement = layer.moe_config, layer.expert_map_manager
    parallel = moe.moe_parallel_config
    for is_unsupported, reason in (
        (moe.moe_backend != "auto", f"moe_backend={moe.moe_backend!r} was asked for"),
        (moe.has_bias and not is_gpt_oss, "experts have biases"),
        (moe.is_lora_enabled, "LoRA is enabled"),
        (str(moe.in_dtype) != "torch.bfloat16", f"activations are {moe.in_dtype}"),
        (parallel.pcp_size > 1, "prefill context parallelism is on"),
        (
            parallel.dp_size > 1 and not parallel.use_ep,
            "data parallel ranks share experts without expert parallelism",
        ),
        (
            parallel.use_ep and parallel.all2all_backend not in _ALL2ALL_BACKENDS,
            f"all2all_backend={parallel.all2all_backend!r} was asked for",
        ),
        (
            parallel.use_ep and placement.placement_strategy != "linear",
            f"experts are placed {placement.placement_strategy}",
        ),
        (
            placement.num_fused_shared_experts > 0,
            "shared experts are fused into the routed ones",
        ),
        (
            parallel.use_ep and moe.skip_final_all_reduce,
            "the model takes sums that are not reduced yet",
        ),
        (
            layer.apply_router_weight_on_input and moe.experts_per_token != 1,
            "routing weights are applied to the input of several experts",
        ),
        (
            moe.num_experts % parallel.ep_size != 0,
            f"{moe.num_experts} experts are unevenly spread over {parallel.ep_size} ranks",
        ),
    ):
        if is_unsupported:
            raise UnsupportedError(reason)
    num_sharers = 1
    if parallel.use_ep and not parallel.is_sequence_parallel:
        num_sharers = tp_size
    # With sequence parallelism, vLLM itself gives each rank a share.
    divisor = max(num_sharers, parallel.sp_size if parallel.use_ep else 1)
    return Plan(
        LayerSizes(
            moe.num_experts,
            moe.experts_per_token,
            moe.hidden_dim,
            moe.intermediate_size_per_partition,
            weights,
            token_format,
            is_gpt_oss,
            num_pool_tokens,
        ),
        activation_of(moe, is_interleaved=is_gpt_oss),
        parallel.ep_size if parallel.use_ep else 1,
        num_sharers,
        -(-moe.max_num_tokens // divisor),
    )


def check_steps(layer: Any, tp_size: int, *, has_gate: bool = True) -> None:
    """Raise UnsupportedError if a layer that `plan_of` took cannot run in steps of their own."""
    if not has_gate:
        raise UnsupportedError("experts have no gate, and low-latency steps have one")
    if tp_size > 1 and not layer.moe_config.moe_parallel_config.use_ep:
        raise UnsupportedError("ranks hold slices of experts, and low-latency steps add up none")


# What vLLM compiles into its activations "swigluoai", of rows that alternate, and "swiglustep".
_ALPHA, _LIMIT = 1.702, 7.0


def activation_of(moe: Any, *, is_interleaved: bool = False) -> Activation:
    """The kernel's activation that computes what vLLM's does with this configuration.
    is_interleaved: of rows of gate and up that alternate."""
    name, limit = moe.activation.value, moe.swiglu_limit
    alpha, beta = moe.swiglu_alpha, moe.swiglu_beta
    try:
        if not is_interleaved and name == "silu" and alpha in (None, 1.0) and beta in (None, 0.0):
            return Swiglu(math.inf if limit is None else limit)
        if is_interleaved:
            own = (_LIMIT, _ALPHA, 1.0)
            given_or_own = zip((limit, alpha, beta), own, strict=True)
            if name == "swigluoai" and all(given in (None, value) for given, value in given_or_own):
                return SwigluOai(_ALPHA, _LIMIT)
        elif name == "swigluoai_uninterleave" and None not in (alpha, limit) and beta == 1.0:
            return SwigluOai(alpha, limit)
        if not is_interleaved and name == "relu2_no_mul" and (alpha, beta, limit) == (None,) * 3:
            return Relu2()
        if not is_interleaved and name == "gelu_tanh" and (alpha, beta, limit) == (None,) * 3:
            return GeluTanh()
        if not is_interleaved and name == "swiglustep" and limit in (None, _LIMIT):
            return SwigluStep(_LIMIT)
        situ = (moe.activation_situ_beta, moe.activation_situ_linear_beta)
        if not is_interleaved and name == "situ" and None not in situ:
            return Situ(*situ)
    except (TypeError, ValueError) as error:
        raise UnsupportedError(str(error)) from None
    given = {
        "swiglu_limit": limit,
        "swiglu_alpha": alpha,
        "swiglu_beta": beta,
        "activation_situ_beta": moe.activation_situ_beta,
        "activation_situ_linear_beta": moe.activation_situ_linear_beta,
    }
    parameters = "".join(f", {key}={value}" for key, value in given.items() if value is not None)
    raise UnsupportedError(f"the kernel has no activation {name}{parameters}")
