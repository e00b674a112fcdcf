"""`grouped_product`: the product of quantized rows and their experts' quantized weights."""

from __future__ import annotations

from functools import lru_cache

import torch

from deep_moe.emulator.tensor_map import DataType, Swizzle, TensorMapSpec
from deep_moe.fused.checks import check_contiguous, check_start, require_type
from deep_moe.fused.gpu import Gpu, gpu_of
from deep_moe.heuristics.products import COLUMN_ALIGNMENT, K_GROUP, GroupedProductConfig
from deep_moe.heuristics.training import MAX_EXPERTS
from deep_moe.jit.cpp_structs import CppStruct
from deep_moe.jit.kernel_args import GroupedProductArgs, TensorMap
from deep_moe.targets import products_target, target_of
from deep_moe.tensor_memory import check_dense, check_memory, refuse_shared_memory

from .launching import config_of, launch
from .quantized import QuantizedColumns

_ALIGNMENT = 16  # bytes, of tensor copies and of stores
_EMULATED_CTAS = 4
_MAX_ROWS = 1 << 30


@torch.no_grad()
def grouped_product(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    weight: torch.Tensor,
    weight_sf: torch.Tensor,
    expert_count: torch.Tensor,
    expert_begin: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    arch: str | None = None,
) -> torch.Tensor:
    """Each expert's rows of x times its matrix, transposed: `y[row] = x[row] @ weight[e].T`.

    Values are E4M3, multiplied by the tensor cores as they are. The sums over each 128 values along
    K are multiplied by both scales and added in float32. y is rounded once. The tensor cores of
    Hopper add 32 products at once and keep 13 bits below the largest (docs/numerics.md).

    Args:
        x: float8_e4m3fn [rows, K] with expert_begin, otherwise [experts, N_e, K], as dispatches
            of `AllToAll` and of `LowLatencyAllToAll` with `token_format="fp8_128"` give it. K is a
            multiple of 128. Rows are contiguous and evenly spaced, by a multiple of 16 bytes.
        x_sf: float32 [rows, K/128] or [experts, N_e, K/128], a scale for 128 values of a row. Any
            strides, so scales may lie by row or by column.
        weight: float8_e4m3fn [experts, N, K], N a multiple of 8. Contiguous.
        weight_sf: float32 [experts, ceil(N/128), K/128], a scale for each 128 x 128 of a matrix, as
            FP8 checkpoints have them. Contiguous. Blocks are counted from the first row on: where
            gate and up are one matrix, each has a multiple of 128 rows.
        expert_count: int32 [experts], on the device. The host does not read it.
        expert_begin: int32 [experts], each expert's first row; None for x [experts, N_e, K], where
            expert e has the first expert_count[e] rows of x[e]. Rows of a count that lie outside of
            x, or outside of x[e], are left out.
        out: bfloat16 [rows, N] or [experts, N_e, N], contiguous, where y is written.
        arch: on a CPU "sm_90a", also by default, whose kernel runs in the emulator; on a GPU its
            own target or None. Only SM90 (H100, H200) has this kernel.

    Returns y, that is `out`. Rows of no expert are neither read nor written.

    >>> import torch
    >>> from deep_moe.formats.float_scaled import quantize_e4m3_float
    >>> x, x_sf = quantize_e4m3_float(torch.ones(3, 128))
    >>> weight, weight_sf = torch.ones(2, 8, 128).to(torch.float8_e4m3fn), torch.ones(2, 1, 1)
    >>> count, begin = torch.tensor([1, 2]).int(), torch.tensor([0, 1]).int()
    >>> grouped_product(x, x_sf, weight, weight_sf, count, begin)[:, 0].tolist()
    [128.0, 128.0, 128.0]

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
        CompileError: NVRTC refused the kernel.
    """
    _check(x, x_sf, weight, weight_sf, expert_count, expert_begin)
    gpu = gpu_of(x.device)
    num_columns = weight.shape[1]
    shape = (*x.shape[:-1], num_columns)
    if out is None:
        out = x.new_empty(shape, dtype=torch.bfloat16)
    else:
        _require("out", out, torch.bfloat16, x.device, shape)
        check_contiguous("out", out)
        check_start("out", out, _ALIGNMENT)
        given = {"x": x, "x_sf": x_sf, "weight": weight, "weight_sf": weight_sf}
        given |= {"expert_count": expert_count}
        refuse_shared_memory({"out": out}, {**given, "expert_begin": expert_begin})
    multiply(
        x,
        x_sf,
        weight,
        weight_sf,
        out,
        gpu,
        _arch_of(arch, gpu, x.device),
        expert_count=expert_count,
        expert_begin=expert_begin,
    )
    return out


