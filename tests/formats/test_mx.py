"""The public way to quantize: what a layer takes, and what it stands for."""

import pytest
import torch

import deep_moe
from deep_moe.formats.block_scaled import quantize_e2m1_ue8m0, quantize_e4m3_ue8m0
from deep_moe.weights.mxfp4 import quantizing


def test_weights_fit_the_transformation_and_come_back():
    torch.manual_seed(0)
    w1 = torch.randn(3, 2 * 128, 256, dtype=torch.bfloat16)
    w2 = torch.randn(3, 256, 128, dtype=torch.bfloat16)
    l1, l2 = deep_moe.quantize_mxfp4(w1), deep_moe.quantize_mxfp4(w2)
    weights = deep_moe.transform_weights_for_mega_moe(l1, l2)
    restored = deep_moe.inverse_transform_weights(*weights)
    for original, pair in ((w1, restored.l1), (w2, restored.l2)):
        again = deep_moe.dequantize_mxfp4(*pair)
        assert again.shape == original.shape
        # Of values up to 6 the largest gap is 2, and the scale at most doubles it.
        largest = original.float().unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
        error = (again - original.float()).unflatten(-1, (-1, 32)).abs()
        assert bool((error <= largest / 3).all())
        assert float(error.max()) > 0


@pytest.mark.parametrize("shape", [(128,), (5, 256), (3, 4, 128), (2, 3, 4, 128), (0, 4, 128)])
def test_a_stack_is_quantized_as_its_matrices_are(shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    for got, expected in (
        (deep_moe.quantize_mxfp4(x), quantize_e2m1_ue8m0(x)),
        (deep_moe.quantize_mxfp8(x), quantize_e4m3_ue8m0(x)),
    ):
        for a, b in zip(got, expected, strict=True):
            assert a.shape == b.shape
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_quantized_already_is_exact(dtype):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 128)
    for quantize, dequantize in (
        (deep_moe.quantize_mxfp4, deep_moe.dequantize_mxfp4),
        (deep_moe.quantize_mxfp8, deep_moe.dequantize_mxfp8),
    ):
        pair = quantize(x)
        values = dequantize(*pair, dtype)
        assert values.dtype == dtype
        # By another scale perhaps, where the largest value was rounded down.
        assert torch.equal(dequantize(*quantize(values.float()), dtype), values)


def test_no_more_than_a_matrix_is_worked_on_at_once(monkeypatch):
    sizes = []

    def recorded(x):
        sizes.append(x.shape)
        return quantize_e2m1_ue8m0(x)

    monkeypatch.setattr(quantizing, "quantize_e2m1_ue8m0", recorded)
    deep_moe.quantize_mxfp4(torch.zeros(3, 4, 128))
    assert sizes == [(4, 128)] * 3


def test_refusals():
    for columns in (0, 100):
        for quantize in (deep_moe.quantize_mxfp4, deep_moe.quantize_mxfp8):
            with pytest.raises(ValueError, match="x must have a positive multiple of 32 columns"):
                quantize(torch.zeros(2, 4, columns))
    with pytest.raises(TypeError, match="x must be float32, bfloat16 or float16"):
        deep_moe.quantize_mxfp8(torch.zeros(128, dtype=torch.int32))
    with pytest.raises(ValueError, match="x must be finite"):
        deep_moe.quantize_mxfp4(torch.full((2, 128), torch.nan))
    with pytest.raises(TypeError, match="x must be a tensor; got ndarray"):
        deep_moe.quantize_mxfp4(torch.zeros(128).numpy())
