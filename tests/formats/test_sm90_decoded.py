"""Weights that SM90 decodes to BF16 for BF16 tokens: every weight exact, decoded as the kernel does
it, and at its place. What only MXFP4 has stands in test_sm90_mxfp4_bf16.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from deep_moe.targets import target_of
from deep_moe.weights import weight_format
from deep_moe.weights.layers import LayerWeights, MegaMoEWeights, one_expert
from deep_moe.weights.transform import (
    empty_weights_for_mega_moe,
    inverse_transform_weights,
    transform_weights_for_mega_moe,
)

HIDDEN, INTERMEDIATE = 384, 256  # an odd number of 128 rows in Linear2


def bf16(bits: int) -> float:
    return torch.tensor(bits - (bits >> 15 << 16), dtype=torch.int16).view(torch.bfloat16).item()


def word_at(part: bytes, start: int) -> int:
    return int.from_bytes(part[start : start + 4], "little")


def e2m1_values(word: int, h: int) -> list[float]:
    """A row's four values of a product, 2^-126 times as large, in the order of their columns."""

    def rotated(distance: int) -> int:
        return (word << distance | word >> 32 - distance) & 0xFFFFFFFF

    made = []
    for c in range(2):
        if (c, h) == (0, 1):
            register = rotated(2) & 0x80C080C0 | rotated(10) & 0x01000100
        else:
            register = rotated({(0, 0): 6, (1, 0): 12, (1, 1): 0}[c, h]) & 0x81C081C0
        made += [bf16(register & 0xFFFF), bf16(register >> 16)]
    return made


