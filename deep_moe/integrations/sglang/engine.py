"""What the adapter asks SGLang for. SGLang is imported when it is asked."""

from __future__ import annotations

from typing import Any


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
