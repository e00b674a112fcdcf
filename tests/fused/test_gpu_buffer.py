"""The symmetric buffer on a GPU, for one rank."""

import pytest
import torch

import deep_moe

pytestmark = pytest.mark.gpu


def test_a_buffer_on_a_gpu_starts_with_a_zero_control_part_and_a_clear_status() -> None:
    buffer = deep_moe.get_symm_buffer_for_mega_moe(None, 4, 16, 2, 256, 128)
    assert buffer.device.type == "cuda"
    assert not buffer.is_emulated
    assert not buffer.memory.tensor[: buffer.layout.mark("control_bytes")].any()
    assert buffer.memory.addresses == [buffer.memory.tensor.data_ptr()]
    assert buffer.memory.addresses[0] % 1024 == 0
    buffer.raise_if_failed()
    assert buffer.x.shape == (16, 256)


def test_a_failure_on_the_gpu_shows_at_the_next_call_until_reset() -> None:
    buffer = deep_moe.get_symm_buffer_for_mega_moe(None, 4, 16, 2, 256, 128)
    buffer.memory.status.code = 1
    with pytest.raises(deep_moe.MegaMoETimeoutError):
        buffer.raise_if_unusable()
    with pytest.raises(deep_moe.MegaMoEError, match="reset"):
        buffer.raise_if_unusable()
    buffer.reset()
    buffer.raise_if_unusable()


def test_memory_is_given_back() -> None:
    def make() -> None:
        deep_moe.get_symm_buffer_for_mega_moe(None, 4, 16, 2, 256, 128).close()

    make()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        make()
    assert torch.cuda.memory_allocated() == before
