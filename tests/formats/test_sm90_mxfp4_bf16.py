"""MXFP4 weights as SM90 reads them for BF16 tokens: every weight exact, decoded as the kernel does
it, and at its place."""

from __future__ import annotations

import pytest
import torch

from deep_moe.formats.block_scaled import dequantize_e2m1_ue8m0, pack_ue8m0
from deep_moe.weights.layers import LayerWeights, MegaMoEWeights
from deep_moe.weights.mxfp4.sm90_bf16_blocks import SCALES
from deep_moe.weights.transform import (
    empty_weights_for_mega_moe,
    inverse_transform_weights,
    transform_weights_for_mega_moe,
)

MAX_SPREAD = SCALES.max_spread
HIDDEN, INTERMEDIATE = 384, 256  # an odd number of 128 rows in Linear2
LOWER_BYTES = (0x00, 0x40, 0x80, 0xC0)
UPPER_BYTES = (0x00, 0x01, 0x80, 0x81)


def layer_between(low: int, high: int, num_experts: int = 2) -> list[LayerWeights]:
    """Random E2M1 codes with UE8M0 bytes from `low` to `high`."""
    torch.manual_seed(low)
    sizes = ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    return [
        LayerWeights(
            torch.randint(-128, 128, (num_experts, rows, values // 2), dtype=torch.int8),
            pack_ue8m0(
                torch.randint(low, high + 1, (num_experts, rows, values // 32)).to(torch.uint8)
            ),
        )
        for rows, values in sizes
    ]


def transform(layer: list[LayerWeights]) -> MegaMoEWeights:
    return transform_weights_for_mega_moe(*layer, "sm_90a", weights="mxfp4", token_format="bf16")


def inverse(weights: MegaMoEWeights) -> MegaMoEWeights:
    return inverse_transform_weights(*weights, "sm_90a", weights="mxfp4", token_format="bf16")


def decoded(part: torch.Tensor, thread: int, b: int, product: int) -> torch.Tensor:
    """What a thread has of its rows (b, 0) and (b, 1), float64 [h, c, v], by the decoder's own
    steps: selectors, byte permute, multiplication in BF16.

    part: the 4352 bytes of a warpgroup.
    """
    start = 2048 * b + 16 * thread + 4 * product
    word = int.from_bytes(bytes(part[start : start + 4].tolist()), "little")
    codes = torch.empty((2, 2, 2), dtype=torch.int32)
    multipliers = torch.empty((2, 1, 1))
    for h in range(2):
        for c in range(2):
            selectors = word >> (16 * h + 2 * c) & 0x3333
            for v in range(2):
                lower, upper = selectors >> 8 * v & 3, selectors >> 8 * v + 4 & 3
                codes[h, c, v] = UPPER_BYTES[upper] << 8 | LOWER_BYTES[lower]
        byte = int(part[4096 + thread // 4 * 8 + 4 * b + product // 2 * 2 + h])
        multipliers[h] = 2.0 ** (byte - 127)
    values = codes.to(torch.int16).view(torch.bfloat16) * multipliers.bfloat16()
    return values.double()


@pytest.mark.parametrize("is_l1", [True, False], ids=["l1", "l2"])
@pytest.mark.parametrize("spread", [0, 3, MAX_SPREAD])
def test_every_value_decodes_exactly_at_its_place(is_l1: bool, spread: int) -> None:
    layer = layer_between(60, 60 + spread, num_experts=1)
    expected = dequantize_e2m1_ue8m0(*layer[0 if is_l1 else 1], torch.float64)[0]
    made = transform(layer)
    blocks, factors = made.l1 if is_l1 else made.l2
    assert blocks.shape == (1, 2, 6 if is_l1 else 4, 8704)
    assert factors.shape == (1, 2, 256)
    seen = set()
    for n in range(2):
        for slot in range(0, 256, 16):  # of rows (b, h) of 8 lanes' four
            g, b, w = slot // 128, slot // 64 % 2, slot // 16 % 4
            for r in range(8):
                if is_l1:
                    value = 128 * n + 64 * g + 16 * w + 2 * r + b
                    rows = [value, value + INTERMEDIATE]
                else:
                    first = 256 * n + 128 * g + 32 * w + 4 * r + 2 * b
                    rows = [first, first + 1]
                own_factors = factors[0, n, [slot + r, slot + 8 + r]].double()
                if rows[1] >= expected.shape[0]:
                    assert own_factors.tolist() == [0, 0]
                    continue
                seen.update(rows)
                for k_block in range(blocks.shape[2]):
                    part = blocks[0, n, k_block].view(torch.uint8).view(2, 4352)[g]
                    q, product = (r + k_block) % 4, (r // 4 + k_block) % 4
                    values = decoded(part, 32 * w + 4 * r + q, b, product)
                    first = 64 * k_block + 16 * product + 2 * q
                    wanted = expected[rows][:, [first, first + 1, first + 8, first + 9]]
                    made = values.flatten(1) * own_factors.unsqueeze(1)
                    assert torch.equal(made, wanted)
    assert seen == set(range(expected.shape[0]))


@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 125), (100, 126), (129, 254), (254, 254)])
def test_inverse_gives_the_input_back_over_the_whole_range(low: int, high: int) -> None:
    layer = layer_between(low, high)
    transformed = transform(layer)
    assert transformed.l1.sf.isfinite().all()
    for before, after in zip(layer, inverse(transformed), strict=True):
        assert torch.equal(before.weight, after.weight)
        assert torch.equal(before.sf, after.sf)


def test_zeros_fit_any_scale() -> None:
    layer = layer_between(200, 210, num_experts=1)
    layer[0].weight[:, ::3, 16:32] = 0
    scales = layer[0].sf.view(torch.uint8)
    scales[:, ::3, 1] = 0
    restored = inverse(transform(layer))
    assert torch.equal(restored.l1.weight, layer[0].weight)
    assert torch.equal(
        dequantize_e2m1_ue8m0(*restored.l1, torch.float64),
        dequantize_e2m1_ue8m0(*layer[0], torch.float64),
    )


@pytest.mark.parametrize(("layer_idx", "row"), [(0, 300), (1, 383)])
def test_a_row_that_spreads_too_far_is_refused(layer_idx: int, row: int) -> None:
    layer = layer_between(120, 120)
    layer[layer_idx].weight.bitwise_or_(0x11)  # no zeros
    scales = layer[layer_idx].sf.view(torch.uint8)
    scales[1, row, 2] += MAX_SPREAD
    transform(layer)
    scales[1, row, 2] += 1
    name = ("l1_weights", "l2_weights")[layer_idx]
    with pytest.raises(ValueError, match=rf"{name}: expert 1, row {row} .*2\^-7 to 2\^119"):
        transform(layer)


def test_expert_by_expert_and_block_by_block() -> None:
    layer = layer_between(110, 130)
    whole = transform(layer)
    weights = empty_weights_for_mega_moe(
        2, HIDDEN, INTERMEDIATE, arch="sm_90a", weights="mxfp4", token_format="bf16"
    )
    for i in range(2):
        one = slice(i, i + 1)
        transform_weights_for_mega_moe(
            *((own.weight[one], own.sf[one]) for own in layer),
            "sm_90a",
            weights="mxfp4",
            token_format="bf16",
            out=weights.expert(i),
        )
    for made, expected in zip((*weights.l1, *weights.l2), (*whole.l1, *whole.l2), strict=True):
        assert torch.equal(made, expected)


@pytest.mark.gpu
def test_gpu_gives_what_the_cpu_gives() -> None:
    layer = layer_between(110, 130)
    on_gpu = [LayerWeights(*(tensor.cuda() for tensor in pair)) for pair in layer]
    expected, result = transform(layer), transform(on_gpu)
    for a, b in zip((*expected.l1, *expected.l2), (*result.l1, *result.l2), strict=True):
        assert torch.equal(a, b.cpu())
