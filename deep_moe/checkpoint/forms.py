"""The formats of weights that checkpoints are known to hold: `FORM` of each format's folder."""

from __future__ import annotations

import torch

from deep_moe.errors import CheckpointError
from deep_moe.formats.sizes import SIZE_UNIT
from deep_moe.weights import WEIGHTS, folder_module
from deep_moe.weights.stored_form import StoredForm

# Tensors that change what weights mean or how they are multiplied, by a part of their names: why
# they are not ignored by the formats that do not have them among their own.
FOREIGN = {
    "scale_2": "a second scale, as NVFP4 has it",
    "global_scale": "a second scale, as NVFP4 has it",
    "zero_point": "weights are not symmetric around zero",
    "zeros": "weights are not symmetric around zero",
    "g_idx": "columns are not in their order",
    "input_scale": "tokens have a scale of their own; kernels here find it",
}

FORMS: tuple[type[StoredForm], ...] = tuple(
    folder_module(name, "checkpoint").FORM for name in WEIGHTS
)


def form_with(dtype: torch.dtype) -> type[StoredForm] | None:
    """The format whose weights are of this type."""
    return next((form for form in FORMS if dtype in form.dtypes), None)


def check_sizes(intermediate: int, hidden: int) -> None:
    if intermediate % SIZE_UNIT or hidden % SIZE_UNIT or not intermediate or not hidden:
        raise CheckpointError(
            f"hidden and intermediate sizes must be positive multiples of {SIZE_UNIT}; the "
            f"checkpoint has {hidden} and {intermediate}"
        )
