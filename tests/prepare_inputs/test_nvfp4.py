"""`prepare_inputs` into buffers of NVFP4 tokens: every byte as `quantize_nvfp4_tokens` has it."""

from __future__ import annotations

import pytest
import torch

import deep_moe
from deep_moe.fused.buffer import SymmBuffer

from .conftest import FILL, VIEWS, bits, routing


def buffer_of(hidden: int = 256, **formats: str) -> SymmBuffer:
    formats = formats or {"weights": "nvfp4", "token_format": "nvfp4"}
    buffer = deep_moe.get_symm_buffer_for_mega_moe(None, 64, 16, 2, hidden, 128, **formats)
    for view in VIEWS:
        getattr(buffer, view).view(torch.uint8).fill_(FILL)
    return buffer


def check(buffer: SymmBuffer, x: torch.Tensor, scale: float | None, **options) -> None:
    num_tokens = x.shape[0]
    given = routing(num_tokens, 2)
    deep_moe.prepare_inputs(x, *given, buffer, **options)
    expected = deep_moe.quantize_nvfp4_tokens(x, scale)
    # Behind the last scale in a word nothing is written.
    num_bytes = {"x": x.shape[1] // 2, "x_sf": 4 + x.shape[1] // 16}
    for (name, end), rows in zip(num_bytes.items(), expected, strict=True):
        view = getattr(buffer, name)
        assert torch.equal(bits(view[:num_tokens])[:, :end], bits(rows)[:, :end]), name
        assert bool((bits(view[:num_tokens])[:, end:] == FILL).all()), f"{name} behind a row"
        assert bool((bits(view[num_tokens:]) == FILL).all()), f"{name} after the last token"
    assert torch.equal(buffer.topk_idx[:num_tokens], given[0])


# Rows of the buffer are longer where sizes are padded; some threads have no, some several chunks.
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("hidden", [32, 352, 7168])
def test_every_byte(hidden: int, arch: str) -> None:
    generator = torch.Generator().manual_seed(hidden)
    sizes = torch.exp2(torch.randint(-40, 40, (9, 1), generator=generator).float())
    x = (torch.randn(9, hidden, generator=generator) * sizes).bfloat16()
    x[1], x[2, 5], x[3, hidden - 1] = 0, torch.inf, torch.nan
    x[4] = torch.randn(hidden, generator=generator) * 2.0**-120  # below the smallest token's scale
    check(buffer_of(hidden), x, None, arch=arch)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scale_of_all_tokens(shape: tuple[int, ...]) -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[3], x[4, 17] = x[3] * 1000, torch.nan
    scale = torch.full(shape, 0.0017)
    check(buffer_of(), x, scale.max().item(), token_scale=scale)


def test_with_and_without_a_scale_of_all_tokens_in_turn() -> None:
    """What the first call has worked out holds for calls of its kind only."""
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = torch.tensor([0.0017])
    for _ in range(2):
        check(buffer_of(), x, None)
        check(buffer_of(), x, scale.item(), token_scale=scale)


def test_what_does_not_go_together_is_named() -> None:
    x, given = torch.zeros(2, 256).bfloat16(), routing(2, 2)
    mxfp8 = buffer_of(weights="mxfp4")
    with pytest.raises(ValueError, match="token_scale must be None for a buffer whose tokens"):
        deep_moe.prepare_inputs(x, *given, mxfp8, token_scale=torch.ones(1))
    with pytest.raises(TypeError, match=r"token_scale must be torch\.float32; got torch\.float64"):
        deep_moe.prepare_inputs(x, *given, buffer_of(), token_scale=torch.ones(1).double())
    with pytest.raises(ValueError, match=r"token_scale must .*got .*2"):
        deep_moe.prepare_inputs(x, *given, buffer_of(), token_scale=torch.ones(2))
    with pytest.raises(ValueError, match="arch must be one that rounds to E2M1"):
        deep_moe.prepare_inputs(x, *given, buffer_of(), arch="sm_90a")