def multiply(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    weight: torch.Tensor,
    weight_sf: torch.Tensor,
    out: torch.Tensor,
    gpu: Gpu | None,
    arch: str,
    *,
    expert_count: torch.Tensor | None = None,
    expert_begin: torch.Tensor | None = None,
    expert_end: torch.Tensor | None = None,
) -> None:
    """`grouped_product` of arguments that are known to be right. expert_end: int32 [experts], in
    place of counts and begins: where each expert's rows end, which begin where those of the expert
    before end."""
    config = config_of(GroupedProductConfig, arch=arch)
    num_experts, num_columns, num_values = weight.shape
    num_rows = x.numel() // num_values
    is_by_expert = expert_begin is None and expert_end is None
    rows_per_expert = x.shape[-2] if is_by_expert else 0
    max_ctas = config.max_ctas(num_rows, num_experts, num_columns)
    num_ctas = min(max_ctas, _EMULATED_CTAS if gpu is None else gpu.num_sms)
    if num_ctas == 0:
        return
    expert_stride = x_sf.stride(0) - rows_per_expert * x_sf.stride(1) if is_by_expert else 0
    row_stride = x.stride(-2) if x.numel() > num_values else num_values
    given = {"expert_count": expert_count, "expert_begin": expert_begin, "expert_end": expert_end}
    pointers = {name: 0 if t is None else t.data_ptr() for name, t in given.items()}
    args = GroupedProductArgs(
        _map_of_rows(config, gpu, x.data_ptr(), row_stride, num_values, num_rows),
        _map_of_weights(config, gpu, weight.data_ptr(), *weight.shape),
        x_sf.data_ptr(),
        weight_sf.data_ptr(),
        pointers["expert_begin"],
        pointers["expert_count"],
        pointers["expert_end"],
        out.data_ptr(),
        expert_stride,
        x_sf.stride(-2),
        x_sf.stride(-1),
        num_experts,
        num_rows,
        rows_per_expert,
        num_columns,
        num_values // config.block_k,
    )
    read = {"x": x, "x_sf": x_sf, "weight": weight, "weight_sf": weight_sf}
    read |= {name: tensor for name, tensor in given.items() if tensor is not None}
    launch(gpu, config, args, num_ctas, read, {"y": out})


def sum_rows(
    x: QuantizedColumns,
    d_y: QuantizedColumns,
    expert_end: torch.Tensor,
    out: torch.Tensor,
    gpu: Gpu | None,
    arch: str,
    *,
    adds: bool = False,
) -> None:
    """Sums over each expert's rows of x[row][i] * d_y[row][j]: bfloat16 out [experts, K, N].
    expert_end: int32 [experts], where its rows end, which begin where those before end. adds: to
    what out holds, which may be float32 then; sums are rounded to out's type before."""
    config = config_of(
        GroupedProductConfig, sums_rows=True, adds=adds, y_bytes=out.element_size(), arch=arch
    )
    num_experts, num_rows, num_columns = out.shape
    max_ctas = config.max_ctas(num_rows, num_experts, num_columns)
    num_ctas = min(max_ctas, _EMULATED_CTAS if gpu is None else gpu.num_sms)
    maps = (
        _map_of_columns(config, gpu, one.values.data_ptr(), *one.values.shape[:2])
        for one in (x, d_y)
    )
    args = GroupedProductArgs(
        *maps,
        x.scales.data_ptr(),
        d_y.scales.data_ptr(),
        0,
        0,
        expert_end.data_ptr(),
        out.data_ptr(),
        0,
        0,
        0,
        num_experts,
        num_rows,
        0,
        num_columns,
        0,
    )
    read = {"x": x.values, "x_sf": x.scales, "d_y": d_y.values, "d_y_sf": d_y.scales}
    launch(gpu, config, args, num_ctas, {**read, "expert_end": expert_end}, {"y": out})


# The driver takes tens of microseconds from Python to encode a map. PyTorch's allocator gives a
# layer the same addresses in every step.
@lru_cache(maxsize=1024)
def _map_of_rows(
    config: GroupedProductConfig,
    gpu: Gpu | None,
    address: int,
    row_stride: int,
    num_values: int,
    num_rows: int,
) -> CppStruct:
    """Coordinates are (k, row, end), and stand for row `end - block_m + row` of x. So `row` counts
    towards `block_m`, which is out of bounds: of a box that begins with the n-th row before `end`
    n rows are x's, and zeros fill the rest. The address is the one that `row` and `end` of 0 would
    have, before x and never read."""
    return _encoded(
        TensorMapSpec(
            DataType.UINT8,
            address - config.block_m * row_stride,
            dims=(num_values, config.block_m, num_rows + 1),
            strides=(row_stride, row_stride),
            box=(config.block_k, config.block_m, 1),
            swizzle=Swizzle.of_row_bytes(config.block_k),
        ),
        gpu,
    )


@lru_cache(maxsize=1024)
def _map_of_weights(
    config: GroupedProductConfig,
    gpu: Gpu | None,
    address: int,
    num_experts: int,
    num_columns: int,
    num_values: int,
) -> CppStruct:
    """A box is a k-block of 128 columns of y, which are rows of a matrix. Behind a matrix is
    zero."""
    return _encoded(
        TensorMapSpec(
            DataType.UINT8,
            address,
            dims=(num_values, num_columns, num_experts),
            strides=(num_values, num_columns * num_values),
            box=(config.block_k, K_GROUP, 1),
            swizzle=Swizzle.of_row_bytes(config.block_k),
        ),
        gpu,
    )


