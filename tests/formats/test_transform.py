"""The kernel's weight layout, checked element by element from its definition."""

import gc
import weakref

import pytest
import torch

from deep_moe.heuristics import MoEShape
from deep_moe.targets import TARGETS, target_of_device
from deep_moe.trial.synthetic import random_layer as random_layer_of
from deep_moe.weights.layers import MegaMoEWeights
from deep_moe.weights.transform import (
    empty_weights_for_mega_moe,
    inverse_transform_weights,
    transform_weights_for_mega_moe,
)

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 3, 384, 256


def random_layer(num_rows: int, num_columns: int, num_experts: int = NUM_EXPERTS):
    weight = torch.randint(-128, 128, (num_experts, num_rows, num_columns // 2), dtype=torch.int8)
    shape = (num_experts, num_rows, num_columns // 128 * 4)
    return weight, torch.randint(0, 255, shape, dtype=torch.uint8).view(torch.int32)


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return random_layer(2 * INTERMEDIATE, HIDDEN), random_layer(HIDDEN, INTERMEDIATE)


def interleaved_source_row(row: int) -> int:
    """Which checkpoint row is at `row` of the Linear1 tile: 8 of gate, 8 of up, 8 of gate, ..."""
    run, lane = divmod(row, 16)
    return run * 8 + lane if lane < 8 else INTERMEDIATE + run * 8 + lane - 8


def test_gate_and_up_rows_alternate_in_runs_of_8(weights):
    (l1_weight, _), _ = weights
    transformed = transform_weights_for_mega_moe(*weights, arch="sm_100a").l1.weight
    for row in range(2 * INTERMEDIATE):
        assert torch.equal(transformed[:, row], l1_weight[:, interleaved_source_row(row)])


def test_scales_are_mn_major_and_permuted_in_blocks_of_128(weights):
    (_, l1_sf), (_, l2_sf) = weights
    l1, l2 = transform_weights_for_mega_moe(*weights, arch="sm_100a")
    assert l1.sf.shape == (NUM_EXPERTS, HIDDEN // 128, 2 * INTERMEDIATE)
    assert l2.sf.shape == (NUM_EXPERTS, INTERMEDIATE // 128, HIDDEN)
    for row in range(2 * INTERMEDIATE):
        position = row // 128 * 128 + (row % 32) * 4 + (row % 128) // 32
        assert torch.equal(l1.sf[:, :, position], l1_sf[:, interleaved_source_row(row)])
    for row in range(HIDDEN):
        position = row // 128 * 128 + (row % 32) * 4 + (row % 128) // 32
        assert torch.equal(l2.sf[:, :, position], l2_sf[:, row])


def test_linear2_rows_stay_where_they_are(weights):
    _, (l2_weight, _) = weights
    assert torch.equal(transform_weights_for_mega_moe(*weights).l2.weight, l2_weight)


def test_inverse_gives_the_input_back(weights):
    restored = inverse_transform_weights(*transform_weights_for_mega_moe(*weights))
    for before, after in zip([*weights[0], *weights[1]], [*restored.l1, *restored.l2], strict=True):
        assert torch.equal(before, after)


def test_result_unpacks_into_pairs_of_contiguous_tensors(weights):
    l1, l2 = transform_weights_for_mega_moe(*weights)
    for weight, sf in (l1, l2):
        assert weight.is_contiguous()
        assert sf.is_contiguous()
        assert (weight.dtype, sf.dtype) == (torch.int8, torch.int32)


def test_strided_sources_give_the_same_result(weights):
    def spread(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)[..., 0]

    strided = tuple(tuple(spread(tensor) for tensor in layer) for layer in weights)
    plain = transform_weights_for_mega_moe(*weights)
    again = transform_weights_for_mega_moe(*strided)
    for expected, tensor in zip([*plain.l1, *plain.l2], [*again.l1, *again.l2], strict=True):
        assert torch.equal(expected, tensor)


@pytest.mark.parametrize(
    ("arch", "weights", "token_format", "scale_block"),
    [
        (arch, own.weights, own.token_format, own.scale_block)
        for arch in ("sm_90a", "sm_100a")
        for own in TARGETS[arch].weights
    ],
)
def test_sources_at_odd_places_give_the_same_result(arch, weights, token_format, scale_block):
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        """One value further on, and experts that are one value further apart."""
        flat = tensor.flatten(1)
        memory = flat.new_zeros((flat.shape[0], flat.shape[1] + 1))
        memory[:, 1:] = flat
        return memory[:, 1:].unflatten(1, tensor.shape[1:])

    shape = MoEShape(1, 2, 1, 256, 128, 1, weights=weights, token_format=token_format)
    layer = random_layer_of(shape, scale_block=scale_block)
    layers = layer.l1, layer.l2
    again = [
        tuple(moved(tensor) if tensor.numel() else tensor for tensor in layer) for layer in layers
    ]
    results = [
        transform_weights_for_mega_moe(*own, arch, weights=weights, token_format=token_format)
        for own in (layers, again)
    ]
    for expected, tensor in zip(*(result.tensors for result in results), strict=True):
        assert torch.equal(expected.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("function", [transform_weights_for_mega_moe, inverse_transform_weights])
def test_sources_are_neither_aliased_nor_kept_alive(function):
    sources = [*random_layer(2 * INTERMEDIATE, HIDDEN), *random_layer(HIDDEN, INTERMEDIATE)]
    if function is inverse_transform_weights:
        transformed = transform_weights_for_mega_moe(sources[:2], sources[2:])
        sources = [*transformed.l1, *transformed.l2]
        del transformed
    result = function(sources[:2], sources[2:])
    storages = {tensor.untyped_storage().data_ptr() for tensor in sources}
    for layer in result:
        for tensor in layer:
            assert tensor.untyped_storage().data_ptr() not in storages
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    references = [weakref.ref(tensor) for tensor in sources]
    del sources
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_weights_on_the_cpu_are_laid_out_for_sm100(weights):
    assert target_of_device(torch.device("cpu")).name == "sm_100a"
    by_name = transform_weights_for_mega_moe(*weights, arch="sm_100a")
    assert torch.equal(transform_weights_for_mega_moe(*weights).l1.sf, by_name.l1.sf)


def mild_layer(num_rows: int, num_columns: int):
    """With scales that any architecture takes."""
    weight, sf = random_layer(num_rows, num_columns)
    return weight, (sf.view(torch.uint8) % 16 + 100).view(torch.int32)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
class TestOut:
    @pytest.fixture
    def weights(self):
        torch.manual_seed(0)
        return mild_layer(2 * INTERMEDIATE, HIDDEN), mild_layer(HIDDEN, INTERMEDIATE)

    @pytest.fixture
    def out(self, arch) -> MegaMoEWeights:
        weights = empty_weights_for_mega_moe(NUM_EXPERTS, HIDDEN, INTERMEDIATE, arch=arch)
        for tensor in (*weights.l1, *weights.l2):
            tensor.view(torch.uint8).fill_(0xA5)
        return weights

    def test_every_byte_is_written_in_place(self, weights, out, arch):
        expected = transform_weights_for_mega_moe(*weights, arch=arch)
        addresses = [tensor.data_ptr() for tensor in (*out.l1, *out.l2)]
        result = transform_weights_for_mega_moe(*weights, arch=arch, out=out)
        for before, after in zip([*expected.l1, *expected.l2], [*out.l1, *out.l2], strict=True):
            assert torch.equal(before, after)
        assert [tensor.data_ptr() for tensor in (*result.l1, *result.l2)] == addresses

    def test_expert_by_expert(self, weights, out, arch):
        expected = transform_weights_for_mega_moe(*weights, arch=arch)
        for i in (2, 0, 1):
            one = [tuple(tensor[i : i + 1] for tensor in layer) for layer in weights]
            transform_weights_for_mega_moe(*one, arch=arch, out=out.expert(i))
        for before, after in zip([*expected.l1, *expected.l2], [*out.l1, *out.l2], strict=True):
            assert torch.equal(before, after)

    @pytest.mark.parametrize("expert_idx", [-1, NUM_EXPERTS])
    def test_an_expert_that_is_not_there(self, out, expert_idx):
        with pytest.raises(IndexError, match=rf"expert_idx must be 0 to 2; got {expert_idx}"):
            out.expert(expert_idx)

    def test_of_another_architecture(self, weights, out, arch):
        other = {"sm_100a": "sm_90a", "sm_90a": "sm_100a"}[arch]
        with pytest.raises(ValueError, match=r"out must be for mxfp4 x mxfp8 on .*; got"):
            transform_weights_for_mega_moe(*weights, arch=other, out=out)

    def test_of_another_size(self, weights, out, arch):
        with pytest.raises(ValueError, match=r"out.l1\[0\] must be contiguous, of shape \(3, "):
            transform_weights_for_mega_moe(*weights, arch=arch, out=out.expert(0))

    def test_where_a_kernel_could_not_load_it(self, weights, out, arch):
        w1 = out.l1.weight
        memory = torch.empty(w1.numel() + 8, dtype=torch.int8)
        odd = memory[8:].view(w1.shape)
        with pytest.raises(ValueError, match=r"out.l1\[0\] must start at a multiple of 16 bytes"):
            transform_weights_for_mega_moe(
                *weights, arch=arch, out=out.with_tensors([odd, *out.tensors[1:]])
            )

    def test_in_the_memory_of_the_sources(self, weights, out, arch):
        w2 = out.l2.weight
        (_, sf), l1 = weights[1], weights[0]
        source = w2.flatten()[: HIDDEN * INTERMEDIATE // 2 * NUM_EXPERTS]
        shared = source.view(NUM_EXPERTS, HIDDEN, INTERMEDIATE // 2)
        words = r"out.l2\[0\] must not share memory with l2_weights\[0\]"
        with pytest.raises(ValueError, match=words):
            transform_weights_for_mega_moe(l1, (shared, sf), arch=arch, out=out)

    @pytest.mark.parametrize("layer_idx", [0, 1])
    def test_a_scale_that_is_nan_is_named_before_anything_is_written(
        self, weights, out, arch, layer_idx
    ):
        weights[layer_idx][1].view(torch.uint8)[1, 77, 5] = 255
        before = out.l1.weight.clone()
        name = ("l1_weights", "l2_weights")[layer_idx]
        with pytest.raises(ValueError, match=rf"{name}: expert 1, row 77 must have .* got NaN"):
            transform_weights_for_mega_moe(*weights, arch=arch, out=out)
        assert torch.equal(out.l1.weight, before)


class TestRefusals:
    @pytest.mark.parametrize(
        ("function", "allowed"),
        [
            (transform_weights_for_mega_moe, r"\(packed E2M1 .* deep_moe.quantize_mxfp4"),
            (inverse_transform_weights, "of tensors, as transform_weights_for_mega_moe makes it"),
        ],
    )
    def test_weights_that_are_not_quantized(self, weights, function, allowed):
        """Two experts in one tensor would unpack into a pair."""
        bf16 = torch.zeros(2, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16)
        pair = f"must be a pair {allowed}"
        with pytest.raises(
            TypeError, match=rf"l1_weights {pair}.* got one tensor of torch.bfloat16"
        ):
            function(bf16, bf16)
        with pytest.raises(TypeError, match=rf"l2_weights {pair}.* got \(Tensor, NoneType\)"):
            function(weights[0], (weights[1][0], None))
        with pytest.raises(TypeError, match=rf"l2_weights {pair}.* got NoneType"):
            function(weights[0], None)

    def test_bf16_in_the_pair(self, weights):
        (weight, sf), l2 = weights
        with pytest.raises(TypeError, match=r"must be int8, .*quantize_mxfp4.*got torch.bfloat16"):
            transform_weights_for_mega_moe((weight.bfloat16(), sf), l2)

    @pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
    def test_weights_that_were_not_transformed(self, weights, arch):
        transformed = transform_weights_for_mega_moe(
            mild_layer(2 * INTERMEDIATE, HIDDEN), mild_layer(HIDDEN, INTERMEDIATE), arch=arch
        )
        with pytest.raises(ValueError, match=r"l1_weights\[[01]\] must "):
            inverse_transform_weights(*weights, arch=arch)
        with pytest.raises(ValueError, match=r"l2_weights\[0\] must "):
            inverse_transform_weights(transformed.l1, transformed.l1, arch=arch)

    def test_unknown_architecture(self, weights):
        with pytest.raises(ValueError, match=r"arch must be one of sm_90a, sm_100a.*got 'sm_80'"):
            transform_weights_for_mega_moe(*weights, arch="sm_80")

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.int32])
    def test_weights_of_another_dtype(self, weights, dtype):
        (weight, sf), l2 = weights
        with pytest.raises(TypeError, match=rf"l1_weights\[0\] must be int8.*got {dtype}"):
            transform_weights_for_mega_moe((weight.to(dtype), sf), l2)

    def test_scales_as_bytes(self, weights):
        l1, (weight, sf) = weights
        with pytest.raises(TypeError, match=r"l2_weights\[1\] must be int32.*got torch.uint8"):
            transform_weights_for_mega_moe(l1, (weight, sf.view(torch.uint8)))

    def test_scales_per_128_values(self):
        l1 = random_layer(1024, 1024)
        l2 = random_layer(1024, 512)
        per_128 = l1[1][:, :, :2].contiguous()
        with pytest.raises(
            ValueError, match=r"l1_weights\[1\] must hold one scale per 32 .*\(3, 1024, 8\); got"
        ):
            transform_weights_for_mega_moe((l1[0], per_128), l2)

    def test_eight_bit_weights_by_their_shape(self, weights):
        """FP8 bytes reinterpreted as int8 have twice the columns that the scales speak of."""
        (_, sf), l2 = weights
        fp8_bytes = torch.zeros(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=torch.int8)
        with pytest.raises(ValueError, match=r"l1_weights\[1\] must hold one scale per 32"):
            transform_weights_for_mega_moe((fp8_bytes, sf), l2)

    def test_layers_that_do_not_go_together(self, weights):
        l1, _ = weights
        words = r"l2_weights\[0\] must have shape .*\(3, 384, 128\)"
        with pytest.raises(ValueError, match=words):  # with twice I columns it had no gate
            transform_weights_for_mega_moe(l1, random_layer(HIDDEN, 3 * INTERMEDIATE))
        with pytest.raises(ValueError, match=r"l2_weights\[0\] must have shape"):
            transform_weights_for_mega_moe(l1, random_layer(HIDDEN, INTERMEDIATE, num_experts=2))

    @pytest.mark.parametrize(("num_rows", "num_columns"), [(328, 384), (0, 384)])
    def test_sizes_that_are_no_multiple_of_32(self, num_rows, num_columns):
        with pytest.raises(ValueError, match=r"l1_weights\[0\] must have shape .* multiples of 32"):
            transform_weights_for_mega_moe(
                random_layer(num_rows, num_columns), random_layer(HIDDEN, INTERMEDIATE)
            )

    def test_odd_number_of_groups_of_rows(self):
        with pytest.raises(ValueError, match=r"l1_weights\[0\] must have 2\*I rows .* of 32"):
            transform_weights_for_mega_moe(random_layer(352, 384), random_layer(384, 192 + 64))

    def test_two_dimensional_weights(self, weights):
        (weight, sf), l2 = weights
        with pytest.raises(ValueError, match=r"l1_weights\[0\] must have shape \[E, 2\*I, H/2\]"):
            transform_weights_for_mega_moe((weight[0], sf[0]), l2)

    def test_tensors_on_different_devices(self, weights):
        l1, (weight, sf) = weights
        with pytest.raises(ValueError, match=r"l2_weights\[0\] must be on cpu.*got meta"):
            transform_weights_for_mega_moe(l1, (weight.to("meta"), sf))


@pytest.mark.gpu
def test_gpu_gives_what_the_cpu_gives(weights):
    on_gpu = [[tensor.cuda() for tensor in layer] for layer in weights]
    expected = transform_weights_for_mega_moe(*weights, arch="sm_100a")
    result = transform_weights_for_mega_moe(*on_gpu, arch="sm_100a")
    for a, b in zip([*expected.l1, *expected.l2], [*result.l1, *result.l2], strict=True):
        assert torch.equal(a, b.cpu())
