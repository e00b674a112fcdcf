"""What the adapter asks SGLang for. SGLang is imported when it is asked."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist


def expert_group() -> Any:
    """SGLang's coordinator of the ranks that experts are spread over, with `world_size`,
    `device_group` and `cpu_group`."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().moe_ep_group


def max_tokens_per_rank() -> int:
    """Most tokens of one call, which SGLang checks against its batch sizes at start."""
    from sglang.srt.environ import envs

    return int(envs.SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK.get())


def tokens_of_ranks() -> list[int] | None:
    """How many tokens each data parallel rank brings to this step, if the host knows."""
    from sglang.srt.layers.dp_attention import get_dp_global_num_tokens

    return get_dp_global_num_tokens()


def is_megamoe() -> bool:
    """Whether whole layers of experts are given to one kernel."""
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    return bool(get_moe_a2a_backend().is_megamoe())


def is_dummy() -> bool:
    """Whether SGLang was asked to make weights up."""
    from sglang.srt.runtime_context import get_model

    return getattr(get_model(), "load_format", None) == "dummy"


def is_elastic() -> bool:
    """Whether ranks may fail and come, with their experts."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().moe.elastic_ep_backend is not None


def expert_ids(experts: Any) -> list[int]:
    """The ids that a layer's local experts have in checkpoints, which a load balancer moves."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    num_local = experts.num_local_experts
    first = experts.moe_ep_rank * num_local
    located = get_global_expert_location_metadata() if experts.uses_expert_location else None
    # Layers beyond the map, of draft models, have their experts in order.
    if located is None or experts.layer_id >= located.num_layers:
        return list(range(first, first + num_local))
    own = located.physical_to_logical_map_cpu[experts.layer_id, first : first + num_local]
    ids: list[int] = own.tolist()
    return ids


@cache  # a router asks in each step, and the answer lies in a file
def triton_version() -> str | None:
    """Of the compiler that SGLang's routers come from, None without it."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def keeps_chosen_experts(topk: Any) -> bool:
    """Whether SGLang does nothing with experts that a `TopK` has chosen, but count them: tokens are
    not padded, experts lie where their ids say, and nobody records ids of other integers."""
    from sglang.srt.layers.moe import topk as own

    bound, info = topk.routing_inputs()
    is_untouched: bool = own.precomputed_topk_postprocess_is_noop(topk.topk_config, bound, info)
    return is_untouched and own.get_global_experts_capturer() is None


def chosen_experts(topk: Any, weights: Any, ids: Any) -> Any:
    """What a `TopK` gives, for experts that `keeps_chosen_experts` was true of."""
    from sglang.srt.layers.moe import topk as own

    return own.build_precomputed_topk_output(weights, ids, topk.topk_config, topk.layer_id)


def first_of_ranks(value: Any) -> Any:
    """The first that is not None, of the ranks that experts are spread over. They all come here."""
    group = expert_group()
    if group.world_size == 1:
        return value
    values: list[Any] = [None] * group.world_size
    dist.all_gather_object(values, value, group=group.cpu_group)
    return next((one for one in values if one is not None), None)
