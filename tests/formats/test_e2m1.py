"""Packed E2M1 with UE8M0 scales, against the enumerated values of the format."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_moe.formats.block_scaled import (
    dequantize_e2m1_ue8m0,
    pack_e2m1_codes,
    pack_ue8m0,
    quantize_e2m1_ue8m0,
    unpack_e2m1,
    unpack_ue8m0,
)

MAGNITUDES = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def quantized_group(values: list[float]) -> tuple[list[int], int]:
    x = torch.zeros(128)
    x[: len(values)] = torch.tensor(values, dtype=torch.float32)
    packed, sf = quantize_e2m1_ue8m0(x)
    codes = []
    for byte in packed.view(torch.uint8).tolist():
        codes += [byte & 15, byte >> 4]
    return codes[: len(values)], int(unpack_ue8m0(sf)[0])


def test_low_nibble_comes_first():
    codes = torch.arange(16, dtype=torch.uint8)
    packed = pack_e2m1_codes(codes)
    assert packed.dtype == torch.int8
    assert packed.view(torch.uint8).tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    expected = [float(m) for m in MAGNITUDES]
    assert unpack_e2m1(packed).tolist() == expected + [-value for value in expected]
    assert math.copysign(1, unpack_e2m1(packed)[8].item()) == -1


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=32)
)
def test_any_group_matches_exact_arithmetic(values):
    codes, byte = quantized_group(values)
    exact = [Fraction(value) for value in values]
    amax = max(map(abs, exact))
    scale = Fraction(2) ** (byte - 127)
    assert amax <= 6 * scale
    assert byte == 0 or amax > 3 * scale
    for value, raw, code in zip(exact, values, codes, strict=True):
        distances = [abs(magnitude - abs(value) / scale) for magnitude in MAGNITUDES]
        nearest = min(range(8), key=lambda index: (distances[index], index & 1))
        assert code & 7 == nearest
        assert (code >> 3 == 1) == (math.copysign(1, raw) < 0)


def test_midpoints_round_to_even_codes():
    for code in range(7):
        midpoint = float((MAGNITUDES[code] + MAGNITUDES[code + 1]) / 2)
        codes, byte = quantized_group([midpoint, -midpoint, 6.0])
        even = code if code % 2 == 0 else code + 1
        assert (codes[:2], byte) == ([even, even | 8], 127)


def test_every_packed_byte_survives_a_round_trip():
    packed = torch.arange(256, dtype=torch.uint8).view(torch.int8).repeat_interleave(64)
    packed = packed.reshape(256, 64)
    packed[:, 15::16] = torch.tensor(0x77, dtype=torch.int8)  # each group reaches 6
    sf = pack_ue8m0(torch.tensor([120, 127, 133, 1], dtype=torch.uint8).repeat(256, 1))
    again, again_sf = quantize_e2m1_ue8m0(dequantize_e2m1_ue8m0(packed, sf))
    assert torch.equal(again_sf, sf)
    assert torch.equal(again, packed)


def test_leading_dimensions_are_kept():
    packed, sf = quantize_e2m1_ue8m0(torch.randn(2, 3, 256))
    assert packed.shape == (2, 3, 128)
    assert sf.shape == (2, 3, 2)
    assert dequantize_e2m1_ue8m0(packed, sf).shape == (2, 3, 256)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(bad):
    x = torch.zeros(128)
    x[5] = bad
    with pytest.raises(ValueError, match="x must be finite"):
        quantize_e2m1_ue8m0(x)


def test_fp8_bytes_are_not_taken_for_fp4():
    with pytest.raises(TypeError, match=r"packed must be int8.*got torch.float8_e4m3fn"):
        unpack_e2m1(torch.zeros(4).to(torch.float8_e4m3fn))
