"""What engines keep of a layer's experts, as weights: every form and order of rows, and what is no
such form, refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deep_moe.integrations.engine_form import (
    EngineForm,
    check_known,
    in_engines_words,
    of_format,
    own_tensors,
)
from deep_moe.integrations.unsupported import UnsupportedError
from deep_moe.weights import weight_format
from deep_moe.weights.int4.checkpoint import StoredAwq

from ..checkpoint.written import (
    Written,
    columns_first,
    fp8_blocks,
    fp8_whole,
    int4,
    mxfp8,
    nvfp4,
)

ROWS, COLUMNS = 256, 384
_SCALED = {"weight": "_weight", "scale": "_weight_scale"}
_PACKED = {"weight": "_weight_packed", "scale": "_weight_scale"}
_COLUMNS_FIRST = ("GPTQ", "AWQ")
# Format, the suffixes of an engine's names, who writes a matrix.
FORMS: dict[str, tuple[str, dict[str, str], Callable[[int, int], Written]]] = {
    "NVFP4": (
        "nvfp4",
        _SCALED | {"global_scale": "_weight_scale_2"},
        lambda *size: nvfp4(*size, is_divided=False),
    ),
    "NVFP4, divided": (
        "nvfp4",
        _PACKED | {"global_scale": "_weight_global_scale"},
        lambda *size: nvfp4(*size, is_divided=True),
    ),
    "INT4": ("int4", _PACKED, lambda *size: int4(*size, 32, is_twos_complement=False)),
    "INT4, 128": ("int4", _PACKED, lambda *size: int4(*size, 128, is_twos_complement=False)),
    "GPTQ": (
        "int4",
        {"weight": "_qweight", "scale": "_scales", "zeros": "_qzeros"},
        lambda *size: columns_first(*size, is_awq=False),
    ),
    "AWQ": (
        "int4",
        {"weight": "_qweight", "scale": "_scales", "zeros": "_qzeros"},
        lambda *size: columns_first(*size, is_awq=True),
    ),
    "MXFP8": ("mxfp8", _SCALED, lambda *size: mxfp8(*size, ".weight_scale", {})),
    "FP8, blocks": ("fp8", _SCALED, lambda *size: fp8_blocks(*size, is_modelopt=False)),
    "FP8, rows": ("fp8", _SCALED, lambda rows, columns: fp8_whole(rows, columns, (rows, 1), {})),
    "FP8, matrices": ("fp8", _SCALED, lambda *size: fp8_whole(*size, (), {})),
}
ORDERS: dict[str, dict[str, bool]] = {
    "gate first": {},
    "up first": {"is_up_first": True},
    "in turn": {"is_interleaved": True},
}


def stacked(gate: torch.Tensor, up: torch.Tensor, order: dict[str, bool], axis: int) -> Any:
    """As an engine keeps two matrices of one expert: [1, ...]."""
    if gate.dim() == 0 or gate.numel() == 1:  # which engines keep in the order gate, up
        return torch.stack([gate.flatten()[0], up.flatten()[0]])[None]
    if order.get("is_interleaved"):
        return torch.stack([gate, up], axis + 1).flatten(axis, axis + 1)[None]
    pair = (up, gate) if order.get("is_up_first") else (gate, up)
    return torch.cat(pair, axis)[None]


def form_and_tensors(
    name: str, order: dict[str, bool]
) -> tuple[EngineForm, list[torch.Tensor], torch.Tensor]:
    """A form, what an engine has of one expert, and the values, float64 [rows, columns]."""
    weights, suffixes, write = FORMS[name]
    torch.manual_seed(3)
    gate, up = write(ROWS, COLUMNS), write(ROWS, COLUMNS)
    has_columns_first = name in _COLUMNS_FIRST
    if name == "AWQ":
        form = EngineForm(StoredAwq, suffixes, is_transposed=True, **order)
    else:
        form = of_format(weights, suffixes, is_transposed=has_columns_first, **order)
    tensors = []
    for suffix in suffixes.values():
        own = [written.tensors[suffix.replace("_", ".", 1)] for written in (gate, up)]
        tensors.append(stacked(*own, order, axis=1 if has_columns_first else 0))
    return form, tensors, torch.cat([gate.values, up.values])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FORMS)
def test_weights_mean_what_the_checkpoint_says(name: str, order: str) -> None:
    if order == "in turn" and name in ("FP8, blocks", *_COLUMNS_FIRST):
        pytest.skip("no engine keeps these so: blocks of rows, and eight columns in a word")
    form, tensors, values = form_and_tensors(name, ORDERS[order])
    assert form.size_of(tensors[0]) == (2 * ROWS, COLUMNS)
    made = form.weights_of("w13", tensors, 2)
    keys = [tensor[0] for tensor in made if tensor is not None]
    found = weight_format(form.weights).dequantize(tuple(keys), 2)
    # Scales in float16 become bfloat16.
    rtol = 2**-8 if name in _COLUMNS_FIRST else 1e-6
    torch.testing.assert_close(found, values, rtol=rtol, atol=0)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_scales_of_matrices_stand_in_the_order_of_gate_and_up(shape: tuple[int, ...]) -> None:
    form, tensors, values = form_and_tensors("NVFP4", ORDERS["up first"])
    tensors[2] = tensors[2].reshape(1, *shape)
    made = form.weights_of("w13", tensors, 2)
    found = weight_format(form.weights).dequantize(tuple(tensor[0] for tensor in made), 2)
    torch.testing.assert_close(found, values, rtol=1e-6, atol=0)


def test_scales_of_rows_in_one_dimension_come_with_their_rows() -> None:
    form, (weight, scale), values = form_and_tensors("FP8, rows", ORDERS["up first"])
    made = form.weights_of("w13", [weight, scale.squeeze(2)], 2)
    found = weight_format(form.weights).dequantize(tuple(tensor[0] for tensor in made), 2)
    torch.testing.assert_close(found, values, rtol=1e-6, atol=0)


def test_scales_are_narrowed_to_the_type_of_checkpoints() -> None:
    form, (weight, scale), values = form_and_tensors("INT4, 128", {})
    form = of_format("int4", _PACKED, scale_dtype=torch.bfloat16)
    made = form.weights_of("w13", [weight, scale.float()], 2)
    assert made.sf.dtype == torch.bfloat16
    found = weight_format("int4").dequantize((made.weight[0], made.sf[0]), 2)
    assert torch.equal(found, values)
    odd = scale.float()
    odd[0, 5, 1] = 0.1
    with pytest.raises(ValueError, match=r"^w13_weight_scale must hold numbers .* in row 5$"):
        form.weights_of("w13", [weight, odd], 2)
    for other in (scale.half(), scale.long(), scale.double()):
        with pytest.raises(ValueError, match=r"^w13_weight_scale must be torch.bfloat16 or "):
            form.weights_of("w13", [weight, other], 2)


def test_more_dimensions_are_refused_by_name() -> None:
    form, (weight, scale), _ = form_and_tensors("FP8, blocks", {})
    for tensors, name in (([weight, scale[None]], "scale"), ([weight[None], scale], "")):
        with pytest.raises(ValueError, match=rf"^w13_weight_?{name} must have at most two dim"):
            form.weights_of("w13", tensors, 2)


@pytest.mark.parametrize("name", FORMS)
def test_made_up_weights_are_numbers(name: str) -> None:
    form, tensors, _ = form_and_tensors(name, {})
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(0xFF)
    made = form.weights_of("w13", tensors, 2, are_made_up=True)
    keys = [tensor[0] for tensor in made if tensor is not None]
    assert weight_format(form.weights).dequantize(tuple(keys), 2).isfinite().all()


def module_of(**tensors: torch.Tensor | None) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        parameter = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
        module.register_parameter(name, parameter)
    return module


def test_tensors_that_may_change_what_others_mean_are_refused_by_name() -> None:
    known = ("w13_weight", "w2_weight")
    module = module_of(w13_weight=torch.ones(2), w2_weight=torch.ones(2), w2_perm=None)
    module.register_buffer("w2_input_scale", torch.ones(2))
    module.register_buffer("other", torch.ones(2))
    check_known(module, known)
    module.register_buffer("w2_weight_zero_point", torch.ones(2))
    with pytest.raises(UnsupportedError, match="w2_weight_zero_point"):
        check_known(module, known)


def test_tensors_without_values_are_refused_by_name() -> None:
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)
    module = module_of(a=torch.ones(2), b=None, c=torch.ones(2, device="meta"), d=freed)
    module.register_parameter("e", torch.nn.Parameter(torch.ones(0, 3)))
    module.f = "ones"
    assert own_tensors(module, ["a"])["a"].tolist() == [1, 1]
    for name, words in (
        ("b", "there is no tensor b"),
        ("c", "c must hold values"),
        ("d", "d must have a storage that holds its values"),
        ("e", r"e is empty, of shape \[0, 3\]"),
        ("f", "there is no tensor f"),
        ("g", "there is no tensor g"),
    ):
        with pytest.raises(UnsupportedError, match=rf"^{words}"):
            own_tensors(module, ["a", name])


def test_reasons_have_the_engines_names() -> None:
    names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    reason = "expert 0: l1_weights[1] and l2[0] must be as l2_weights[1]"
    assert in_engines_words(reason, names) == (
        "expert 0: w13_weight_scale and w2_weight must be as w2_weight_scale"
    )
    assert in_engines_words(reason, ()) == reason
