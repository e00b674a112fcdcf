"""The formats of weights that checkpoints are known to hold: `FORMS` of each format's folder."""

from __future__ import annotations

from deep_moe.errors import CheckpointError
from deep_moe.formats.sizes import SIZE_UNIT
from deep_moe.weights import WEIGHTS, optional_module
from deep_moe.weights.layers import LayerWeights
from deep_moe.weights.stored_form import StoredForm, Tensors

# Tensors that change what weights mean or how they are multiplied, by a part of their names: why
# they are not ignored by the formats that do not have them among their own.
FOREIGN = {
    "scale_2": "a second scale, as NVFP4 has it",
    "global_scale": "a second scale, as NVFP4 has it",
    "zero_point": "weights are not symmetric around zero",
    "zeros": "weights are not symmetric around zero",
    "g_idx": "columns are not in their order",
    "input_scale": "tokens have a scale of their own; kernels here find it",
    "pre_quant_scale": "tokens are multiplied by it",
    "svdquant_lora": "a product of low rank is added",
}

FORMS: tuple[type[StoredForm], ...] = tuple(
    form
    for module in (optional_module(name, "checkpoint") for name in WEIGHTS)
    if module is not None
    for form in module.FORMS
)


def form_of(layer: LayerWeights) -> type[StoredForm] | None:
    """The form in which a layer's weights are saved, by their types: of several the last, for a
    format that is a special case of another stands behind it in `WEIGHTS`."""
    return next((form for form in reversed(FORMS) if form.holds(layer)), None)


def form_like(tensors: Tensors, first: type[StoredForm]) -> type[StoredForm] | None:
    """The form that has such tensors of a matrix, by their types; `first`, if it is one of them."""

    def has(form: type[StoredForm]) -> bool:
        return form.dtypes.keys() == tensors.keys() and all(
            tensors[key].dtype in own for key, own in form.dtypes.items()
        )

    return next((form for form in (first, *FORMS) if has(form)), None)


def check_sizes(name: str, intermediate: int, hidden: int) -> None:
    """name: of the tensor that has them."""
    if intermediate % SIZE_UNIT or hidden % SIZE_UNIT or not intermediate or not hidden:
        raise CheckpointError(
            f"{name} must have hidden and intermediate sizes that are positive multiples of "
            f"{SIZE_UNIT}; it has {hidden} and {intermediate}"
        )
