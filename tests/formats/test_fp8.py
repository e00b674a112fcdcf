"""FP8 weights: every form of their scales, the layouts, and what is refused."""

from __future__ import annotations

import warnings

import pytest
import torch

from deep_moe import (
    RequantizationWarning,
    empty_weights_for_mega_moe,
    inverse_transform_weights,
    quantize_mxfp4,
    quantize_mxfp8,
    transform_weights_for_mega_moe,
)
from deep_moe.formats.block_scaled import pack_ue8m0, unpack_ue8m0
from deep_moe.weights import WEIGHTS, weight_format
from deep_moe.weights.layers import ExpertWeights, LayerWeights, one_expert

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 3, 384, 256
SIZES = ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
FP8 = weight_format("fp8")


def float_scales(scale_bytes: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127), byte 0 included."""
    return torch.exp2(scale_bytes.double() - 127).float()


# How an element of UE8M0 bytes may come.
FORMS = {
    "uint8": lambda scale_bytes: scale_bytes,
    "float8_e8m0fnu": lambda scale_bytes: scale_bytes.view(torch.float8_e8m0fnu),
    "float32": float_scales,
}


def random_codes(generator: torch.Generator, *size: int) -> torch.Tensor:
    codes = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return codes.masked_fill(codes & 0x7F == 0x7F, 1).view(torch.float8_e4m3fn)


def layers(rows: int = 1, columns: int = 32, lowest: int = 0, highest: int = 254, seed: int = 0):
    """Both layers' values, and UE8M0 bytes for each `rows` x `columns` of them."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for num_rows, num_columns in SIZES:
        size = (NUM_EXPERTS, num_rows // rows, num_columns // columns)
        scale_bytes = torch.randint(
            lowest, highest + 1, size, dtype=torch.uint8, generator=generator
        )
        made.append((random_codes(generator, NUM_EXPERTS, num_rows, num_columns), scale_bytes))
    return made


def with_scales(made, form):
    return [(weight, form(scale_bytes)) for weight, scale_bytes in made]


def equal(one, other) -> bool:
    pairs = zip([*one.l1, *one.l2], [*other.l1, *other.l2], strict=True)
    return all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in pairs
    )


def per_32(scale_bytes: torch.Tensor) -> torch.Tensor:
    return scale_bytes.repeat_interleave(128, 1).repeat_interleave(4, 2)


@pytest.fixture(scope="module")
def packed():
    """Weights as `quantize_mxfp8` has them."""
    return with_scales(layers(), pack_ue8m0)


def transformed(l1, l2, **options):
    return transform_weights_for_mega_moe(l1, l2, "sm_100a", weights="fp8", **options)


