"""Which weights vLLM's methods load, and how they keep them.

A method is known by the name of its class: importing that of a format that no model here has may
need packages that are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deep_moe.formats.sizes import K_BLOCK
from deep_moe.weights.int4.checkpoint import StoredAwq

from ..engine_form import EngineForm, of_format
from ..unsupported import UnsupportedError

_PLAIN = {"weight": "_weight"}
_SCALED = _PLAIN | {"scale": "_weight_scale"}
_PACKED = {"weight": "_weight_packed", "scale": "_weight_scale"}
_BLOCKS = _PLAIN | {"scale": "_weight_scale_inv"}
_MULTIPLIED = _SCALED | {"global_scale": "_weight_scale_2"}
_DIVIDED = _PACKED | {"global_scale": "_weight_global_scale"}

_COLUMNS_FIRST = {"weight": "_qweight", "scale": "_scales", "zeros": "_qzeros"}

_BLOCK = [K_BLOCK, K_BLOCK]
# Beside FP8 weights whose scales are not of blocks.
_WHOLE_TOKENS: dict[str, Any] = {"token_format": "fp8_token", "token_suffix": "_input_scale"}


def form_of(engine: Any) -> EngineForm:
    """The form of what a method of vLLM's loads, or UnsupportedError."""
    make = _FORMS.get(type(engine).__name__)
    if make is None:
        raise UnsupportedError(f"weights of {engine.method_name} are not supported")
    return make(engine)


def _always(weights: str, suffixes: Mapping[str, str], **more: Any) -> Callable[[Any], EngineForm]:
    return lambda engine: of_format(weights, suffixes, **more)


def _fp8(engine: Any) -> EngineForm:
    """quant_method "fp8"."""
    if engine.weight_scale_refine is not None:
        raise UnsupportedError("blocks of FP8 weights are cut by tensor parallelism")
    if engine.weight_block_size is None:
        return of_format("fp8", _SCALED, **_WHOLE_TOKENS)
    return _fp8_blocks(engine.weight_block_size, _BLOCKS)


def _fp8_blocks(block: list[int], suffixes: Mapping[str, str]) -> EngineForm:
    if list(block) != _BLOCK:
        raise UnsupportedError(f"FP8 weights have a scale for {block}, not for {_BLOCK}")
    return of_format("fp8", suffixes, rows_of_scale=K_BLOCK)


def _compressed_fp8(engine: Any) -> EngineForm:
    if engine.weight_block_size is not None:
        return _fp8_blocks(engine.weight_block_size, _SCALED)
    return of_format("fp8", _SCALED, **_WHOLE_TOKENS)


def _compressed_int(engine: Any) -> EngineForm:
    args = engine.weight_quant
    _check_int(args.num_bits, args.symmetric, args.strategy, args.group_size)
    for is_unsupported, reason in (
        (args.actorder in ("group", "dynamic"), "columns are in another order"),
        (getattr(engine, "is_transposed", False), "weights are transposed"),
    ):
        if is_unsupported:
            raise UnsupportedError(reason)
    return of_format("int4", _PACKED)


def _gptq(engine: Any) -> EngineForm:
    config = engine.quant_config
    strategy = "group" if config.group_size > 0 else "row"
    _check_int(config.weight_bits, config.is_sym, strategy, config.group_size)
    if config.desc_act:
        raise UnsupportedError("columns are in another order")
    return of_format("int4", _COLUMNS_FIRST, is_transposed=True)


def _awq(engine: Any) -> EngineForm:
    config = engine.quant_config
    strategy = "group" if config.group_size > 0 else "row"
    _check_int(config.weight_bits, not config.zero_point, strategy, config.group_size)
    return EngineForm(StoredAwq, _COLUMNS_FIRST, is_transposed=True)


def _quark_fp8(engine: Any) -> EngineForm:
    if engine.weight_block_size is not None:
        return _fp8_blocks(engine.weight_block_size, _SCALED)
    return of_format("fp8", _SCALED, **_WHOLE_TOKENS)


def _quark_mx(engine: Any) -> EngineForm:
    if engine.weight_dtype != "mxfp4":
        raise UnsupportedError(f"weights are {engine.weight_dtype}, not mxfp4")
    return of_format("mxfp4", _SCALED)


def _check_int(num_bits: int, is_symmetric: bool, strategy: str, group_size: int | None) -> None:
    for is_unsupported, reason in (
        (num_bits != 4, f"integers have {num_bits} bits, not 4"),
        (not is_symmetric, "integers have zero points"),
        (
            strategy != "group" or group_size not in (32, 128),
            f"integers have a scale for each {strategy} of {group_size} values, not for each group "
            "of 32 or 128",
        ),
    ):
        if is_unsupported:
            raise UnsupportedError(reason)


# By class names.
_FORMS: dict[str, Callable[[Any], EngineForm]] = {
    "UnquantizedFusedMoEMethod": _always("bf16", _PLAIN),
    "Mxfp4MoEMethod": _always("mxfp4", _SCALED),
    "GptOssMxfp4MoEMethod": _always("mxfp4", _SCALED, is_interleaved=True, has_biases=True),
    "CompressedTensorsW4A4Mxfp4MoEMethod": _always("mxfp4", _PACKED),
    "CompressedTensorsW4A8Mxfp4MoEMethod": _always("mxfp4", _PACKED),
    "Fp8MoEMethod": _fp8,
    "CompressedTensorsW8A8Fp8MoEMethod": _compressed_fp8,
    "ModelOptFp8MoEMethod": _always("fp8", _SCALED, **_WHOLE_TOKENS),
    "ModelOptMxFp8FusedMoE": _always("mxfp8", _SCALED),
    "CompressedTensorsW8A8Mxfp8MoEMethod": _always("mxfp8", _SCALED),
    "ModelOptNvFp4FusedMoE": _always("nvfp4", _MULTIPLIED),
    "CompressedTensorsW4A4Nvfp4MoEMethod": _always("nvfp4", _DIVIDED),
    "CompressedTensorsWNA16MoEMethod": _compressed_int,
    "CompressedTensorsW4A8Fp8MoEMethod": _compressed_int,
    "AutoGPTQMoEMethod": _gptq,
    "AutoAWQMoEMethod": _awq,
    "QuarkW8A8Fp8MoEMethod": _quark_fp8,
    "QuarkOCP_MX_MoEMethod": _quark_mx,
    "QuarkW8A8Mxfp8MoEMethod": _always("mxfp8", _SCALED),
    "QuarkNvfp4MoEMethod": _always("nvfp4", _MULTIPLIED, token_suffix="_input_scale_2"),
    "INCMxfp4MoEMethod": _always("mxfp4", _PACKED),
    "INCMxfp8MoEMethod": _always("mxfp8", _SCALED),
}
