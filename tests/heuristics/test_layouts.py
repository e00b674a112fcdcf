"""Memory maps: no overlap, right alignment, sums equal to declared sizes, golden sizes."""

import dataclasses
from math import prod

import pytest

from deep_moe.heuristics import MoEShape, preset_shape
from deep_moe.heuristics.segments import DTYPE_BYTES, LayoutBuilder
from deep_moe.heuristics.symm_buffer_layout import symm_buffer_layout
from deep_moe.heuristics.tmem_layout import sm100_tmem_layout
from deep_moe.targets import choose_config

SMALL = MoEShape(2, 8, 3, 256, 128, 16)


def test_gaps_are_rows_of_their_own():
    builder = LayoutBuilder()
    builder.add("a", "u8", (3,), "", alignment=1)
    builder.mark("middle", alignment=4)
    builder.add("b", "u64", (2, 1), "", alignment=16)
    layout = builder.build(alignment=64)
    assert [(row.name, row.offset, row.num_bytes) for row in layout.rows()] == [
        ("a", 0, 3),
        ("padding", 3, 13),
        ("b", 16, 16),
        ("padding", 32, 32),
    ]
    assert layout["b"].end == 32
    with pytest.raises(KeyError, match="no segment named 'c'; there are a, b"):
        layout["c"]


def test_what_the_kernel_gets_of_a_layout():
    builder = LayoutBuilder()
    builder.add("a", "u8", (3,), "", alignment=1)
    builder.mark("middle", alignment=4)
    builder.add("b", "f32", (2, 3, 5), "", alignment=16)
    layout = builder.build(alignment=64)
    assert layout.constants() == {
        "a_offset": 0,
        "a_stride": 1,
        "b_offset": 16,
        "b_stride": 3 * 5 * 4,
        "middle": 4,
        "num_bytes": 192,
    }
    assert layout.dimensions() == {"a_dim0": 3, "b_dim0": 2, "b_dim1": 3, "b_dim2": 5}
    assert layout.element_types() == {"a_element": "u8", "b_element": "f32"}


def all_layouts():
    for name in ("deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v3"):
        for num_ranks in (1, 8, 32):
            shape = preset_shape(name, num_ranks=num_ranks, num_max_tokens_per_rank=512)
            for num_tokens in (0, 1, 20, 512):
                config = choose_config(shape, num_tokens)
                yield pytest.param(config, id=f"{name}-{num_ranks}-{num_tokens}")


@pytest.mark.parametrize("config", list(all_layouts()))
def test_maps_have_no_overlap_and_add_up(config):
    for layout in (config.symm_buffer_layout, config.smem_layout, config.tmem_layout):
        position = 0
        for row in layout.rows():
            assert row.offset == position
            assert row.num_bytes > 0
            position += row.num_bytes
        assert position == layout.num_bytes
        assert len({segment.name for segment in layout.segments}) == len(layout.segments)
    for layout in (config.symm_buffer_layout, config.smem_layout):
        for segment in layout.segments:
            assert segment.num_bytes == prod(segment.shape) * DTYPE_BYTES[segment.dtype]


@pytest.mark.parametrize("config", list(all_layouts()))
def test_declared_sizes_are_those_of_the_maps(config):
    assert config.smem_bytes == config.smem_layout.num_bytes
    assert config.num_tmem_columns == config.tmem_layout.num_bytes


def test_symmetric_buffer_segments_come_in_the_agreed_order():
    layout = symm_buffer_layout(SMALL)
    assert [segment.name for segment in layout.segments] == [
        "grid_gather_counter",
        "rank_barrier_counter",
        "rank_barrier_signals",
        "expert_send_count",
        "expert_recv_count",
        "expert_recv_sum",
        "l1_arrival_count",
        "l2_arrival_mask",
        "num_claimed_blocks",
        "num_taken_pages",
        "taken_pages",
        "src_list_pages",
        "src_token_topk_idx",
        "token_src_metadata",
        "input_x",
        "input_x_sf",
        "input_topk_idx",
        "input_topk_weights",
        "l1_tokens",
        "l1_token_sf",
        "l1_topk_weights",
        "l2_tokens",
        "l2_token_sf",
        "combine",
    ]
    for segment in layout.segments:
        assert segment.offset % 128 == 0
    for name in ("l1_tokens", "l1_token_sf", "l2_tokens", "l2_token_sf", "input_x", "combine"):
        assert layout[name].offset % 1024 == 0