class TestTransform:
    def test_rows_and_scales_are_where_the_kernel_wants_them(self, packed) -> None:
        (l1, l1_sf), (l2, l2_sf) = transformed(*packed)
        (w1, _), (w2, sf2) = packed
        gate, up = w1.view(torch.uint8).split(INTERMEDIATE, dim=1)
        for run in range(INTERMEDIATE // 8):
            rows = l1.view(torch.uint8)[:, 16 * run : 16 * run + 16]
            assert torch.equal(rows[:, :8], gate[:, 8 * run : 8 * run + 8])
            assert torch.equal(rows[:, 8:], up[:, 8 * run : 8 * run + 8])
        assert torch.equal(l2.view(torch.uint8), w2.view(torch.uint8))
        assert l1_sf.shape == (NUM_EXPERTS, HIDDEN // 128, 2 * INTERMEDIATE)
        for row in (0, 31, 32, 127, 200, HIDDEN - 1):
            place = row // 128 * 128 + row % 32 * 4 + row % 128 // 32
            assert torch.equal(l2_sf[:, :, place], sf2[:, row])

    @pytest.mark.parametrize("form", FORMS)
    def test_scales_per_32_values_in_any_form(self, packed, form: str) -> None:
        assert equal(transformed(*with_scales(layers(), FORMS[form])), transformed(*packed))

    @pytest.mark.parametrize("form", FORMS)
    def test_scales_of_blocks_hold_for_all_their_rows_and_groups(self, form: str) -> None:
        made = layers(rows=128, columns=128)
        expected = transformed(*with_scales(made, lambda b: pack_ue8m0(per_32(b))))
        assert equal(transformed(*with_scales(made, FORMS[form])), expected)

    def test_the_inverse_gives_back_packed_scales(self, packed) -> None:
        result = inverse_transform_weights(*transformed(*packed), "sm_100a", weights="fp8")
        assert equal(result, ExpertWeights(*(LayerWeights(*own) for own in packed)))

    def test_expert_by_expert_into_tensors_that_are_there(self, packed) -> None:
        out = empty_weights_for_mega_moe(
            NUM_EXPERTS, HIDDEN, INTERMEDIATE, arch="sm_100a", weights="fp8"
        )
        for i in range(NUM_EXPERTS):
            l1, l2 = ((weight[i : i + 1], sf[i : i + 1]) for weight, sf in packed)
            transformed(l1, l2, out=out.expert(i))
        assert equal(out, transformed(*packed))

    def test_the_other_formats_tensors_are_no_out(self, packed) -> None:
        out = empty_weights_for_mega_moe(NUM_EXPERTS, HIDDEN, INTERMEDIATE, arch="sm_100a")
        with pytest.raises(ValueError, match="out must be for fp8 x mxfp8 on sm100; got"):
            transformed(*packed, out=out)


@pytest.mark.parametrize("form", ["packed", *FORMS])
def test_what_weights_stand_for(form: str) -> None:
    (weight, scale_bytes), _ = layers(lowest=100)
    sf = {"packed": pack_ue8m0, **FORMS}[form](scale_bytes)
    values = FP8.dequantize((weight[0], sf[0]))
    exponents = scale_bytes[0].double().repeat_interleave(32, 1) - 127
    assert torch.equal(values, weight[0].float().double() * torch.exp2(exponents))


def test_what_weights_with_scales_of_blocks_stand_for() -> None:
    weight = random_codes(torch.Generator().manual_seed(1), 256, 384)
    sf = torch.rand(2, 3) + 0.1
    values = FP8.dequantize((weight, sf))
    for i in range(2):
        for j in range(3):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            expected = weight.float().double()[block] * sf[i, j].double()
            assert torch.equal(values[block], expected)


class TestRequantize:
    def checkpoint(self):
        """Scales as checkpoints have them, any positive numbers."""
        made = layers(rows=128, columns=128, lowest=120)
        generator = torch.Generator().manual_seed(3)
        return with_scales(made, lambda b: torch.rand(b.shape, generator=generator) * 0.01 + 0.001)

    def test_other_scales_are_refused_by_name(self) -> None:
        l1, (weight, sf) = with_scales(layers(rows=128, columns=128), float_scales)
        sf[2, 1, 0] = 3.0
        words = (
            r"l2_weights: expert 2, scale \[1, 0\] must be a power of two, .*requantize must be "
            r"True; got 3.0"
        )
        with pytest.raises(ValueError, match=words):
            transformed(l1, (weight, sf))

    def test_they_are_rounded_anew_if_asked_for_and_the_caller_is_told_how_far(self) -> None:
        made = self.checkpoint()
        with pytest.warns(RequantizationWarning) as caught:
            result = transformed(*made, requantize=True)
        values = [
            torch.stack([FP8.dequantize(own) for own in zip(weight, sf, strict=True)])
            for weight, sf in made
        ]
        expected = [quantize_mxfp8(own.float()) for own in values]
        assert equal(result, transformed(*expected))
        told = [warning.message for warning in caught]
        assert [own.layer for own in told] == ["l1_weights", "l2_weights"]
        for own, before, (weight, sf) in zip(told, values, expected, strict=True):
            after = torch.stack([FP8.dequantize(e) for e in zip(weight, sf, strict=True)])
            moved = (after - before).abs()
            assert own.share_moved == pytest.approx(float((moved > 0).double().mean()))
            assert own.relative_error == pytest.approx(float(moved.norm() / before.norm()))
            assert own.largest_change == float(moved.max())
            assert 0.01 < own.relative_error < 0.05
            assert f"{own.relative_error:.2%} of their size" in str(own)
            assert "rounded anew, to UE8M0 scales per 32 values" in str(own)

    def test_powers_of_two_stay_as_they_are_and_nothing_is_told(self) -> None:
        made = with_scales(layers(rows=128, columns=128), float_scales)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert equal(transformed(*made, requantize=True), transformed(*made))

    def test_formats_that_keep_their_values_refuse_it(self) -> None:
        l1, l2 = (quantize_mxfp4(torch.randn(1, *size)) for size in SIZES)
        for arch in ("sm_100a", "sm_90a"):
            with pytest.raises(ValueError, match="requantize must be False for mxfp4 weights"):
                transform_weights_for_mega_moe(l1, l2, arch, requantize=True)
        with pytest.raises(TypeError, match="requantize must be a bool; got 1"):
            transform_weights_for_mega_moe(l1, l2, requantize=1)


def values_of(l1, l2) -> list[torch.Tensor]:
    """What checkpoints' weights stand for."""
    return [
        torch.stack([FP8.dequantize(own) for own in zip(weight, sf, strict=True)])
        for weight, sf in (l1, l2)
    ]


class TestSm90:
    """Blocks of 256 rows as they lie in shared memory, and float32 scales for 128 x 128."""

    def transformed(self, l1, l2, **options):
        return transform_weights_for_mega_moe(l1, l2, "sm_90a", weights="fp8", **options)

    def checkpoint(self):
        """Any positive scales."""
        generator = torch.Generator().manual_seed(7)
        made = layers(rows=128, columns=128)
        return with_scales(made, lambda b: torch.rand(b.shape, generator=generator) + 0.01)

    def test_every_byte_and_scale_is_where_the_kernel_wants_it(self) -> None:
        made = self.checkpoint()
        result = self.transformed(*made)
        choose = torch.Generator().manual_seed(2)
        for is_l1, (weight, sf), (blocks, factors) in zip((True, False), made, result, strict=True):
            num_rows, num_columns = weight.shape[1:]
            for _ in range(500):
                sizes = (num_rows // 128, num_columns // 128, 4, 8, 2, 2, 4, 4, 2, 4)
                part, k, w, r, b, h, q, j, half, byte = (
                    int(torch.randint(size, (1,), generator=choose)) for size in sizes
                )
                n, g = divmod(part, 2)
                if is_l1:  # gate and up of value 32*q + 4*c + s, which is the (16*c + 4*q + s)-th
                    place = 64 * g + 16 * w + 2 * r + b
                    value = 32 * (place % 16 // 4) + 4 * (place // 16) + place % 4
                    row = h * INTERMEDIATE + 128 * n + value
                else:
                    row = 128 * part + 32 * w + 4 * r + 2 * b + h
                column = 128 * k + 32 * q + 8 * j + 4 * half + byte
                slot = 128 * g + 64 * b + 16 * w + 8 * h + r
                offset = 32 * j + 16 * half + 4 * q + byte
                address = 128 * slot + (offset // 16 ^ slot % 8) * 16 + offset % 16
                stored = blocks.view(torch.uint8)[:, n, k, address]
                assert torch.equal(stored, weight.view(torch.uint8)[:, row, column])
                assert torch.equal(factors[:, n, k, 2 * g + h], sf[:, row // 128, k])
        # Rows of a second half that do not exist.
        half_block = result.l2.weight.view(torch.uint8)[:, -1, :, 128 * 128 :]
        assert not half_block.any()
        assert not result.l2.sf[:, -1, :, 2:].any()

    def test_the_inverse_gives_back_what_was_transformed(self) -> None:
        made = self.checkpoint()
        result = inverse_transform_weights(*self.transformed(*made), "sm_90a", weights="fp8")
        assert equal(result, ExpertWeights(*(LayerWeights(*own) for own in made)))

    @pytest.mark.parametrize("form", ["packed", *FORMS])
    def test_scales_that_are_equal_in_a_block_are_exact_in_any_form(self, form: str) -> None:
        made = layers(rows=128, columns=128)
        expected = self.transformed(*with_scales(made, float_scales))
        small = {"packed": pack_ue8m0, **FORMS}[form]
        assert equal(self.transformed(*with_scales(made, lambda b: small(per_32(b)))), expected)
        if form != "packed":
            assert equal(self.transformed(*with_scales(made, FORMS[form])), expected)

    def test_other_scales_per_32_values_are_refused_by_name(self) -> None:
        l1, (weight, scale_bytes) = layers(rows=128, columns=128)
        l1 = (l1[0], pack_ue8m0(per_32(l1[1])))
        scale_bytes = per_32(scale_bytes)
        scale_bytes[1, 2 * 128 + 5, 4] ^= 1
        words = r"l2_weights: expert 1, block \[2, 1\] of 128 x 128 values must have one scale"
        with pytest.raises(ValueError, match=words):
            self.transformed(l1, (weight, scale_bytes))

    def test_they_are_rounded_anew_if_asked_for(self) -> None:
        made = with_scales(layers(lowest=120, highest=134), pack_ue8m0)
        with pytest.warns(RequantizationWarning, match="to float32 scales per 128 x 128") as caught:
            result = self.transformed(*made, requantize=True)
        back = inverse_transform_weights(*result, "sm_90a", weights="fp8")
        told = [warning.message for warning in caught]
        assert [own.layer for own in told] == ["l1_weights", "l2_weights"]
        for own, before, after in zip(told, values_of(*made), values_of(*back), strict=True):
            moved = (after - before).abs()
            assert own.relative_error == pytest.approx(float(moved.norm() / before.norm()))
            assert own.largest_change == float(moved.max())
            assert own.relative_error < 0.05
        for _, sf in back:
            assert sf.dtype == torch.float32
            assert (sf > 0).all()

    def test_a_block_of_zeros_stays_one(self) -> None:
        (weight, sf), l2 = with_scales(layers(lowest=120, highest=134), pack_ue8m0)
        weight = weight.clone()
        weight.view(torch.uint8)[0, :128, :128] = 0
        with pytest.warns(RequantizationWarning):
            result = self.transformed((weight, sf), l2, requantize=True)
        back = inverse_transform_weights(*result, "sm_90a", weights="fp8")
        assert not values_of(*back)[0][0, :128, :128].any()


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_what_float32_does_not_hold_is_not_rounded_anew(arch: str) -> None:
    columns = {"sm_100a": (128, 128), "sm_90a": (1, 32)}[arch]
    made = with_scales(layers(*columns, lowest=1, highest=254), float_scales)
    made[0][1][0, 0, 0] = 3e38
    words = "l1_weights: expert 0 must hold numbers that float32 does to be rounded anew"
    with pytest.raises(ValueError, match=words):
        transform_weights_for_mega_moe(*made, arch, weights="fp8", requantize=True)


class TestRefusals:
    def test_values_of_another_dtype(self, packed) -> None:
        (weight, sf), l2 = packed
        words = r"l1_weights\[0\] must be float8_e4m3fn for fp8 weights; got torch.int8"
        with pytest.raises(TypeError, match=words):
            transformed((weight.view(torch.int8), sf), l2)

    def test_scales_of_another_dtype(self, packed) -> None:
        l1, (weight, sf) = packed
        with pytest.raises(TypeError, match=r"l2_weights\[1\] must be float32, .*bfloat16"):
            transformed(l1, (weight, sf.bfloat16()))

    def test_fp8_weights_are_not_taken_for_mxfp4(self, packed) -> None:
        with pytest.raises(TypeError, match=r"l1_weights\[0\] must be int8, two E2M1"):
            transform_weights_for_mega_moe(*packed)

    @pytest.mark.parametrize("form", ["packed", "float32"])
    def test_scales_of_another_shape(self, packed, form: str) -> None:
        (weight, sf), l2 = packed
        if form == "float32":
            sf = float_scales(unpack_ue8m0(sf))
        with pytest.raises(ValueError, match=r"l1_weights\[1\] must hold one scale per 32 values"):
            transformed((weight, sf[:, :, :2].contiguous()), l2)

    def test_layers_that_do_not_go_together(self, packed) -> None:
        l1, _ = packed
        with pytest.raises(ValueError, match=r"shape \[E, H, I\] = \(3, 384, 256\) to go with"):
            transformed(l1, quantize_mxfp8(torch.randn(NUM_EXPERTS, 256, 256)))

    def test_two_dimensions(self, packed) -> None:
        (weight, sf), l2 = packed
        with pytest.raises(ValueError, match=r"l1_weights\[0\] must have shape \[E, 2\*I, H\]"):
            transformed((weight[0], sf[0]), l2)

    def test_a_value_that_is_nan(self, packed) -> None:
        (weight, sf), l2 = packed
        weight = weight.clone()
        weight.view(torch.uint8)[1, 7, 5] = 0xFF
        with pytest.raises(ValueError, match="l1_weights: expert 1, row 7 must hold numbers"):
            transformed((weight, sf), l2)

    @pytest.mark.parametrize("form", ["packed", "uint8", "float8_e8m0fnu"])
    def test_a_scale_that_is_nan(self, form: str) -> None:
        l1, (weight, scale_bytes) = layers()
        scale_bytes[2, 9, 3] = 255
        pairs = with_scales([l1, (weight, scale_bytes)], {"packed": pack_ue8m0, **FORMS}[form])
        with pytest.raises(ValueError, match="l2_weights: expert 2, row 9 must have scales that"):
            transformed(*pairs)

    @pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
    @pytest.mark.parametrize("requantize", [False, True])
    def test_a_scale_that_is_no_positive_number(self, value: float, requantize: bool) -> None:
        l1, (weight, sf) = with_scales(layers(rows=128, columns=128), float_scales)
        sf[1, 2, 1] = value
        words = r"l2_weights: expert 1, scale \[2, 1\] must be a positive number; got"
        with pytest.raises(ValueError, match=words):
            transformed(l1, (weight, sf), requantize=requantize)

    def test_weights_that_were_not_transformed_for_sm90(self, packed) -> None:
        with pytest.raises(ValueError, match=r"l1_weights\[0\] must have shape \[E, n-blocks"):
            inverse_transform_weights(*packed, "sm_90a", weights="fp8")

    def test_weights_that_were_not_transformed(self, packed) -> None:
        with pytest.raises(ValueError, match=r"l1_weights\[1\] must be contiguous, of shape"):
            inverse_transform_weights(*packed, "sm_100a", weights="fp8")


def test_formats_by_name() -> None:
    for name in WEIGHTS:
        assert weight_format(name).name == name
    words = r"weights must be one of mxfp4, .*; got "
    with pytest.raises(ValueError, match=f"{words}'nvfp3'"):
        weight_format("nvfp3")
    with pytest.raises(TypeError, match=r"weights must be one of mxfp4, .*; got 8"):
        weight_format(8)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WEIGHTS)
def test_made_up_weights_are_of_their_format(name: str) -> None:
    """And keep a token's size."""
    made = weight_format(name)
    generator = torch.Generator().manual_seed(0)
    layer = made.random(256, 512, torch.device("cpu"), generator)
    values = made.dequantize(one_expert(layer, 0))
    assert values.shape == (256, 512)
    assert values.isfinite().all()
    assert 0.5 < float(values.norm(dim=1).mean()) < 2
