"""Number formats of the layer: E4M3 activations, packed E2M1 weights, UE8M0 scales.

A group is 32 consecutive values along the last dimension. Its scale is the power of two 2^e with
the smallest e at which the largest magnitude does not exceed the format's maximum,

    e = ceil(log2(amax / 448))  for E4M3,     e = ceil(log2(amax / 6))  for E2M1,

found from the bits of `amax` and not through a logarithm: with amax = m * 2^k, 1 <= m < 2, and
448 = 1.75 * 2^8, e is k - 8, plus one where m > 1.75. UE8M0 stores e + 127, clamped to 0..254.
The stored value is x * 2^-e rounded to nearest, ties to even. No product rounds before that: at
byte 0 the factor is 2^127, which float32 holds.

A group of zeros has byte 0. E4M3 has no infinity: a group that holds an infinity or a NaN becomes
32 NaNs (0x7F) with byte 247, the largest that float32 values lead to, and so harms nothing but its
own token. E2M1 has no NaN either: such weights are refused. The kernels' quantizer of SwiGLU's
output follows exactly these rules.
"""

from __future__ import annotations

import torch

GROUP_SIZE = 32
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E4M3_NAN_GROUP_BYTE = 247
E2M1_MAX = 6.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUPS_PER_WORD = 4  # UE8M0 bytes in one int32, the lowest group in the lowest byte
WORD_SIZE = GROUP_SIZE * GROUPS_PER_WORD

