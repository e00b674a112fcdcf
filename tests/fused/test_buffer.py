"""The symmetric buffer: views, sizes, lifetime, guard bands."""

import gc

import pytest
import torch

import deep_moe
from deep_moe.fused import buffer as buffer_module
from deep_moe.fused.buffer import SymmBuffer, describe_difference
from deep_moe.fused.emulated_ranks import EmulatedRanks
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.symm_buffer_layout import symm_buffer_layout


def make_buffer() -> SymmBuffer:
    return deep_moe.get_symm_buffer_for_mega_moe(None, 4, 16, 2, 256, 128, device="cpu")


def mapped_bytes() -> int:
    """Address space of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * 4096


def test_views_have_the_documented_types_and_places() -> None:
    buffer = make_buffer()
    assert (buffer.x.dtype, buffer.x.shape) == (torch.float8_e4m3fn, (16, 256))
    assert (buffer.x_sf.dtype, buffer.x_sf.shape) == (torch.int32, (16, 2))
    assert (buffer.topk_idx.dtype, buffer.topk_idx.shape) == (torch.int64, (16, 2))
    assert (buffer.topk_weights.dtype, buffer.topk_weights.shape) == (torch.float32, (16, 2))
    base = buffer.memory.tensor.data_ptr()
    for view, segment in (
        (buffer.x, "input_x"),
        (buffer.x_sf, "input_x_sf"),
        (buffer.topk_idx, "input_topk_idx"),
        (buffer.topk_weights, "input_topk_weights"),
    ):
        assert view.data_ptr() == base + buffer.layout[segment].offset
        assert view.is_contiguous()
    assert base % 1024 == 0


def test_the_size_is_that_of_the_layout_for_this_number_of_ranks() -> None:
    """B9: the number of ranks counts once."""
    shape = MoEShape(8, 256, 8, 7168, 2048, 256)
    assert symm_buffer_layout(shape).num_bytes == 292_899_840
    ranks = EmulatedRanks(2, 4, 16, 2, 256, 128)
    for buffer in ranks.buffers:
        assert buffer.nbytes == symm_buffer_layout(ranks.shape).num_bytes
        assert buffer.memory.tensor.numel() == buffer.nbytes


def test_the_size_is_known_without_a_buffer() -> None:
    assert deep_moe.buffer_size(8, 256, 256, 8, 7168, 2048) == 292_899_840
    assert make_buffer().nbytes == deep_moe.buffer_size(1, 4, 16, 2, 256, 128)
    sizes = (1, 4, 256, 2, 256, 128)
    bounded = deep_moe.get_symm_buffer_for_mega_moe(
        None, *sizes[1:], num_pool_tokens=384, device="cpu"
    )
    assert bounded.shape.num_pool_rows == 384
    assert bounded.nbytes == deep_moe.buffer_size(*sizes, num_pool_tokens=384)
    assert bounded.nbytes < deep_moe.buffer_size(*sizes)
    (of_emulated,) = EmulatedRanks(*sizes, num_pool_tokens=384).buffers
    assert of_emulated.nbytes == bounded.nbytes
    with pytest.raises(ValueError, match="num_pool_tokens must be a positive multiple of 384"):
        deep_moe.buffer_size(*sizes, num_pool_tokens=383)


def test_the_size_of_a_bounded_pool_hardly_grows_with_the_ranks() -> None:
    of_8, of_64 = (
        deep_moe.buffer_size(num_ranks, 384, 8192, 6, 7168, 3072, num_pool_tokens=24_576)
        for num_ranks in (8, 64)
    )
    assert of_8 < of_64 < 1.1 * of_8


def test_a_new_buffer_is_zero() -> None:
    buffer = make_buffer()
    assert not buffer.memory.tensor.any()


def test_a_hundred_buffers_leave_nothing() -> None:
    """B9."""
    for _ in range(3):
        make_buffer().close()
    gc.collect()
    before = mapped_bytes()
    for _ in range(100):
        make_buffer().close()
    gc.collect()
    assert mapped_bytes() - before < make_buffer().nbytes


def test_a_buffer_that_is_dropped_leaves_nothing_either() -> None:
    make_buffer()
    gc.collect()
    before = mapped_bytes()
    for _ in range(20):
        make_buffer()
    gc.collect()
    assert mapped_bytes() - before < make_buffer().nbytes


def test_views_survive_a_close() -> None:
    buffer = make_buffer()
    x = buffer.x
    buffer.close()
    buffer.close()
    gc.collect()
    x.view(torch.uint8).fill_(7)
    assert int(x.view(torch.uint8).sum()) == 7 * 16 * 256


def test_handles_are_never_used_twice() -> None:
    first = make_buffer()
    handle = first.handle
    first.close()
    assert make_buffer().handle > handle
    with pytest.raises(ValueError, match="sym_buffer must be an open buffer"):
        SymmBuffer.of_handle(handle)


@pytest.mark.parametrize("offset", [-1, -65536, 0, 65535])
def test_a_write_beside_the_buffer_is_noticed(example, monkeypatch, offset: int) -> None:
    """B8. The emulator would refuse such a write; here it is bypassed."""
    buffer = example.sym_buffer
    start = offset if offset < 0 else buffer.nbytes + offset

    def stray_write(*_: object, **__: object) -> None:
        before, after = buffer.memory.blocks[0]._guards()
        (before if offset < 0 else after)[offset] = 0

    monkeypatch.setattr("deep_moe.fused.emulated_call.run_emulated", stray_write)
    with pytest.raises(
        RuntimeError, match=f"wrote beside the symmetric buffer, at byte {start} of"
    ):
        example()


def test_reset_clears_the_control_part_and_keeps_inputs() -> None:
    buffer = make_buffer()
    control_bytes = buffer.layout.mark("control_bytes")
    buffer.memory.tensor[:control_bytes] = 1
    buffer.topk_idx.fill_(3)
    buffer.num_calls = 3  # of which other ranks may have had fewer
    buffer.reset()
    assert buffer.num_calls == 0
    assert not buffer.memory.tensor[:control_bytes].any()
    assert bool((buffer.topk_idx == 3).all())


def test_differences_name_argument_values_and_ranks() -> None:
    text = describe_difference(
        {0: {"hidden": 128, "num_topk": 2}, 1: {"hidden": 128, "num_topk": 4}, 2: {"hidden": 128}}
    )
    assert text == (
        "num_topk must be the same on every rank; got 2 on rank 0 and 4 on rank 1 and None on rank"
        " 2"
    )
    assert describe_difference({0: {"a": 1}, 1: {"a": 1}}) is None


def test_a_buffer_says_what_it_is() -> None:
    buffer = make_buffer()
    assert repr(buffer) == (
        "SymmBuffer(rank 0 of 1 on cpu, 4 experts, top-2, hidden 256, intermediate 128, mxfp4 "
        f"weights, mxfp8 tokens, up to 16 tokens, {buffer.nbytes / 2**20:.1f} MiB, open)"
    )
    buffer.mark_failed("rank 3 did not arrive")
    assert repr(buffer).endswith(", failed: rank 3 did not arrive)")
    buffer.close()
    assert repr(buffer).endswith(", closed)")


def test_a_closed_buffer_says_so_whatever_it_is_asked() -> None:
    buffer = make_buffer()
    buffer.close()
    for name in ("x", "x_sf", "topk_idx", "topk_weights", "memory"):
        with pytest.raises(ValueError, match="sym_buffer must be an open buffer; this one is"):
            getattr(buffer, name)
        assert not hasattr(buffer, name)
    with pytest.raises(ValueError, match="open buffer"):
        buffer.reset()
    with pytest.raises(AttributeError, match="no attribute 'topk'"):
        buffer.topk  # noqa: B018


def test_a_buffer_without_a_device_says_once_that_calls_are_emulated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    buffer_module._say_once.cache_clear()
    sizes = (None, 4, 16, 2, 256, 128)
    deep_moe.get_symm_buffer_for_mega_moe(*sizes, device="cpu").close()
    assert caplog.messages == []
    for _ in range(2):
        deep_moe.get_symm_buffer_for_mega_moe(*sizes).close()
    (message,) = caplog.messages
    assert "calls run in the emulator on this CPU" in message
    assert 'device="cpu" says that this is meant' in message