@lru_cache(maxsize=1024)
def _map_of_columns(
    config: GroupedProductConfig,
    gpu: Gpu | None,
    address: int,
    num_blocks: int,
    num_columns: int,
) -> CppStruct:
    """A box is a block of rows of 128 columns, each column's values side by side. Behind the last
    column is zero."""
    return _encoded(
        TensorMapSpec(
            DataType.UINT8,
            address,
            dims=(config.block_k, num_columns, num_blocks),
            strides=(config.block_k, num_columns * config.block_k),
            box=(config.block_k, K_GROUP, 1),
            swizzle=Swizzle.of_row_bytes(config.block_k),
        ),
        gpu,
    )


def _encoded(spec: TensorMapSpec, gpu: Gpu | None) -> CppStruct:
    image = spec.encode_emulated() if gpu is None else gpu.encode_tensor_map(spec)
    return TensorMap.from_buffer_copy(image)


def _arch_of(arch: str | None, gpu: Gpu | None, device: torch.device) -> str:
    """The target whose kernel runs."""
    own = products_target().name if gpu is None else gpu.target.name
    target = target_of(own if arch is None else arch)
    if gpu is not None and target.name != own:
        raise ValueError(f"arch must be {own}, that of {device}, or None; got {arch!r}")
    if not target.has_grouped_product:
        raise ValueError(
            f"arch must be {products_target().name}, the only one with this kernel; got "
            f"{target.name}"
        )
    return target.name


def _check(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    weight: torch.Tensor,
    weight_sf: torch.Tensor,
    expert_count: torch.Tensor,
    expert_begin: torch.Tensor | None,
) -> None:
    """Types, shapes and layouts. Nothing here looks at a value."""
    for name, tensor in (("x", x), ("weight", weight)):
        require_type(name, tensor, torch.Tensor, "a tensor")
    if weight.ndim != 3:
        raise ValueError(f"weight must be [experts, N, K]; got shape {tuple(weight.shape)}")
    num_experts, num_columns, num_values = weight.shape
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"weight must have 1 to {MAX_EXPERTS} experts; got {num_experts}")
    if num_columns == 0 or num_columns % COLUMN_ALIGNMENT:
        raise ValueError(
            f"weight must have a positive multiple of {COLUMN_ALIGNMENT} rows in each matrix; "
            f"got {num_columns}"
        )
    if num_values == 0 or num_values % K_GROUP:
        raise ValueError(
            f"weight must have a positive multiple of {K_GROUP} columns in each matrix; "
            f"got {num_values}"
        )
    leading = tuple(x.shape[:-1])
    if expert_begin is None:
        if x.ndim != 3 or x.shape[0] != num_experts:
            raise ValueError(
                f"x must be [{num_experts} experts, rows, K] without expert_begin; "
                f"got shape {tuple(x.shape)}"
            )
    elif x.ndim != 2:
        raise ValueError(f"x must be [rows, K] with expert_begin; got shape {tuple(x.shape)}")
    if x.numel() // num_values > _MAX_ROWS:
        raise ValueError(f"x must have at most 2**30 rows; got {x.numel() // num_values}")
    num_groups = num_values // K_GROUP
    e4m3, device = torch.float8_e4m3fn, x.device
    _require("x", x, e4m3, device, (*leading, num_values))
    _require("x_sf", x_sf, torch.float32, device, (*leading, num_groups))
    _require("weight", weight, e4m3, device, weight.shape)
    scale_shape = (num_experts, -(-num_columns // K_GROUP), num_groups)
    _require("weight_sf", weight_sf, torch.float32, device, scale_shape)
    _require("expert_count", expert_count, torch.int32, device, (num_experts,))
    _check_rows(x)
    contiguous = {"weight": weight, "weight_sf": weight_sf, "expert_count": expert_count}
    if expert_begin is not None:
        _require("expert_begin", expert_begin, torch.int32, device, (num_experts,))
        contiguous["expert_begin"] = expert_begin
    for name, tensor in contiguous.items():
        check_contiguous(name, tensor)
    check_start("x", x, _ALIGNMENT)
    check_start("weight", weight, _ALIGNMENT)


def _check_rows(x: torch.Tensor) -> None:
    is_even = x.ndim == 2 or x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    if not x.is_contiguous() and (x.stride(-1) != 1 or x.stride(-2) % _ALIGNMENT or not is_even):
        raise ValueError(
            f"x must have contiguous rows, evenly spaced by a multiple of {_ALIGNMENT} bytes; got "
            f"strides {x.stride()}"
        )


def _require(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, ...] | torch.Size,
) -> None:
    require_type(name, tensor, torch.Tensor, "a tensor")
    check_dense(name, tensor)
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}; got {tensor.dtype}")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}; got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, as x is; got {tensor.device}")
    check_memory(name, tensor)
