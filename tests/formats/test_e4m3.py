"""E4M3 with UE8M0 scales, against enumerations in float64 and exact logarithms."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_moe.formats.block_scaled import (
    dequantize_e4m3_ue8m0,
    pack_ue8m0,
    quantize_e4m3_ue8m0,
    ue8m0_to_float,
    unpack_ue8m0,
)
from deep_moe.formats.float_scaled import quantize_e4m3_float

# Every finite E4M3 value with its code, from the definition: bias 7, 3 mantissa bits, no infinity.
CODES = [code for code in range(256) if code & 0x7F != 0x7F]


def e4m3_value(code: int) -> Fraction:
    sign = -1 if code & 0x80 else 1
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 0:
        return sign * Fraction(mantissa, 8) * Fraction(1, 64)
    return sign * (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


def nearest_even_magnitude(value: Fraction) -> int:
    """The code of the nearest positive value; of two equally near ones the even code."""
    return min(range(0x7F), key=lambda code: (abs(e4m3_value(code) - value), code & 1))


def exact_scale_exponent(amax: Fraction, maximum: int) -> int:
    """ceil(log2(amax / maximum)) without floating point."""
    exponent = 0
    while amax > maximum * Fraction(2) ** exponent:
        exponent += 1
    while amax <= maximum * Fraction(2) ** (exponent - 1):
        exponent -= 1
    return exponent


def quantized_group(values: list[float]) -> tuple[list[int], int]:
    x = torch.zeros(128)
    x[: len(values)] = torch.tensor(values, dtype=torch.float32)
    quantized, sf = quantize_e4m3_ue8m0(x)
    return quantized.view(torch.uint8)[: len(values)].tolist(), int(unpack_ue8m0(sf)[0])


def test_every_value_of_the_format_survives():
    signs = [-1.0 if code & 0x80 else 1.0 for code in CODES]
    magnitudes = [float(e4m3_value(code & 0x7F)) for code in CODES]
    finite = torch.tensor(magnitudes).copysign(torch.tensor(signs))
    x = torch.full((len(CODES), 128), 448.0)  # so that the scale is one
    x[:, 0] = finite
    values, sf = quantize_e4m3_ue8m0(x)
    assert unpack_ue8m0(sf).unique().tolist() == [127]
    assert values.view(torch.uint8)[:, 0].tolist() == CODES
    assert torch.equal(dequantize_e4m3_ue8m0(values, sf)[:, 0], finite)


def test_midpoints_round_to_even_codes():
    for code in range(0x7E):
        midpoint = (e4m3_value(code) + e4m3_value(code + 1)) / 2
        codes, byte = quantized_group([float(midpoint), 448.0])
        assert byte == 127
        assert codes[0] == (code if code % 2 == 0 else code + 1)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=32)
)
def test_any_finite_group_matches_exact_arithmetic(values):
    codes, byte = quantized_group(values)
    exact = [Fraction(value) for value in values]
    amax = max(map(abs, exact))
    expected_byte = 0 if amax == 0 else max(0, exact_scale_exponent(amax, 448) + 127)
    assert byte == expected_byte
    for value, raw, code in zip(exact, values, codes, strict=True):
        scaled = abs(value) / Fraction(2) ** (byte - 127)
        sign = 0x80 if math.copysign(1, raw) < 0 else 0
        assert code == nearest_even_magnitude(scaled) | sign


@pytest.mark.parametrize("exponent", [-149, -140, -127, -126, -120, -10, 0, 7, 100, 119])
@pytest.mark.parametrize("step", [-1, 0, 1])
def test_scale_is_exact_at_and_around_powers_of_448(exponent, step):
    """amax one bit above 448 * 2^e takes the next scale, though log2 in float32 cannot tell."""
    amax = torch.tensor(448.0, dtype=torch.float64) * 2.0**exponent
    bits = amax.to(torch.float32).view(torch.int32) + step
    value = bits.view(torch.float32).item()
    codes, byte = quantized_group([value])
    assert byte == max(0, exact_scale_exponent(Fraction(value), 448) + 127)
    assert codes[0] <= 0x7E


def test_zero_and_denormal_groups_do_not_overflow():
    assert quantized_group([0.0] * 32) == ([0] * 32, 0)
    tiny = 2.0**-149
    codes, byte = quantized_group([tiny, -tiny])
    assert byte == 0
    # 2^-149 * 2^127 = 2^-22 is below half of the smallest E4M3 value.
    assert codes == [0x00, 0x80]
    codes, byte = quantized_group([2.0**-130])
    assert (codes, byte) == ([0x20], 0)  # 2^-3 * 2^-127


def test_largest_float32_stays_finite():
    largest = torch.finfo(torch.float32).max
    codes, byte = quantized_group([largest, -largest, 1.0])
    # 2^128 / 448 lies between 2^119 and 2^120.
    assert (codes, byte) == ([0x78, 0xF8, 0x00], 247)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_group_with_a_value_that_is_not_finite_becomes_nan_and_the_next_does_not(bad):
    x = torch.linspace(-5, 5, 256).reshape(2, 128)
    clean_values, clean_sf = quantize_e4m3_ue8m0(x)
    x[1, 40] = bad
    values, sf = quantize_e4m3_ue8m0(x)
    codes, clean_codes = values.view(torch.uint8), clean_values.view(torch.uint8)
    assert (codes[1, 32:64] == 0x7F).all()
    assert unpack_ue8m0(sf)[1, 1] == 247
    clean_codes[1, 32:64] = 0x7F
    assert torch.equal(codes, clean_codes)
    others = [0, 2, 3]
    assert torch.equal(unpack_ue8m0(sf)[:, others], unpack_ue8m0(clean_sf)[:, others])


def test_groups_do_not_influence_each_other():
    x = torch.randn(3, 256) * torch.logspace(-6, 6, 8).repeat_interleave(32)
    values, sf = quantize_e4m3_ue8m0(x)
    for group in range(8):
        alone = torch.zeros(3, 128)
        alone[:, :32] = x[:, group * 32 : group * 32 + 32]
        alone_values, alone_sf = quantize_e4m3_ue8m0(alone)
        group_values = values[:, group * 32 : group * 32 + 32]
        assert torch.equal(group_values.view(torch.uint8), alone_values[:, :32].view(torch.uint8))
        assert torch.equal(unpack_ue8m0(sf)[:, group], unpack_ue8m0(alone_sf)[:, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_equal_their_float32_value(dtype):
    x = torch.randn(4, 128).to(dtype)
    values, sf = quantize_e4m3_ue8m0(x)
    wide_values, wide_sf = quantize_e4m3_ue8m0(x.float())
    assert torch.equal(values.view(torch.uint8), wide_values.view(torch.uint8))
    assert torch.equal(sf, wide_sf)


def test_scale_words_are_little_endian():
    sf = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 255]], dtype=torch.uint8)
    packed = pack_ue8m0(sf)
    assert packed.dtype == torch.int32
    assert (packed & 0xFFFFFFFF).tolist()[0][0] == 0x04030201
    assert torch.equal(unpack_ue8m0(packed), sf)


def test_packing_copies_and_takes_unaligned_slices():
    source = torch.arange(9, dtype=torch.uint8)
    packed = pack_ue8m0(source[1:])
    source.zero_()
    assert unpack_ue8m0(packed).tolist() == list(range(1, 9))


def test_scales_by_column_are_unpacked() -> None:
    """Of one word, too, whose stride says nothing."""
    for num_words in (1, 2):
        words = torch.arange(8 * num_words, dtype=torch.int32).view(num_words, 8).mT[:3]
        assert torch.equal(
            unpack_ue8m0(words), unpack_ue8m0(words.clone(memory_format=torch.contiguous_format))
        )
        assert unpack_ue8m0(words).shape == (3, 4 * num_words)


def test_ue8m0_values():
    every_byte = torch.arange(256, dtype=torch.uint8)
    decoded = ue8m0_to_float(every_byte)
    assert decoded[:255].tolist() == [math.ldexp(1.0, byte - 127) for byte in range(255)]
    assert decoded[255].isnan()
    assert ue8m0_to_float(every_byte[:1], torch.float32).item() == 2.0**-127


def test_dequantizing_is_exact_over_the_whole_range():
    values = torch.tensor([448.0, 2.0**-9]).repeat(64).to(torch.float8_e4m3fn)
    for byte in (0, 1, 127, 254):
        sf = pack_ue8m0(torch.full((4,), byte, dtype=torch.uint8))
        decoded = dequantize_e4m3_ue8m0(values, sf, torch.float64)
        assert decoded[:2].tolist() == [448 * 2.0 ** (byte - 127), 2.0 ** (byte - 136)]


def test_empty_inputs():
    values, sf = quantize_e4m3_ue8m0(torch.empty(0, 256))
    assert values.shape == (0, 256)
    assert sf.shape == (0, 2)
    assert dequantize_e4m3_ue8m0(values, sf).shape == (0, 256)


def test_refusals_name_the_argument_and_the_value():
    with pytest.raises(
        ValueError, match=r"x must have a positive multiple of 32 columns; got \(2, 80\)"
    ):
        quantize_e4m3_ue8m0(torch.zeros(2, 80))
    with pytest.raises(TypeError, match=r"x must be float32.*got torch.float64"):
        quantize_e4m3_ue8m0(torch.zeros(128, dtype=torch.float64))
    values, _ = quantize_e4m3_ue8m0(torch.zeros(2, 256))
    with pytest.raises(ValueError, match=r"sf must have one word per 128 values, shape \(2, 2\)"):
        dequantize_e4m3_ue8m0(values, torch.zeros(2, 8, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"sf must be int32"):
        dequantize_e4m3_ue8m0(values, torch.zeros(2, 2))
    with pytest.raises(TypeError, match=r"values must be float8_e4m3fn; got torch.uint8"):
        dequantize_e4m3_ue8m0(values.view(torch.uint8), torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"multiple of 4 bytes per row; got 3"):
        pack_ue8m0(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"sf must be uint8; got torch.int32"):
        pack_ue8m0(torch.zeros(4, dtype=torch.int32))


@pytest.mark.parametrize(("largest", "scale"), [(448.0, 1.0), (448.5, 2.0), (1.75 * 2**-5, 2**-13)])
def test_scales_that_are_rounded_up_stay_where_they_are_powers_of_two(
    largest: float, scale: float
) -> None:
    x = torch.full((1, 128), largest)
    values, scales = quantize_e4m3_float(x, powers_of_two=True)
    assert scales.tolist() == [[scale]]
    assert values.float().max() == (448.0 if largest != 448.5 else 224.0)
