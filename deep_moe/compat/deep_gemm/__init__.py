"""DeepGEMM's Mega MoE, by its names, arguments and input formats, run by deep_moe.

>>> import torch
>>> import deep_moe.compat.deep_gemm as deep_gemm
>>> from deep_moe.compat.deep_gemm.utils import per_token_cast_to_fp4, per_token_cast_to_fp8
>>> def weights(num_rows, num_columns):
...     weight, sf = per_token_cast_to_fp4(torch.randn(num_rows, num_columns), True, 32)
...     layout = deep_gemm.transform_sf_into_required_layout
...     return weight[None], layout(sf[None], num_rows, num_columns, (1, 32), num_groups=1)
>>> l1, l2 = deep_gemm.transform_weights_for_mega_moe(weights(256, 128), weights(128, 128))
>>> buffer = deep_gemm.get_symm_buffer_for_mega_moe(
...     None, num_experts=1, num_max_tokens_per_rank=8, num_topk=1, hidden=128,
...     intermediate_hidden=128, device="cpu")
>>> x = per_token_cast_to_fp8(torch.randn(2, 128), True, 32, use_packed_ue8m0=True)
>>> inputs = (*x, torch.zeros(2, 1), torch.ones(2, 1))
>>> for view, value in zip((buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights), inputs):
...     _ = view[:2].copy_(value)
>>> y = torch.empty(2, 128, dtype=torch.bfloat16)
>>> deep_gemm.fp8_fp4_mega_moe(y, l1, l2, buffer, activation_clamp=10)
>>> buffer.destroy()

It runs where DeepGEMM's does not as well: on H100 and H200, and on a CPU in the emulator, with a
gloo group or None. Beside it are the grouped products of FP8 with scales per 128 and per 128 x 128,
on Hopper and in the emulator, those of BF16 and of FP8 with FP4 by PyTorch, and no other GEMM.
Other kinds of weights are refused in words. So are shared experts: deep_moe's own call computes
those.
"""

from __future__ import annotations

from typing import Any

from . import testing, utils
from .grouped import (
    get_m_alignment_for_contiguous_layout,
    get_mk_alignment_for_contiguous_layout,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
)
from .grouped_bf16 import (
    m_grouped_bf16_gemm_nt_contiguous,
    m_grouped_bf16_gemm_nt_masked,
    m_grouped_fp8_fp4_gemm_nt_contiguous,
    m_grouped_fp8_fp4_gemm_nt_masked,
)
from .hopper import (
    get_symm_buffer_for_sm90_mega_moe,
    mega_moe_pre_dispatch_sm90,
    transform_weights_for_mega_moe_sm90,
)
from .mega import (
    SymmBuffer,
    bf16_mega_moe,
    fp8_fp4_mega_moe,
    fp8_mega_moe,
    get_block_m_for_mega_moe,
    get_num_sms,
    get_symm_buffer_for_mega_moe,
    get_token_alignment_for_mega_moe,
    mega_moe_pre_dispatch,
    set_num_sms,
    transform_weights_for_mega_moe,
    use_deterministic_algorithms,
)
from .operands import transform_sf_into_required_layout

__all__ = [
    "SymmBuffer",
    "bf16_mega_moe",
    "fp8_fp4_mega_moe",
    "fp8_mega_moe",
    "get_block_m_for_mega_moe",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_num_sms",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe",
    "get_token_alignment_for_mega_moe",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "mega_moe_pre_dispatch",
    "mega_moe_pre_dispatch_sm90",
    "set_num_sms",
    "testing",
    "transform_sf_into_required_layout",
    "transform_weights_for_mega_moe",
    "transform_weights_for_mega_moe_sm90",
    "use_deterministic_algorithms",
    "utils",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}: it is DeepGEMM's Mega MoE of FP8 "
        "tokens and FP4 or FP8 weights, or of BF16, and grouped products of FP8, "
        f"{', '.join(__all__)}"
    )
