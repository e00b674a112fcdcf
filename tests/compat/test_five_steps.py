"""The layer in five steps as a well-known document has it, by the names of DeepEP, DeepGEMM and
the activation beside them, and the fused call by DeepGEMM's names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deep_moe.compat import deep_ep, deep_gemm, tilelang_ops
from deep_moe.compat.deep_gemm.testing import calc_diff
from deep_moe.compat.deep_gemm.utils import per_token_cast_to_fp4, per_token_cast_to_fp8
from deep_moe.formats.block_scaled import quantize_e4m3_ue8m0, unpack_ue8m0
from deep_moe.formats.float_scaled import quantize_e4m3_float

# Those of test_deep_gemm.py, whose kernel is there already.
EXPERTS, TOPK, HIDDEN, INTERMEDIATE, MAX_TOKENS, CLAMP = 4, 2, 256, 128, 10, 0.5
TOKENS = 5

# As it stands there, but for the device.
DOCUMENTED = """
recv_x, _, recv_topk_weights, handle, _ = ep_buffer.dispatch(
    x, topk_idx=topk_idx, topk_weights=topk_weights, num_experts=num_experts,
    expert_alignment=alignment, do_cpu_sync=False, do_handle_copy=False, do_expand=True,
    use_tma_aligned_col_major_sf=True)
n = recv_x[0].size(0)
l1_y = torch.empty((n, intermediate_hidden * 2), dtype=torch.bfloat16, device='cpu')
deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(
    recv_x, l1_weights, l1_y, handle.psum_num_recv_tokens_per_expert, use_psum_layout=True,
    recipe=(1, 1, 32))
l1_y = tilelang_ops.swiglu_apply_weight_to_fp8(
    x=l1_y,
    topk_weights=recv_topk_weights,
    avail_tokens=handle.psum_num_recv_tokens_per_expert[-1],
    num_per_channels=32,
    use_col_major_scales=True,
    round_scale=True,
    ue8m0_scale=True,
    output_bf16=False,
    clamp_value=args.activation_clamp,
    fast_math=bool(args.fast_math)
)
l2_y = torch.empty((n, hidden), dtype=torch.bfloat16, device='cpu')
deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(
    l1_y, l2_weights, l2_y, handle.psum_num_recv_tokens_per_expert, use_psum_layout=True,
    recipe=(1, 1, 32))
y = ep_buffer.combine(l2_y, handle=handle)[0]
"""


def fp4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made = [per_token_cast_to_fp4(one, True, 32) for one in weights]
    values, sf = (torch.stack(parts) for parts in zip(*made, strict=True))
    layout = deep_gemm.transform_sf_into_required_layout
    return values, layout(sf, *weights.shape[1:], (1, 32), num_groups=len(weights))


def test_the_documented_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    l1 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) / 8
    l2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) / 8
    l1_weights, l2_weights = fp4(l1), fp4(l2)
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator)
    x = per_token_cast_to_fp8(tokens, True, 32, use_packed_ue8m0=True)
    topk_weights, topk_idx = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK)
    topk_idx[2, 1] = -1
    names: dict[str, Any] = {
        "torch": torch,
        "deep_gemm": deep_gemm,
        "tilelang_ops": tilelang_ops,
        "ep_buffer": deep_ep.ElasticBuffer(
            None, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, device="cpu"
        ),
        "args": SimpleNamespace(activation_clamp=CLAMP, fast_math=1),
        "num_experts": EXPERTS,
        "alignment": deep_gemm.get_mk_alignment_for_contiguous_layout(),
        "hidden": HIDDEN,
        "intermediate_hidden": INTERMEDIATE,
        "x": x,
        "topk_idx": topk_idx,
        "topk_weights": topk_weights,
        "l1_weights": l1_weights,
        "l2_weights": l2_weights,
    }
    exec(DOCUMENTED, names)
    names["ep_buffer"].destroy()
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(
        None, EXPERTS, MAX_TOKENS, TOPK, HIDDEN, INTERMEDIATE, device="cpu"
    )
    inputs = (*x, topk_idx, topk_weights)
    for view, given in zip(
        (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights), inputs, strict=True
    ):
        view[:TOKENS].copy_(given)
    fused = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    weights = deep_gemm.transform_weights_for_mega_moe(l1_weights, l2_weights)
    deep_gemm.fp8_fp4_mega_moe(fused, *weights, buffer, activation_clamp=CLAMP)
    buffer.destroy()
    # The same numbers, but each slot's row is rounded to BF16, and weights before a quantization.
    assert calc_diff(names["y"], fused) < 1e-3
    assert fused.abs().max() > 0.01


ROWS = 5
OPTIONS: dict[str, Any] = {
    "num_per_channels": 32,
    "use_col_major_scales": True,
    "round_scale": True,
    "ue8m0_scale": True,
    "output_bf16": False,
}


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, 2 * INTERMEDIATE, generator=generator).bfloat16()
    return x, torch.rand(ROWS, generator=generator)


@pytest.mark.parametrize("num_per_channels", [32, 128])
def test_the_activation_alone(num_per_channels: int) -> None:
    x, topk_weights = rows()
    gate, up = x.float().chunk(2, dim=1)
    y = torch.nn.functional.silu(gate.clamp(max=CLAMP)) * up.clamp(-CLAMP, CLAMP)
    y = y * topk_weights.unsqueeze(1)
    y[3:] = 0
    packed = num_per_channels == 32
    values, sf, bf16 = tilelang_ops.swiglu_apply_weight_to_fp8(
        x,
        topk_weights,
        torch.tensor(3, dtype=torch.int32),
        **OPTIONS
        | {"num_per_channels": num_per_channels, "round_scale": packed, "ue8m0_scale": packed}
        | {"output_bf16": True},
        clamp_value=CLAMP,
    )
    expected, scales = quantize_e4m3_ue8m0(y) if packed else quantize_e4m3_float(y)
    assert torch.equal(values.float(), expected.float())
    assert torch.equal(sf, scales)
    assert sf.stride(0) == 1
    assert torch.equal(bf16, y.bfloat16())
    if packed:
        assert unpack_ue8m0(sf.contiguous()).shape == (ROWS, INTERMEDIATE // 32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.zeros(5, 192).bfloat16()}, "x must be .*I a multiple of 128; got"),
        ({"topk_weights": torch.ones(4)}, "topk_weights must have shape"),
        ({"avail_tokens": torch.ones(1).int()}, "avail_tokens must have shape"),
        ({"num_per_channels": 64}, "num_per_channels must be 32 or 128; got 64"),
        ({"ue8m0_scale": False}, "ue8m0_scale must be True with num_per_channels 32; got False"),
        ({"num_per_channels": 128}, "round_scale must be False with num_per_channels 128"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    x, topk_weights = rows()
    given = {"x": x, "topk_weights": topk_weights, "avail_tokens": None, **OPTIONS, **changes}
    with pytest.raises(ValueError, match=words):
        tilelang_ops.swiglu_apply_weight_to_fp8(**given)
