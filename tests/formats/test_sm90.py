"""The SM90 weight layout: every weight exact, decoded as the kernel does it, and at its place."""

import pytest
import torch

from deep_moe.formats.block_scaled import (
    E2M1_MAGNITUDES,
    dequantize_e2m1_ue8m0,
    pack_ue8m0,
    quantize_e2m1_ue8m0,
)
from deep_moe.weights.mxfp4.sm90_e5m2_blocks import MAX_SHIFT
from deep_moe.weights.transform import inverse_transform_weights, transform_weights_for_mega_moe

HIDDEN, INTERMEDIATE = 384, 256  # an odd number of 128 rows in Linear2


def random_codes(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def layer_with(l1_scales: torch.Tensor, l2_scales: torch.Tensor):
    """Random E2M1 codes with the given UE8M0 bytes [E, N, K/32]."""
    layers = []
    for scales in (l1_scales, l2_scales):
        num_experts, num_rows, num_groups = scales.shape
        packed = random_codes(num_experts, num_rows, 16 * num_groups)
        layers.append((packed, pack_ue8m0(scales.to(torch.uint8))))
    return layers


def scales_between(low: int, high: int, num_experts: int = 2):
    return (
        torch.randint(low, high + 1, (num_experts, 2 * INTERMEDIATE, HIDDEN // 32)),
        torch.randint(low, high + 1, (num_experts, HIDDEN, INTERMEDIATE // 32)),
    )


def decoded_e5m2(part: torch.Tensor, thread: int, b: int, h: int, word: int) -> list[float]:
    """8 values of a thread's row (b, h), by the decoder's own steps: table, byte permute, signs.

    part: the 8704 bytes of a warpgroup. word: 0..3, which 8 of the thread's 32 k.
    """
    half, quarter = divmod(word, 2)
    start = b * 4096 + half * 2048 + thread * 16 + (quarter * 2 + h) * 4
    packed = int.from_bytes(bytes(part[start : start + 4].tolist()), "little")
    shift = int(part[8192 + thread * 4 + 2 * b + h])
    low = shift * 0x04040400 + 0x0A080400
    high = shift * 0x04040404 + 0x12100E0C
    assert low < 2**32
    assert high < 2**32
    table = (low | high << 32).to_bytes(8, "little")
    codes = []
    for value in range(8):
        shifted_signs = packed if value < 4 else packed << 4
        sign = shifted_signs >> (8 * (value % 4)) & 0x80
        codes.append(table[packed >> (4 * value) & 7] | sign)
    return torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e5m2).double().tolist()


def logical_row(is_l1: bool, n: int, g: int, b: int, w: int, h: int, r: int) -> int:
    """The checkpoint row of a slot."""
    if is_l1:
        intermediate_idx = 128 * n + 32 * (r // 2) + 4 * (4 * g + w) + 2 * (r % 2) + b
        return intermediate_idx + h * INTERMEDIATE
    return 256 * n + 128 * g + 4 * (8 * w + r) + 2 * b + h


@pytest.mark.parametrize("is_l1", [True, False], ids=["l1", "l2"])
@pytest.mark.parametrize("spread", [0, 3, MAX_SHIFT])
def test_every_value_decodes_exactly_at_its_place(is_l1: bool, spread: int) -> None:
    torch.manual_seed(spread)
    layer = layer_with(*scales_between(110, 110 + spread, num_experts=1))
    transformed = transform_weights_for_mega_moe(*layer, arch="sm_90a")
    source = layer[0 if is_l1 else 1]
    blocks, factors = transformed.l1 if is_l1 else transformed.l2
    expected = dequantize_e2m1_ue8m0(*source, torch.float64)[0]
    assert blocks.shape == (1, 2, 3 if is_l1 else 2, 17408)
    assert factors.shape == (1, 2, 256)

    # Every slot and k-block, and of each thread's four words one, another one for each slot.
    num_rows = expected.shape[0]
    seen = set()
    for n in range(2):
        for slot in range(256):
            g, p = divmod(slot, 128)
            b, w, h, r = p // 64, p // 16 % 4, p // 8 % 2, p % 8
            row = logical_row(is_l1, n, g, b, w, h, r)
            factor = float(factors[0, n, slot])
            if row >= num_rows:
                assert factor == 0
                continue
            seen.add(row)
            for k_block in range(blocks.shape[2]):
                part = blocks[0, n, k_block].view(torch.uint8).view(2, 8704)[g]
                for q in range(4):
                    word = (slot + q + k_block) % 4
                    values = decoded_e5m2(part, 32 * w + 4 * r + q, b, h, word)
                    first = 128 * k_block + 32 * q + 8 * word
                    wanted = expected[row, first : first + 8].tolist()
                    assert [value * factor for value in values] == wanted
    assert seen == set(range(num_rows))


def test_the_decoder_covers_all_shifts() -> None:
    """E5M2 holds every magnitude at every shift: 2^(shift - 13) times its E2M1 value."""
    for shift in range(MAX_SHIFT + 1):
        table = (shift * 0x04040400 + 0x0A080400) | (shift * 0x04040404 + 0x12100E0C) << 32
        codes = torch.tensor(list(table.to_bytes(8, "little")), dtype=torch.uint8)
        values = codes.view(torch.float8_e5m2).double()
        assert values.tolist() == [m * 2.0 ** (shift - 13) for m in E2M1_MAGNITUDES]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0), (0, 26), (100, 126), (127, 127), (228, 254), (254, 254), (241, 254)]
)
def test_inverse_gives_the_input_back_over_the_whole_range(low: int, high: int) -> None:
    torch.manual_seed(low)
    layer = layer_with(*scales_between(low, high))
    transformed = transform_weights_for_mega_moe(*layer, arch="sm_90a")
    assert transformed.l1.sf.isfinite().all()
    restored = inverse_transform_weights(*transformed, arch="sm_90a")
    for before, after in zip(layer, restored, strict=True):
        assert torch.equal(before[0], after[0])
        assert torch.equal(before[1], after[1])


def test_quantized_normal_weights_are_exact() -> None:
    torch.manual_seed(0)
    spread = torch.exp2(torch.randint(-6, 7, (2, 2 * INTERMEDIATE, 1)).float())
    l1 = quantize_e2m1_ue8m0(torch.randn(2, 2 * INTERMEDIATE, HIDDEN) * 0.02 * spread)
    l2 = quantize_e2m1_ue8m0(torch.randn(2, HIDDEN, INTERMEDIATE) * 0.02)
    restored = inverse_transform_weights(
        *transform_weights_for_mega_moe(l1, l2, arch="sm_90a"), arch="sm_90a"
    )
    for before, after in zip((l1, l2), restored, strict=True):
        assert torch.equal(
            dequantize_e2m1_ue8m0(*before, torch.float64),
            dequantize_e2m1_ue8m0(*after, torch.float64),
        )


def test_zeros_fit_any_scale() -> None:
    """A group of zeros is quantized with byte 0, far from its neighbours."""
    torch.manual_seed(0)
    x = torch.randn(1, 2 * INTERMEDIATE, HIDDEN)
    x[:, ::3, 32:64] = 0
    x[:, 5] = 0
    l1 = quantize_e2m1_ue8m0(x)
    l2 = quantize_e2m1_ue8m0(torch.randn(1, HIDDEN, INTERMEDIATE))
    transformed = transform_weights_for_mega_moe(l1, l2, arch="sm_90a")
    restored = inverse_transform_weights(*transformed, arch="sm_90a")
    assert torch.equal(restored.l1.weight, l1[0])
    assert torch.equal(
        dequantize_e2m1_ue8m0(*restored.l1, torch.float64),
        dequantize_e2m1_ue8m0(*l1, torch.float64),
    )


class TestRefusals:
    @pytest.mark.parametrize(("layer_idx", "row"), [(0, 300), (1, 383)])
    def test_a_row_that_spreads_too_far(self, layer_idx: int, row: int) -> None:
        torch.manual_seed(0)
        scales = scales_between(120, 120)
        scales[layer_idx][1, row, 2] += MAX_SHIFT + 1
        layer = layer_with(*scales)
        layer[layer_idx][0][:, :, :] |= 0x11  # no zeros
        name = ("l1_weights", "l2_weights")[layer_idx]
        with pytest.raises(ValueError, match=rf"{name}: expert 1, row {row} .*2\^-7 to 2\^20"):
            transform_weights_for_mega_moe(*layer, arch="sm_90a")

    def test_the_widest_spread_is_accepted(self) -> None:
        scales = scales_between(120, 120)
        scales[0][1, 300, 2] += MAX_SHIFT
        transform_weights_for_mega_moe(*layer_with(*scales), arch="sm_90a")

    @pytest.mark.parametrize("low", [120, 250])
    def test_a_scale_that_is_no_number(self, low: int) -> None:
        scales = scales_between(low, low)
        scales[0][0, 7, 3] = 255
        with pytest.raises(ValueError, match=r"l1_weights: expert 0, row 7 must have scales"):
            transform_weights_for_mega_moe(*layer_with(*scales), arch="sm_90a")


def test_blocks_do_not_depend_on_their_neighbours() -> None:
    """However many k-blocks are worked on at once."""
    torch.manual_seed(0)
    hidden = 17 * 128
    l1, l2 = layer_with(
        torch.full((2, 2 * INTERMEDIATE, hidden // 32), 120),
        torch.full((2, hidden, INTERMEDIATE // 32), 120),
    )
    whole = transform_weights_for_mega_moe(l1, l2, arch="sm_90a").l1.weight
    for k in range(17):
        bytes_of_block, rows = slice(64 * k, 64 * (k + 1)), slice(128 * k, 128 * (k + 1))
        part = transform_weights_for_mega_moe(
            (l1[0][..., bytes_of_block], l1[1][..., k : k + 1]),
            (l2[0][:, rows], l2[1][:, rows]),
            arch="sm_90a",
        )
        assert torch.equal(whole[:, :, k], part.l1.weight[:, :, 0])
    restored = inverse_transform_weights(
        *transform_weights_for_mega_moe(l1, l2, arch="sm_90a"), arch="sm_90a"
    )
    assert torch.equal(restored.l1.weight, l1[0])


def test_strided_sources_give_the_same_result() -> None:
    torch.manual_seed(0)
    layer = layer_with(*scales_between(120, 130))
    strided = [
        tuple(torch.stack([tensor, tensor + 1], dim=-1)[..., 0] for tensor in pair)
        for pair in layer
    ]
    plain = transform_weights_for_mega_moe(*layer, arch="sm_90a")
    again = transform_weights_for_mega_moe(*strided, arch="sm_90a")
    for expected, tensor in zip([*plain.l1, *plain.l2], [*again.l1, *again.l2], strict=True):
        assert tensor.is_contiguous()
        assert torch.equal(expected, tensor)


@pytest.mark.gpu
def test_gpu_gives_what_the_cpu_gives() -> None:
    torch.manual_seed(0)
    layer = layer_with(*scales_between(110, 130))
    on_gpu = [tuple(tensor.cuda() for tensor in pair) for pair in layer]
    expected = transform_weights_for_mega_moe(*layer, arch="sm_90a")
    result = transform_weights_for_mega_moe(*on_gpu, arch="sm_90a")
    for a, b in zip([*expected.l1, *expected.l2], [*result.l1, *result.l2], strict=True):
        assert torch.equal(a, b.cpu())


@pytest.mark.gpu
def test_a_layer_needs_little_more_memory_than_itself() -> None:
    layer = [
        (torch.zeros(8, 2048, 1024, dtype=torch.int8, device="cuda"),
         torch.full((8, 2048, 16), 0x7F7F7F7F, dtype=torch.int32, device="cuda")),
        (torch.zeros(8, 2048, 512, dtype=torch.int8, device="cuda"),
         torch.full((8, 2048, 8), 0x7F7F7F7F, dtype=torch.int32, device="cuda")),
    ]  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = transform_weights_for_mega_moe(*layer, arch="sm_90a")
    own = sum(tensor.nbytes for pair in result for tensor in pair)
    one_expert = 2048 * 1024
    assert torch.cuda.max_memory_allocated() - before < own + 8 * one_expert
