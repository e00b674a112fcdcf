"""Tensor maps of PyTorch's tensors follow their strides, or refuse them."""

import pytest
import torch

from deep_moe.emulator.tensor_map import DataType
from deep_moe.tensor_map import map_of_rows


def test_one_row_repeated_is_a_stride_of_zero() -> None:
    tensor = torch.zeros(1, 256, dtype=torch.int8).expand(8, 256)
    spec = map_of_rows(tensor, DataType.UINT8, name="w", box=(16, 2))
    assert (spec.dims, spec.strides) == ((256, 8), (0,))


def test_rows_take_address_and_strides_from_the_tensor() -> None:
    storage = torch.zeros(3, 4, 512, dtype=torch.int8)
    view = storage[:, :, 128:384]  # rows of 256 bytes, 512 apart
    spec = map_of_rows(view, DataType.UINT8, name="w", box=(128, 2))
    assert spec.address == storage.data_ptr() + 128
    assert spec.dims == (256, 12)
    assert spec.strides == (512,)
    packed = map_of_rows(view, DataType.PACKED_16U4_ALIGN16B, name="w", box=(128, 2))
    assert packed.dims == (512, 12)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (lambda t: t.transpose(1, 2), "w must have contiguous rows"),
        (lambda t: t[:, ::2].transpose(0, 1), "w must have evenly spaced rows"),
        (lambda t: t[:, :2], "w must have evenly spaced rows"),
        (lambda t: t[..., 8:136], "w does not fit its tensor map: address"),
        (
            lambda t: t.flatten()[: 4 * 2 * 200].view(4, 2, 200),
            "w does not fit its tensor map: str",
        ),
        (lambda t: t.flatten(), "w must have at least 2 dims"),
    ],
)
def test_strides_that_a_map_cannot_follow_are_refused(view, message: str) -> None:
    """B16: a map built from shapes alone would read other bytes than the tensor's."""
    tensor = torch.zeros(4, 4, 256, dtype=torch.int8)
    with pytest.raises(ValueError, match=message):
        map_of_rows(view(tensor), DataType.UINT8, name="w", box=(16, 2))


def test_a_single_expert_may_have_any_outer_stride() -> None:
    tensor = torch.zeros(2, 4, 256, dtype=torch.int8)[:1, :2]
    spec = map_of_rows(tensor, DataType.UINT8, name="w", box=(16, 2))
    assert spec.dims == (256, 2)