_UE8M0_OF_ONE = 127
_MANTISSA = (1 << 23) - 1  # of float32
_SMALLEST_UE8M0 = 1 << 22  # 2^-127, byte 0, which is not normalized in float32
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize_e4m3_ue8m0(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `x` [..., K] to (float8_e4m3fn [..., K], packed UE8M0 int32 [..., ceil(K/128)]).

    K is a multiple of 32, and scales fill whole words, with zeros; `x` is float32, bfloat16 or
    float16.

    >>> values, sf = quantize_e4m3_ue8m0(torch.full((128,), 3.0))
    >>> values[0].item(), unpack_ue8m0(sf).tolist()  # 3 = 384 * 2^-7
    (384.0, [120, 120, 120, 120])
    """
    values, sf = quantize_e4m3_groups(_groups(x))
    return values.reshape(x.shape), pack_ue8m0_groups(sf)


def quantize_e4m3_groups(
    groups: torch.Tensor, *, min_scale_byte: int = 0, scale_bytes: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize float32 [..., G], each row of G values a group, to (float8_e4m3fn [..., G], UE8M0
    bytes [...]). min_scale_byte: the smallest scale that a group gets. scale_bytes: the scales,
    none so small that a finite group exceeds 448 of it; by default the smallest possible."""
    finite = groups.isfinite().all(dim=-1)
    if scale_bytes is None:
        sf = _scale_bytes(groups, exponent_of_max=8, mantissa_of_max=0x600000)
        sf = sf.where(finite, E4M3_NAN_GROUP_BYTE).clamp(min=min_scale_byte)
    else:
        sf = scale_bytes
    scaled = groups * _power_of_two(254 - sf).unsqueeze(-1)
    values = scaled.where(finite.unsqueeze(-1), 0.0).to(torch.float8_e4m3fn).view(torch.uint8)
    values = values.where(finite.unsqueeze(-1), E4M3_NAN)
    return values.view(torch.float8_e4m3fn), sf


def dequantize_e4m3_ue8m0(
    values: torch.Tensor, sf: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The exact product of `values` [..., K] and their packed scales [..., K/128].

    In float64 nothing overflows; float32 holds everything up to a scale byte of 246.
    """
    if values.dtype != torch.float8_e4m3fn:
        raise TypeError(f"values must be float8_e4m3fn; got {values.dtype}")
    decoded = values.to(torch.float32).to(torch.float64)
    return _scaled(decoded, sf).to(dtype)


def quantize_e2m1_ue8m0(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `x` [..., K] to packed E2M1 int8 [..., K/2] and UE8M0 int32 [..., ceil(K/128)].

    K is a multiple of 32, and scales fill whole words, with zeros; `x` is float32, bfloat16 or
    float16 and finite.

    >>> packed, sf = quantize_e2m1_ue8m0(torch.full((128,), -3.0))
    >>> unpack_e2m1(packed)[0].item(), unpack_ue8m0(sf)[0].item()  # -6 * 2^-1
    (-6.0, 126)
    """
    groups = _groups(x)
    if not bool(groups.isfinite().all()):
        raise ValueError("x must be finite, E2M1 holds no NaN and no infinity; got such a value")
    sf = _scale_bytes(groups, exponent_of_max=2, mantissa_of_max=0x400000)
    scaled = (groups * _power_of_two(254 - sf).unsqueeze(-1)).reshape(x.shape)
    return pack_e2m1_codes(nearest_e2m1_codes(scaled)), pack_ue8m0_groups(sf)


def nearest_e2m1_codes(scaled: torch.Tensor) -> torch.Tensor:
    """4-bit codes, uint8, of the E2M1 numbers nearest to finite values."""
    magnitude = scaled.abs()
    # Halfway between two codes the even one wins, hence the mixture of > and >=.
    code = (magnitude > 0.25).to(torch.uint8)
    for threshold in (1.25, 2.5, 5.0):
        code += magnitude > threshold
    for threshold in (0.75, 1.75, 3.5):
        code += magnitude >= threshold
    return code + scaled.signbit().to(torch.uint8) * 8


def dequantize_e2m1_ue8m0(
    packed: torch.Tensor, sf: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The exact product of packed E2M1 [..., K/2] and packed scales [..., K/128]: [..., K]."""
    return _scaled(unpack_e2m1(packed, torch.float64), sf).to(dtype)


def pack_e2m1_codes(codes: torch.Tensor) -> torch.Tensor:
    """Two 4-bit codes (sign, 2 exponent bits, 1 mantissa bit) per byte, the first one low."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).view(torch.int8)


def pack_e2m1_values(values: torch.Tensor) -> torch.Tensor:
    """Float32 values that E2M1 holds exactly, packed."""
    magnitudes = torch.tensor(E2M1_MAGNITUDES, device=values.device)
    codes = torch.searchsorted(magnitudes, values.abs()).to(torch.uint8)
    return pack_e2m1_codes(codes | (values < 0).to(torch.uint8) << 3)


def unpack_e2m1(packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of packed E2M1: [..., K/2] bytes to [..., K] numbers of `dtype`."""
    if packed.dtype != torch.int8:
        raise TypeError(f"packed must be int8, two E2M1 values per byte; got {packed.dtype}")
    table = torch.tensor(E2M1_MAGNITUDES, dtype=dtype, device=packed.device)
    table = torch.cat([table, -table])
    codes = packed.contiguous().view(torch.uint8)
    pairs = torch.stack([codes & 0xF, codes >> 4], dim=-1)
    return table[pairs.flatten(-2).int()]


def pack_ue8m0(sf: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 [..., K/32] to words int32 [..., K/128]. The result is a copy."""
    if sf.dtype != torch.uint8:
        raise TypeError(f"sf must be uint8; got {sf.dtype}")
    if sf.shape[-1] % GROUPS_PER_WORD:
        raise ValueError(
            f"sf must have a multiple of {GROUPS_PER_WORD} bytes per row; got {sf.shape[-1]}"
        )
    return sf.clone(memory_format=torch.contiguous_format).view(torch.int32)


def pack_ue8m0_groups(sf: torch.Tensor) -> torch.Tensor:
    """As `pack_ue8m0`, for any number of groups: zeros fill the last word."""
    missing = -sf.shape[-1] % GROUPS_PER_WORD
    return pack_ue8m0(torch.nn.functional.pad(sf, (0, missing)) if missing else sf)


def unpack_ue8m0(sf: torch.Tensor) -> torch.Tensor:
    """Words int32 [..., K/128] to bytes uint8 [..., K/32]."""
    if sf.dtype != torch.int32:
        raise TypeError(f"sf must be int32, four UE8M0 bytes per word; got {sf.dtype}")
    # One word of each row may lie any stride from a next one that there is not.
    return sf.contiguous().unsqueeze(-1).view(torch.uint8).flatten(-2)


def random_scale_bytes(
    shape: tuple[int, ...],
    num_columns: int,
    size_log2: float,
    device: torch.device,
    generator: torch.Generator,
) -> torch.Tensor:
    """UE8M0 bytes of weights whose values are about 2^size_log2, so that sums of `num_columns`
    products are about as large as what is multiplied; neighbouring groups differ."""
    usual = _UE8M0_OF_ONE - round((num_columns.bit_length() - 1) / 2 + size_log2)
    return torch.randint(
        usual - 1, usual + 2, shape, dtype=torch.uint8, device=device, generator=generator
    )


def ue8m0_of_floats(sf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """UE8M0 bytes of float32 powers of two, and which numbers are none from 2^-127 to 2^127: uint8
    and bool of the same shape."""
    bits = sf.contiguous().view(torch.int32)
    exponents = bits >> 23  # of a negative number negative too
    is_power = ((bits & _MANTISSA) == 0) & (exponents > 0) & (exponents < 255)
    is_power |= bits == _SMALLEST_UE8M0
    return exponents.to(torch.uint8), ~is_power


def ue8m0_to_float(sf: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """2^(byte - 127) for each byte; NaN for 255."""
    bits = (sf.to(torch.int64) + (1023 - 127)) << 52
    return bits.view(torch.float64).where(sf != 255, torch.nan).to(dtype)


def _groups(x: torch.Tensor) -> torch.Tensor:
    """`x` [..., K] as float32 [..., K/32, 32]."""
    if x.dtype not in _FLOAT_DTYPES:
        raise TypeError(f"x must be float32, bfloat16 or float16; got {x.dtype}")
    if x.dim() == 0 or not x.shape[-1] or x.shape[-1] % GROUP_SIZE:
        raise ValueError(f"x must have a positive multiple of 32 columns; got {tuple(x.shape)}")
    return x.float().unflatten(-1, (x.shape[-1] // GROUP_SIZE, GROUP_SIZE))


def _scale_bytes(
    groups: torch.Tensor, *, exponent_of_max: int, mantissa_of_max: int
) -> torch.Tensor:
    """UE8M0 byte of each group, where the format's maximum is given by its exponent and its
    float32 mantissa bits."""
    bits = groups.abs().amax(dim=-1).view(torch.int32)
    exponent = bits >> 23
    rounded_up = (bits & 0x7FFFFF) > mantissa_of_max
    return (exponent - exponent_of_max + rounded_up.int()).clamp(min=0).to(torch.uint8)


def _power_of_two(biased_exponent: torch.Tensor) -> torch.Tensor:
    """float32 2^(b - 127) for biased exponents 1..254."""
    return (biased_exponent.to(torch.int32) << 23).view(torch.float32)


def _scaled(values: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
    num_groups, rest = divmod(values.shape[-1], GROUP_SIZE)
    expected = (*values.shape[:-1], -(-num_groups // GROUPS_PER_WORD))
    if rest or tuple(sf.shape) != expected:
        raise ValueError(
            f"sf must have one word per {WORD_SIZE} values, shape {expected}; got {tuple(sf.shape)}"
        )
    factors = ue8m0_to_float(unpack_ue8m0(sf)[..., :num_groups], values.dtype)
    groups = values.unflatten(-1, (num_groups, GROUP_SIZE))
    return (groups * factors.unsqueeze(-1)).flatten(-2)