def test_symmetric_buffer_shapes():
    layout = symm_buffer_layout(SMALL)
    pool = SMALL.num_pool_rows
    assert layout["expert_recv_count"].shape == (2, 4)
    assert layout["num_taken_pages"].shape == (2,)
    assert layout["taken_pages"].shape == (8, 1)
    assert layout["src_list_pages"].shape == (4, 2, 1)
    assert layout["src_token_topk_idx"].shape == (8 + 2, 32)  # 48 slots: up to two pages
    assert layout["token_src_metadata"].shape == (pool, 3)
    assert layout["l1_arrival_count"].shape == (pool // 8,)
    assert layout["l2_arrival_mask"].shape == (pool // 8, 1)
    assert layout["l1_token_sf"].shape == (2, pool // 16 * 128)
    assert layout["l2_tokens"].shape == (pool, 128)
    assert layout["combine"].shape == (3, 16, 256)


def test_a_ring_has_fewer_rows_and_a_count_of_releases():
    bounded = dataclasses.replace(SMALL, num_pool_tokens=384)
    unbounded, ring = symm_buffer_layout(SMALL), symm_buffer_layout(bounded)
    assert ring["release_count"].shape == ring["l1_arrival_count"].shape
    assert ring["release_count"].end <= ring.mark("zeroed_end") == ring["src_list_pages"].offset
    assert ring["token_src_metadata"].shape == (384, 3)
    assert ring["l1_token_sf"].shape == (2, 768)
    assert ring["l2_tokens"].shape == (384, 128)
    for name in ("l1_arrival_count", "l2_arrival_mask", "combine", "input_x"):
        assert ring[name].shape == unbounded[name].shape
    assert "release_count" not in [segment.name for segment in unbounded.segments]


def test_the_words_that_each_call_zeroes_are_contiguous():
    layout = symm_buffer_layout(SMALL)
    assert layout.mark("zeroed_begin") == layout["expert_send_count"].offset
    assert layout["taken_pages"].end <= layout.mark("zeroed_end") == layout["src_list_pages"].offset
    assert layout["rank_barrier_signals"].end <= layout.mark("zeroed_begin")
    assert layout.mark("control_bytes") == layout["input_x"].offset


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "num_topk", "max_tokens", "page", "num_further"),
    [
        (8, 384, 6, 8192, 512, 95),
        (8, 896, 16, 8192, 608, 215),
        (8, 384, 6, 128, 128, 5),
        (8, 384, 1, 128, 128, 0),  # all slots of a rank fit into a page
        (2, 4, 2, 100, 200, 0),
        (2, 1024, 32, 8192, 1024, 255),
        (72, 72, 16, 4096, 3648, 17),
        (1, 8, 8, 1, 8, 0),
    ],
)
def test_pages_of_lists(
    num_ranks: int, num_experts: int, num_topk: int, max_tokens: int, page: int, num_further: int
) -> None:
    shape = MoEShape(num_ranks, num_experts, num_topk, 128, 128, max_tokens)
    assert (shape.num_list_page_slots, shape.num_further_list_pages) == (page, num_further)
    # What routing takes the most pages of: lists of a slot more than whole pages, or one list.
    num_slots = max_tokens * num_topk
    num_long, rest = divmod(num_slots, page + 1)
    assert num_long + max(rest - 1, 0) // page <= num_further
    assert (num_slots - 1) // page == num_further
    layout = symm_buffer_layout(shape)
    names = [segment.name for segment in layout.segments]
    assert ("src_list_pages" in names) == ("taken_pages" in names) == (num_further > 0)
    assert (
        prod(layout["src_token_topk_idx"].shape) < (num_ranks + 8) * num_slots + 256 * num_experts
    )


@pytest.mark.parametrize(
    ("name", "num_ranks", "max_tokens", "num_bytes"),
    [
        ("deepseek-v3", 8, 256, 292_899_840),
        ("deepseek-v4-flash", 8, 1024, 480_796_672),
        ("deepseek-v4-pro", 32, 4096, 10_496_323_584),
        ("deepseek-v3", 64, 16, 108_354_560),  # fewer local experts than slots
    ],
)
def test_golden_buffer_sizes(name, num_ranks, max_tokens, num_bytes):
    shape = preset_shape(name, num_ranks=num_ranks, num_max_tokens_per_rank=max_tokens)
    assert symm_buffer_layout(shape).num_bytes == num_bytes


def test_every_segment_grows_with_what_it_holds():
    """A factor that is missing or counted twice shows here."""

    def shapes(**changes):
        layout = symm_buffer_layout(dataclasses.replace(base, **changes))
        return {segment.name: segment.shape for segment in layout.segments}

    def those_that_grow(**changes):
        return {name for name, shape in shapes(**changes).items() if shape != shapes()[name]}

    base = MoEShape(4, 32, 8, 1024, 512, 384)
    pools = {"l1_tokens", "l1_token_sf", "l1_topk_weights", "l2_tokens", "l2_token_sf"}
    of_pool = {*pools, "l1_arrival_count", "l2_arrival_mask", "token_src_metadata"}
    inputs = {"input_x", "input_x_sf", "input_topk_idx", "input_topk_weights"}
    of_tokens = {*inputs, *of_pool, "src_token_topk_idx", "combine"}
    of_hidden = {"input_x", "input_x_sf", "l1_tokens", "l1_token_sf", "combine"}
    assert those_that_grow(num_max_tokens_per_rank=768) == of_tokens
    assert those_that_grow(hidden=2048) == of_hidden
    assert those_that_grow(intermediate_hidden=1024) == {"l2_tokens", "l2_token_sf"}
    assert those_that_grow(intermediate_hidden=8192) == {
        "l2_tokens",
        "l2_token_sf",
        "l2_arrival_mask",
    }
    # The arrays by rank, expert and slot, element for element.
    doubled = shapes(num_max_tokens_per_rank=768, hidden=2048)
    for name in (*inputs, "src_token_topk_idx", "combine"):
        factor = 4 if name in ("input_x", "input_x_sf", "combine") else 2
        assert prod(doubled[name]) == factor * prod(shapes()[name])


def test_the_worked_shared_memory_case():
    """hidden 7168, 256 experts, BLOCK_M 128, 8 epilogue warps: 7 stages."""
    shape = MoEShape(8, 256, 8, 7168, 2048, 1024)
    config = choose_config(shape, 1024, overrides={"block_m": 128})
    assert config.num_stages == 7
    fewer = choose_config(shape, 1024, overrides={"block_m": 128, "num_stages": 6})
    # Half of 128 tokens and 128 weight rows of 128 bytes, their scales, two barriers.
    assert config.smem_bytes - fewer.smem_bytes == 25616
    assert config.smem_bytes <= 232448 < config.smem_bytes + 25616
    roomier = choose_config(shape, 1024, smem_capacity=232 * 1024, overrides={"block_m": 128})
    assert roomier.num_stages == 7


@pytest.mark.parametrize("block_m", [16, 32, 64, 96, 128, 192])
def test_shared_memory_alignment(block_m):
    shape = MoEShape(1, 9, 3, 384, 256, 64)
    config = choose_config(shape, 64, overrides={"block_m": block_m})
    layout = config.smem_layout
    for name in ("cd_staging", "activations", "weights"):
        assert layout[name].offset % 1024 == 0
    activation_stage = layout["activations"].num_bytes // config.num_stages
    assert activation_stage % 1024 == 0
    for name in ("pull_buffers", "activation_sf", "weight_sf"):
        assert layout[name].offset % 128 == 0
    first_barrier = layout.mark("barriers_offset")
    for segment in layout.segments:
        if segment.name.endswith("barriers"):
            assert segment.offset >= first_barrier
            assert segment.offset % 8 == 0
        elif segment.name not in ("claimed_pairs", "tmem_ptr"):
            assert segment.end <= first_barrier


@pytest.mark.parametrize(
    ("block_m", "num_used", "num_allocated"),
    [(16, 40, 64), (32, 72, 128), (64, 136, 256), (96, 200, 256), (128, 264, 512), (192, 396, 512)],
)
def test_tensor_memory_columns(block_m, num_used, num_allocated):
    layout = sm100_tmem_layout(block_m=block_m, block_n=128, num_tmem_stages=2)
    assert layout.segments[-1].end == num_used
    assert layout.constants() == {
        "accumulator_column": 0,
        "accumulator_stride": block_m,
        "activation_sf_column": 2 * block_m,
        "activation_sf_stride": -(-block_m // 128) * 4,
        "weight_sf_column": num_used - 4,
        "weight_sf_stride": 4,
        "num_columns": num_allocated,
    }


@pytest.mark.parametrize(("block_m", "num_allocated"), [(16, 64), (96, 256), (192, 512)])
def test_tensor_memory_of_four_words_of_scales(block_m, num_allocated):
    """Those of a k-block of packed E2M1 stand side by side."""
    layout = sm100_tmem_layout(block_m=block_m, block_n=128, num_tmem_stages=2, num_scale_words=4)
    columns = -(-block_m // 128) * 4
    assert layout["activation_sf"].shape == (4, columns)
    assert layout["weight_sf"].offset == 2 * block_m + 4 * columns
    assert layout.constants()["activation_sf_stride"] == columns
    assert layout.num_bytes == num_allocated
