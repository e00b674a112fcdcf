"""Tensor memory of one CTA of the SM100 kernel. Offsets and sizes are 32-bit columns, not bytes."""

from __future__ import annotations

from .segments import Layout, Segment, align_up

MAX_COLUMNS = 512
MIN_COLUMNS = 32
DECODED_COLUMNS = 32  # of a k-block of 64 BF16 values


def sm100_tmem_layout(
    *,
    block_m: int,
    block_n: int,
    num_tmem_stages: int,
    num_scale_words: int = 1,
    num_decoded_slots: int = 0,
) -> Layout:
    """Accumulators, then, if they have some, the scales of tokens and of weights (a column holds 32
    scale rows), so many words of each row for a k-block, or so many blocks of decoded weights.

    The allocation is a power of two.

    >>> layout = sm100_tmem_layout(block_m=192, block_n=128, num_tmem_stages=2)
    >>> [(segment.name, segment.offset) for segment in layout.segments], layout.num_bytes
    ([('accumulator', 0), ('activation_sf', 384), ('weight_sf', 392)], 512)
    """
    accumulator = (num_tmem_stages, block_m)
    results = ("accumulator", accumulator, "f32", "FP32 results, one column per token")
    scales = (
        (
            "activation_sf",
            (num_scale_words, align_up(block_m, 128) // 32),
            "u32",
            "scales of tokens",
        ),
        ("weight_sf", (num_scale_words, block_n // 32), "u32", "scales of weight rows"),
    )
    decoded = (
        "decoded_weights",
        (num_decoded_slots, DECODED_COLUMNS),
        "u32",
        "decoded weights, a lane of them for each row",
    )
    return column_layout(
        (
            results,
            *(scales if num_scale_words else ()),
            *((decoded,) if num_decoded_slots else ()),
        )
    )


class TmemLayout(Layout):
    """A layout in columns."""

    unit = "u32"

    def constants(self) -> dict[str, int]:
        return {**self._places("column"), "num_columns": self.num_bytes}


def column_layout(
    sizes: tuple[tuple[str, tuple[int, ...], str, str], ...],
) -> TmemLayout:
    """Segments side by side, in an allocation of a power of two of columns."""
    segments = []
    end = 0
    for name, shape, dtype, purpose in sizes:
        num_columns = 1
        for size in shape:
            num_columns *= size
        segments.append(Segment(name, end, num_columns, dtype, shape, purpose))
        end += num_columns
    allocated = MIN_COLUMNS
    while allocated < end:
        allocated *= 2
    return TmemLayout(tuple(segments), allocated)
