"""Which weights SGLang's methods load, and how they keep them.

A method is known by the name of its class, as vLLM's are, or of one that it is made from. With
compressed-tensors a layer's method only passes on to its scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from deep_moe.formats.sizes import K_BLOCK
from deep_moe.weights.int4.checkpoint import StoredAwq

from ..engine_form import EngineForm, of_format
from ..unsupported import UnsupportedError

# Of MXFP4, and of FP8 with scales of blocks: values, then scales, as `ServedExperts` takes them.
TENSORS = ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv")

_PLAIN = {"weight": "_weight"}
_SCALED = _PLAIN | {"scale": "_weight_scale"}
_INVERSE = _PLAIN | {"scale": "_weight_scale_inv"}
_PACKED = {"weight": "_weight_packed", "scale": "_weight_scale"}
_MULTIPLIED = _SCALED | {"global_scale": "_weight_scale_2"}
_DIVIDED = _PACKED | {"global_scale": "_weight_global_scale"}
_COLUMNS_FIRST = {"weight": "_qweight", "scale": "_scales", "zeros": "_qzeros"}

# Beside FP8 weights whose scales are not of blocks.
_WHOLE_TOKENS: dict[str, Any] = {"token_format": "fp8_token", "token_suffix": "_input_scale"}


def form_of(experts: Any) -> EngineForm | None:
    """How SGLang keeps a layer's weights. None: as `TENSORS`, or in a way that is not known."""
    method = _method_of(experts)
    for kind in type(method).__mro__:
        make = _FORMS.get(kind.__name__)
        if make is not None:
            form = make(method)
            is_up_first = getattr(experts.quant_method, "load_up_proj_weight_first", False)
            return replace(form, is_up_first=True) if form and is_up_first else form
    return None


def check_supported(experts: Any) -> None:
    """Raise UnsupportedError for weights that mean something else than their form says."""
    method, form = _method_of(experts), form_of(experts)
    if form is None or form.weights != "int4":
        return
    config = getattr(method, "quant_config", None)
    size = getattr(method, "group_size", None)
    if form.stored is StoredAwq:
        size = getattr(config, "group_size", None)
    for is_unsupported, reason in (
        (
            getattr(method, "num_bits", 4) != 4,
            f"integers have {getattr(method, 'num_bits', 4)} bits",
        ),
        (
            not getattr(method, "sym", True) or getattr(config, "zero_point", False),
            "integers have zero points",
        ),
        (
            getattr(method, "strategy", "group") != "group" or size not in (None, 32, 128),
            f"integers have a scale for each {getattr(method, 'strategy', 'group')} of {size} "
            "values, not for each group of 32 or 128",
        ),
        (getattr(method, "actorder", None) in ("group", "dynamic"), "columns are in another order"),
    ):
        if is_unsupported:
            raise UnsupportedError(reason)


def group_size_of(experts: Any) -> int | None:
    """Of values that share a scale, if the layer's method has such groups."""
    size: int | None = getattr(_method_of(experts), "group_size", None)
    return size


def _method_of(experts: Any) -> Any:
    return getattr(experts, "scheme", None) or getattr(experts, "quant_method", None)


def _always(
    weights: str, suffixes: Mapping[str, str], **more: Any
) -> Callable[[Any], EngineForm | None]:
    form = of_format(weights, suffixes, **more)
    return lambda method: form


def _fp8(method: Any) -> EngineForm | None:
    """quant_method "fp8" and "mxfp8"."""
    if method.use_mxfp8:
        return of_format("mxfp8", _INVERSE)
    if method.block_quant or method.is_fp4_expert:
        return None
    if not method.quant_config.is_checkpoint_fp8_serialized:
        return None  # SGLang quantizes BF16 weights
    return of_format("fp8", _SCALED, **_WHOLE_TOKENS)


def _compressed_fp8(scheme: Any) -> EngineForm:
    if scheme.block_quant:
        return of_format("fp8", _SCALED, rows_of_scale=K_BLOCK)
    return of_format("fp8", _SCALED, **_WHOLE_TOKENS)


_FORMS: dict[str, Callable[[Any], EngineForm | None]] = {
    "UnquantizedFusedMoEMethod": _always("bf16", _PLAIN),
    "Fp8MoEMethod": _fp8,
    "ModelOptFp8MoEMethod": _always("fp8", _SCALED, **_WHOLE_TOKENS),
    "ModelOptNvFp4FusedMoEMethod": _always("nvfp4", _MULTIPLIED),
    "W4AFp8MoEMethod": _always("int4", _INVERSE, scale_dtype=torch.bfloat16),
    "CompressedTensorsW8A8Fp8MoE": _compressed_fp8,
    "CompressedTensorsW4A4Nvfp4MoE": _always("nvfp4", _DIVIDED),
    "CompressedTensorsW4A16Nvfp4MoE": _always("nvfp4", _DIVIDED),
    "CompressedTensorsWNA16MoE": _always("int4", _PACKED, is_transposed=True),
    "CompressedTensorsW4AFP8MoE": _always("int4", _PACKED, scale_dtype=torch.bfloat16),
    "AWQMoEScheme": lambda method: EngineForm(StoredAwq, _COLUMNS_FIRST, is_transposed=True),
    "QuarkW8A8FP8MoE": _always("fp8", _SCALED, **_WHOLE_TOKENS),
}