def mxfp4_values(part: bytes, thread: int, b: int, product: int, h: int) -> list[float]:
    word = word_at(part, 2048 * b + 16 * thread + 4 * product)
    byte = part[4096 + thread // 4 * 8 + 4 * b + product // 2 * 2 + h]
    return [value * 2.0 ** (byte - 127) for value in e2m1_values(word, h)]


def nvfp4_values(part: bytes, thread: int, b: int, product: int, h: int) -> list[float]:
    word = word_at(part, 2048 * b + 16 * thread + 4 * product)
    byte = part[4096 + thread // 4 * 16 + 8 * b + 2 * product + h]
    multiplier = bf16(0x7000 + 16 * byte)
    return [value * multiplier for value in e2m1_values(word, h)]


def int4_values(part: bytes, thread: int, b: int, product: int, h: int) -> list[float]:
    """Codes are in BF16's lowest 8 bits, which count in 2^-133. Products with the scale, less 8
    times the scale, are rounded to BF16."""
    word = word_at(part, 2048 * b + 16 * thread + 4 * product)
    start = 4096 + thread // 4 * 16 + 8 * b + 4 * (product // 2) + 2 * h
    multiplier = bf16(int.from_bytes(part[start : start + 2], "little"))
    made = []
    for c in range(2):
        for v in range(2):
            number = bf16(word >> 16 * v + 8 * c & 0xF << 4 * h)
            exact = (number * 2.0 ** (-4 * h) - 2.0**-130) * multiplier
            made.append(float(torch.tensor(exact, dtype=torch.float64).bfloat16()))
    return made


def mxfp8_values(part: bytes, thread: int, b: int, product: int, h: int) -> list[float]:
    start = 4096 * b + 2048 * (product // 2) + 16 * thread + 8 * (product % 2) + 4 * h
    exponent = part[8192 + thread // 4 * 8 + 4 * b + 2 * (product // 2) + h]
    made = []
    for byte in part[start : start + 4]:
        made.append(bf16((byte & 0x80) << 8 | (byte & 0x7F) << 4) * 2.0 ** (exponent - 127))
    return made


# What the kernel makes of a row's values of a product, before the row's factor: of a warpgroup's
# part, a thread of it, its row half, the product and the row in it.
DECODED: dict[str, Callable[[bytes, int, int, int, int], list[float]]] = {
    "mxfp4": mxfp4_values,
    "nvfp4": nvfp4_values,
    "int4": int4_values,
    "mxfp8": mxfp8_values,
}
each_format = pytest.mark.parametrize("weights", DECODED)


def any_layer(weights: str, num_experts: int = 2) -> tuple[LayerWeights, LayerWeights]:
    """Of all codes and scales that the format's `random` draws."""
    made = weight_format(weights)
    block = target_of("sm_90a").weights_of(weights, "bf16").scale_block
    generator = torch.Generator().manual_seed(3)

    def layer(num_rows: int, num_columns: int, num_matrices: int) -> LayerWeights:
        experts = [
            made.random(num_rows, num_columns, torch.device("cpu"), generator, block, num_matrices)
            for _ in range(num_experts)
        ]
        return LayerWeights(*map(torch.cat, zip(*experts, strict=True)))

    return layer(2 * INTERMEDIATE, HIDDEN, 2), layer(HIDDEN, INTERMEDIATE, 1)


def transform(weights: str, l1: LayerWeights, l2: LayerWeights) -> MegaMoEWeights:
    return transform_weights_for_mega_moe(l1, l2, "sm_90a", weights=weights, token_format="bf16")


@each_format
@pytest.mark.parametrize("is_l1", [True, False], ids=["l1", "l2"])
def test_every_value_decodes_exactly_at_its_place(weights: str, is_l1: bool) -> None:
    check_decoded(weights, any_layer(weights, num_experts=1), is_l1)


def check_decoded(weights: str, layer: Sequence[LayerWeights], is_l1: bool) -> None:
    """Of a layer of one expert."""
    numerics = target_of("sm_90a").weights_of(weights, "bf16").numerics
    expected = numerics.weights(one_expert(layer[0 if is_l1 else 1], 0), 2 if is_l1 else 1)
    made = transform(weights, *layer)
    blocks, factors = made.l1 if is_l1 else made.l2
    assert blocks.shape[:3] == (1, 2, 6 if is_l1 else 4)
    assert factors.shape == (1, 2, 256)
    part_bytes = blocks.shape[3] // 2
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
                    part = bytes(blocks[0, n, k_block].view(torch.uint8).tolist())
                    part = part[g * part_bytes :][:part_bytes]
                    q, product = (r + k_block) % 4, (r // 4 + k_block) % 4
                    first = 64 * k_block + 16 * product + 2 * q
                    for h in range(2):
                        values = DECODED[weights](part, 32 * w + 4 * r + q, b, product, h)
                        wanted = expected[rows[h]][[first, first + 1, first + 8, first + 9]]
                        result = torch.tensor(values, dtype=torch.float64) * own_factors[h]
                        assert torch.equal(result, wanted)
    assert seen == set(range(expected.shape[0]))


def int4_layer_of_many_scales() -> tuple[LayerWeights, LayerWeights]:
    """Rows of scales of up to 2^121 and down to subnormal ones, each row's within 2^116 of each
    other; of both signs, with zeros, and rows of zeros alone."""
    layer = any_layer("int4", num_experts=1)
    for own in layer:
        _, num_rows, num_groups = own.sf.shape
        top = torch.arange(num_rows) * 254 // (num_rows - 1) - 133  # log2
        below = torch.arange(num_groups) * 116 // (num_groups - 1)
        exponents = (top[:, None] - below).clamp(min=-133).double()
        mantissas = own.sf.double().frexp().mantissa[0] * 2
        mantissas[:, 1::2] *= -1
        mantissas[::9, 2] = 0
        mantissas[5::29] = 0
        own.sf[0] = (mantissas * 2**exponents).clamp(-(2.0**121), 2.0**121).bfloat16()
    return layer


@pytest.mark.parametrize("is_l1", [True, False], ids=["l1", "l2"])
def test_int4_scales_of_any_size_decode_as_exactly(is_l1: bool) -> None:
    check_decoded("int4", int4_layer_of_many_scales(), is_l1)


def test_the_inverse_gives_int4_scales_of_any_size_back() -> None:
    check_inverse("int4", int4_layer_of_many_scales())


@each_format
def test_the_inverse_gives_the_input_back(weights: str) -> None:
    check_inverse(weights, any_layer(weights))


def check_inverse(weights: str, layer: Sequence[LayerWeights]) -> None:
    made = transform(weights, *layer)
    restored = inverse_transform_weights(*made, "sm_90a", weights=weights, token_format="bf16")
    for before, after in zip(layer, restored, strict=True):
        for own, result in zip(before, after, strict=True):
            assert own.dtype == result.dtype
            assert torch.equal(own.view(torch.uint8), result.view(torch.uint8))


@each_format
def test_expert_by_expert(weights: str) -> None:
    layer = any_layer(weights)
    whole = transform(weights, *layer)
    out = empty_weights_for_mega_moe(
        2, HIDDEN, INTERMEDIATE, arch="sm_90a", weights=weights, token_format="bf16"
    )
    for i in range(2):
        transform_weights_for_mega_moe(
            *(LayerWeights(*(tensor[i : i + 1] for tensor in own)) for own in layer),
            "sm_90a",
            weights=weights,
            token_format="bf16",
            out=out.expert(i),
        )
    assert all(map(torch.equal, out.tensors, whole.tensors))


@pytest.mark.gpu
@each_format
def test_gpu_gives_what_the_cpu_gives(weights: str) -> None:
    layer = any_layer(weights)
    on_gpu = [LayerWeights(*(tensor.cuda() for tensor in own)) for own in layer]
    expected, result = transform(weights, *layer), transform(weights, *on_gpu)
    for a, b in zip(expected.tensors, result.tensors, strict=True):
        assert torch.equal(a, b.cpu())
