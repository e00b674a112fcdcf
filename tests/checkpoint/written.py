"""Matrices as exporters store them, written byte by byte from codes, beside the numbers that they
stand for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Written(NamedTuple):
    """tensors: by suffix. values: float64 [rows, columns]. config: quantization_config."""

    tensors: dict[str, torch.Tensor]
    values: torch.Tensor
    config: dict[str, Any]


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


def compressed(**weights: Any) -> dict[str, Any]:
    """One group for all modules."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Two in a byte, the even one in the lower half."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def grouped(scales: torch.Tensor, size: int) -> torch.Tensor:
    return scales.double().repeat_interleave(size, 1)


def nvfp4(rows: int, columns: int, *, is_divided: bool, is_static: bool = False) -> Written:
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (rows, columns // 16), dtype=torch.uint8)
    scales = scales.view(torch.float8_e4m3fn)
    values = E2M1.double()[codes.long()] * grouped(scales.float(), 16)
    scale = torch.rand(()) * 1e-3 + 1e-4
    if is_divided:
        scale = 1 / scale
        tensors = {
            ".weight_packed": packed(codes),
            ".weight_scale": scales,
            ".weight_global_scale": scale.reshape(1),
        }
        if is_static:
            tensors[".input_global_scale"] = torch.rand(1)
        config = compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16)
        return Written(tensors, values / scale.double(), config)
    tensors = {".weight": packed(codes), ".weight_scale": scales, ".weight_scale_2": scale}
    if is_static:
        tensors[".input_scale"] = torch.rand(())
    return Written(tensors, values * scale.double(), modelopt("NVFP4", group_size=16))


def int4(rows: int, columns: int, group_size: int, *, is_twos_complement: bool) -> Written:
    numbers = torch.randint(-8, 8, (rows, columns))
    scales = (torch.rand(rows, columns // group_size) * 0.1).bfloat16()
    values = numbers.double() * grouped(scales.double(), group_size)
    if is_twos_complement:
        tensors = {
            ".weight": packed((numbers & 15).byte()).view(torch.int8),
            ".weight_scale_inv": scales,
            ".input_scale": torch.rand(1).bfloat16(),
        }
        return Written(tensors, values, {"quant_method": "w4afp8", "group_size": group_size})
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for place in range(8):
        words |= (numbers[:, place::8] + 8) << (4 * place)
    tensors = {
        ".weight_packed": words.int(),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor([rows, columns]),
    }
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size}
    return Written(tensors, values, compressed(**args, symmetric=True, actorder=None))


def packed_words(codes: torch.Tensor) -> torch.Tensor:
    """Eight along the last axis in each int32, the first in the lowest bits."""
    words = torch.zeros_like(codes[..., ::8], dtype=torch.int64)
    for place in range(8):
        words |= codes[..., place::8].long() << (4 * place)
    return words.int()


def columns_first(rows: int, columns: int, *, is_awq: bool, has_order: bool = False) -> Written:
    """INT4 of GPTQ or AWQ, groups of 128. has_order: with the groups of columns."""
    numbers = torch.randint(-8, 8, (rows, columns))
    scales = (torch.rand(rows, columns // 128) * 0.1 + 1e-3).half()
    values = numbers.double() * grouped(scales.double(), 128)
    codes = numbers + 8
    if is_awq:
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
        qweight = packed_words(codes.t().unflatten(1, (-1, 8))[..., order].flatten(1))
    else:
        qweight = packed_words(codes).t()
    zeros = torch.full((columns // 128, rows), 8 if is_awq else 7)
    tensors = {".qweight": qweight, ".qzeros": packed_words(zeros), ".scales": scales.t()}
    if has_order:
        tensors[".g_idx"] = torch.arange(columns, dtype=torch.int32) // 128
    config: dict[str, Any] = {"bits": 4, "group_size": 128}
    if is_awq:
        config |= {"quant_method": "awq", "version": "gemm", "zero_point": False}
    else:
        config |= {"quant_method": "gptq", "sym": True, "desc_act": False}
    return Written(tensors, values, config)


def quark(written: Written, **weight: Any) -> Written:
    """The same tensors with a config of AMD Quark."""
    config = {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"is_dynamic": False, **weight}, "bias": None},
        "layer_quant_config": {"*self_attn*": {"weight": {"dtype": "int8"}}},
        "exclude": ["lm_head", "re:.*mlp.gate"],
    }
    return written._replace(config=config)


def mxfp4(rows: int, columns: int, suffix: str = ".weight") -> Written:
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    scales = torch.randint(115, 125, (rows, columns // 32), dtype=torch.uint8)
    values = E2M1.double()[codes.long()] * grouped(torch.exp2(scales.double() - 127), 32)
    args = {"num_bits": 4, "type": "float", "group_size": 32}
    return Written({suffix: packed(codes), ".weight_scale": scales}, values, compressed(**args))


def e4m3(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns) * 50).to(torch.float8_e4m3fn)


def mxfp8(rows: int, columns: int, suffix: str, config: dict[str, Any]) -> Written:
    weight = e4m3(rows, columns)
    scales = torch.randint(115, 125, (rows, columns // 32), dtype=torch.uint8)
    factors = torch.exp2(scales.double() - 127)
    tensors = {".weight": weight, suffix: scales}
    return Written(tensors, weight.double() * grouped(factors, 32), config)


def fp8_whole(
    rows: int,
    columns: int,
    shape: tuple[int, ...],
    config: dict[str, Any],
    dtype: torch.dtype = torch.float32,
) -> Written:
    """With a scale for each row or one for all, in a tensor of this shape."""
    weight = e4m3(rows, columns)
    scale = (torch.rand(shape) * 1e-3 + 1e-4).to(dtype)
    factors = scale.double().reshape(-1, 1)
    tensors = {".weight": weight, ".weight_scale": scale}
    if not shape:
        tensors[".input_scale"] = torch.rand(())
    return Written(tensors, weight.double() * factors, config)


def fp8_blocks(rows: int, columns: int, *, is_modelopt: bool) -> Written:
    weight = e4m3(rows, columns)
    scale = torch.rand(-(-rows // 128), -(-columns // 128)) * 1e-3 + 1e-4
    factors = scale.double().repeat_interleave(128, 0)[:rows]
    values = weight.double() * factors.repeat_interleave(128, 1)[:, :columns]
    if is_modelopt:
        tensors = {".weight": weight, ".weight_scale": scale[:, None, :, None]}
        return Written(tensors, values, modelopt("FP8_PB_WO"))
    tensors = {".weight": weight, ".weight_scale": scale.bfloat16()}
    values = (
        weight.double()
        * scale.bfloat16()
        .double()
        .repeat_interleave(128, 0)[:rows]
        .repeat_interleave(128, 1)[:, :columns]
    )
    args = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    return Written(tensors, values, compressed(**args))
