"""DeepGEMM's grouped products of FP8, by `deep_moe.grouped_product`: on Hopper, or on a CPU in the
emulator."""

from __future__ import annotations

import torch

from deep_moe.described import described_as
from deep_moe.fused.checks import require_type
from deep_moe.heuristics.products import K_GROUP
from deep_moe.training.grouped_product import grouped_product

Pair = tuple[torch.Tensor, torch.Tensor]

_ALIGNMENT = 128
_RECIPE = (1, K_GROUP, K_GROUP)


def get_mk_alignment_for_contiguous_layout() -> int:
    """Rows by which callers align experts' rows: 128. With `use_psum_layout` each expert's rows
    begin at a multiple of it. Otherwise any number does here."""
    return _ALIGNMENT


def get_m_alignment_for_contiguous_layout() -> int:
    """The earlier name of `get_mk_alignment_for_contiguous_layout`."""
    return _ALIGNMENT


def m_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """d[row] = a[row] @ b[group of the row].T, for rows by group one behind the other.

    Args:
        a: float8_e4m3fn [M, K], and float32 scales [M, K/128], of any strides.
        b: float8_e4m3fn [groups, N, K], and float32 scales [groups, ceil(N/128), K/128].
        d: bfloat16 [M, N], where the result is written. Rows of no group are left as they are.
        grouped_layout: int32 [M], the group of each row, -1 for none. A group's rows lie one behind
            the other, without others between. With `use_psum_layout` int32 [groups]: where each
            group's rows end, which begin at the multiple of 128 behind those of the group before.
        recipe: None or (1, 128, 128).
        compiled_dims: is heeded by DeepGEMM alone.
        disable_ue8m0_cast: is heeded by DeepGEMM alone, for Blackwell: scales are taken as they
            are.
        use_psum_layout: what `grouped_layout` holds.
        expected_m_for_psum_layout: is heeded by DeepGEMM alone.

    Nothing waits for a GPU. Groups whose rows are not together, and ids of no group, are a
    ValueError on a CPU. On a GPU they are an assertion of the device.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    values, scales, weight, weight_sf = _operands(a, b, recipe)
    if values.ndim != 2:
        raise ValueError(f"a[0] must be [M, K]; got shape {tuple(values.shape)}")
    if weight.ndim != 3:
        raise ValueError(f"b[0] must be [groups, N, K]; got shape {tuple(weight.shape)}")
    begins, counts = spans_of_layout(
        grouped_layout, values.shape[0], weight.shape[0], use_psum_layout
    )
    grouped_product(values, scales, weight, weight_sf, counts, begins, out=d)


@described_as(m_grouped_fp8_gemm_nt_contiguous)
def m_grouped_fp8_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """d[group, row] = a[group, row] @ b[group].T, for the first masked_m[group] rows of each.

    Other arguments and errors are as of `m_grouped_fp8_gemm_nt_contiguous`.

    Args:
        a: float8_e4m3fn [groups, M, K], and float32 scales [groups, M, K/128], of any strides.
        d: bfloat16 [groups, M, N], where the result is written. Other rows are left as they are.
        masked_m: int32 [groups], on the device.
        expected_m: is heeded by DeepGEMM alone.
    """
    values, scales, weight, weight_sf = _operands(a, b, recipe)
    grouped_product(values, scales, weight, weight_sf, masked_m, out=d)


def _operands(
    a: Pair, b: Pair, recipe: tuple[int, int, int] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """a's and b's values and scales."""
    if recipe is not None and tuple(recipe) != _RECIPE:
        raise ValueError(
            f"recipe must be None or {_RECIPE}, scales for 128 values of a row and for 128 x 128 "
            f"of a matrix; got {recipe!r}"
        )
    return *checked_pair("a", a), *checked_pair("b", b)


def checked_pair(name: str, pair: object) -> Pair:
    """Values and scales, which are tensors."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{name} must be a pair of values and scales; got {pair!r}")
    for index, tensor in enumerate(pair):
        require_type(f"{name}[{index}]", tensor, torch.Tensor, "a tensor")
    return pair[0], pair[1]


def spans_of_layout(
    grouped_layout: torch.Tensor, num_rows: int, num_groups: int, use_psum_layout: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each group's first row and number of rows, int32, of what callers say of contiguous rows."""
    require_type("grouped_layout", grouped_layout, torch.Tensor, "a tensor")
    require_type("use_psum_layout", use_psum_layout, bool, "a bool")
    wanted = num_groups if use_psum_layout else num_rows
    if grouped_layout.dtype != torch.int32:
        raise TypeError(f"grouped_layout must be torch.int32; got {grouped_layout.dtype}")
    if tuple(grouped_layout.shape) != (wanted,):
        raise ValueError(
            f"grouped_layout must have shape ({wanted},); got {tuple(grouped_layout.shape)}"
        )
    if use_psum_layout:
        return _spans_of_ends(grouped_layout)
    return _spans_of_ids(grouped_layout, num_groups)


def _spans_of_ends(ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each group's first row and number of rows, int32."""
    begins = torch.nn.functional.pad(ends[:-1], (1, 0))
    begins = (begins + (_ALIGNMENT - 1)).div(_ALIGNMENT, rounding_mode="floor").mul(_ALIGNMENT)
    return begins.int(), (ends - begins).int()


def _spans_of_ids(ids: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each group's first row and number of rows, int32, of rows' ids."""
    num_rows, device = ids.shape[0], ids.device
    row = torch.arange(num_rows, dtype=torch.int32, device=device)
    # One more for rows of no group.
    is_known = (ids >= -1) & (ids < num_groups)
    group = torch.where(is_known & (ids >= 0), ids, num_groups).long()
    counts = torch.zeros(num_groups + 1, dtype=torch.int32, device=device)
    counts.scatter_add_(0, group, torch.ones_like(ids))
    begins = torch.full_like(counts, num_rows).scatter_reduce_(0, group, row, "amin")
    lasts = torch.full_like(counts, -1).scatter_reduce_(0, group, row, "amax")
    begins, counts, lasts = begins[:-1], counts[:-1], lasts[:-1]
    are_together = (counts == 0) | (lasts - begins + 1 == counts)
    is_right = are_together.all() & is_known.all()
    text = (
        f"grouped_layout must hold ids of {num_groups} groups or -1, and a group's rows one behind "
        "the other"
    )
    if ids.is_cuda:
        torch._assert_async(is_right, text)
    elif not is_right:
        raise ValueError(f"{text}; got {ids.tolist()}")
    return begins, counts
