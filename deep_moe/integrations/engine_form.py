"""`EngineForm`: how an engine keeps the weights of a layer's experts until they are laid out.

An engine loads what checkpoints store, of all local experts in one tensor, with gate above up. So
what a tensor means is what the format's `StoredForm` says of one matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.errors import CheckpointError
from deep_moe.tensor_memory import check_memory
from deep_moe.weights import folder_module
from deep_moe.weights.layers import LayerWeights
from deep_moe.weights.stored_form import StoredForm, Suffixes

from .unsupported import UnsupportedError

if TYPE_CHECKING:
    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName

LAYERS = ("w13", "w2")
# What may lie beside weights without changing them: scales of tokens, which the kernel makes
# itself; sizes; biases, of which adapters ask whether any were loaded; scales in an order of the
# engine's, and an order of columns, of which a loader tells whether it was loaded.
_HARMLESS = (
    *("_input_scale", "_input_scale_2", "_input_global_scale", "_weight_shape", "_bias"),
    *("_blockscale_swizzled", "_weight_g_idx", "_g_idx_sort_indices"),
)

# In place of scales that were made up: of UE8M0 2^-7, as engines make them up, and of others about
# as small, so that products of any values are finite.
_MADE_UP_BYTE, _MADE_UP = 120, 2.0**-7


@dataclass(frozen=True)
class EngineForm:
    """stored: what the tensors of a matrix are. suffixes: of the parameters' names behind "w13" and
    "w2", by the keys of `stored`. token_format: of tokens that must go with them, None for what the
    format says. rows_of_scale: that share scales, so that gate must have a multiple of them.
    is_interleaved: rows of gate and up alternate. has_biases: in "w13_bias" and "w2_bias".
    token_suffix: behind "w13", of the scales of tokens that checkpoints may have; None if no kernel
    takes any."""

    stored: type[StoredForm]
    suffixes: Suffixes
    token_format: TokenFormatName | None = None
    rows_of_scale: int = 1
    is_interleaved: bool = False
    is_up_first: bool = False
    is_transposed: bool = False
    scale_dtype: torch.dtype | None = None
    has_biases: bool = False
    token_suffix: str | None = None

    @property
    def weights(self) -> WeightsName:
        """The format's name."""
        return self.stored.weights

    def tensors_of(self, layer: str) -> tuple[str, ...]:
        """Names of the parameters that hold a layer's weights, by the order of the keys."""
        return tuple(layer + suffix for suffix in self.suffixes.values())

    @property
    def weight_tensors(self) -> tuple[str, ...]:
        """Of both layers."""
        return tuple(name for layer in LAYERS for name in self.tensors_of(layer))

    @property
    def tensors(self) -> tuple[str, ...]:
        """Of both layers, and of biases: what must have been loaded."""
        return (*self.weight_tensors, *self.biases)

    @property
    def kernel_tensors(self) -> tuple[str, ...]:
        """Names of those whose memory the kernel's tensors take, in the order of
        `ServedExperts.tensors`: values and scales of both layers, then biases."""
        of_layers = tuple(name for layer in LAYERS for name in self.tensors_of(layer)[:2])
        return (*of_layers, *self.biases)

    @property
    def token_scales(self) -> str | None:
        """Name of the parameter that holds a checkpoint's scales of tokens."""
        return None if self.token_suffix is None else LAYERS[0] + self.token_suffix

    def token_scale_of(self, module: torch.nn.Module) -> torch.Tensor:
        """That of all tokens which come to a layer: the largest in its `token_scales`, float32 [1]
        on a CPU, by which values of quantized tokens are multiplied. A token is quantized before it
        is known who gets it.

        Raises UnsupportedError for what is no positive number.
        """
        assert self.token_scales is not None
        (scales,) = own_tensors(module, [self.token_scales]).values()
        if scales.dtype != torch.float32:
            raise UnsupportedError(f"{self.token_scales} must be torch.float32; got {scales.dtype}")
        try:
            factors = [
                self.stored.token_factor(self.token_scales, scale)
                for scale in scales.cpu().flatten().unsqueeze(1)
            ]
        except CheckpointError as error:
            raise UnsupportedError(str(error)) from None
        return torch.cat(factors).amax(dim=0, keepdim=True)

    def size_of(self, weight: torch.Tensor) -> tuple[int, int]:
        """Rows and columns of one expert's values, by the tensor of all experts, which has three
        dimensions."""
        rows, columns = weight.shape[:0:-1] if self.is_transposed else weight.shape[1:]
        num_values = self.stored.values_per_element
        if self.stored.packs_rows:
            return rows * num_values, columns
        return rows, columns * num_values

    @property
    def biases(self) -> tuple[str, ...]:
        """Names of the parameters that hold biases."""
        return tuple(f"{layer}_bias" for layer in LAYERS) if self.has_biases else ()

    def weights_of(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        num_matrices: int,
        *,
        are_made_up: bool = False,
    ) -> LayerWeights:
        """One expert's weights of a layer, as `transform_weights_for_mega_moe` takes them.

        name: of the layer, for errors. tensors: [1, ...], by the order of the keys. num_matrices:
        one below the other, 2 with a gate. are_made_up: not loaded from anywhere, so that scales
        need not be numbers.

        Raises ValueError for what is not of this form.
        """
        keys = dict(zip(self.suffixes, tensors, strict=True))
        if are_made_up:
            keys = {key: self._numbers(key, tensor) for key, tensor in keys.items()}
        labels = {key: f"{name}{suffix}" for key, suffix in self.suffixes.items()}
        try:
            matrices = [self._matrix(keys, i, num_matrices, labels) for i in range(num_matrices)]
            form = self.stored.of(labels, matrices[0])
            num_rows = matrices[0]["weight"].shape[0]
            num_columns = matrices[0]["weight"].shape[1] * form.values_per_element
            made = form.empty(
                1, num_matrices * num_rows, num_columns, tensors[0].device, num_matrices
            )
            parts = zip(*(own[0].tensor_split(num_matrices) for own in made), strict=True)
            for matrix, part in zip(matrices, parts, strict=True):
                plain = matrix if type(form) is self.stored else form.plain(matrix)
                form.check(labels, plain, num_rows, num_columns)
                form.put(labels, plain, LayerWeights(*part))
        except CheckpointError as error:
            raise ValueError(str(error)) from error
        return made

    def _matrix(
        self,
        tensors: Mapping[str, torch.Tensor],
        index: int,
        num_matrices: int,
        labels: Mapping[str, str],
    ) -> Mapping[str, torch.Tensor]:
        """One of an expert's matrices."""
        own = {}
        for key, tensor in tensors.items():
            whole = tensor[0]
            if whole.dim() > 2:
                raise CheckpointError(
                    f"{labels[key]} must have at most two dimensions of each expert; got shape "
                    f"{[*whole.shape]}"
                )
            if self.is_transposed and whole.dim() == 2:
                whole = whole.t()
            if key == "scale" and self.scale_dtype is not None:
                whole = _narrowed(labels[key], whole, self.scale_dtype)
            # Not of scales of matrices, which engines keep in the order gate, up.
            has_rows = whole.dim() > 0 and whole.shape[0] > num_matrices
            place = num_matrices - 1 - index if self.is_up_first and has_rows else index
            if num_matrices > 1 and self.is_interleaved:
                own[key] = whole[place::num_matrices]
            else:
                own[key] = whole.tensor_split(num_matrices)[place] if whole.dim() else whole
        if self.stored.has_columns_first:
            own = {key: tensor.t() for key, tensor in own.items()}
        return self.stored.plain(own)

    def _numbers(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Something that stands for numbers, of the same type."""
        if key in self.stored.constants:
            return torch.full_like(tensor, self.stored.constants[key])
        if key == "weight":
            if tensor.dtype != torch.float8_e4m3fn:
                return tensor
            codes = tensor.view(torch.uint8)
            return codes.masked_fill(codes & 0x7F == 0x7F, 0).view(tensor.dtype)
        if tensor.dtype in (torch.uint8, torch.float8_e8m0fnu):
            filled = torch.full_like(tensor.view(torch.uint8), _MADE_UP_BYTE)
            return filled.view(tensor.dtype)
        return torch.full(tensor.shape, _MADE_UP, device=tensor.device).to(tensor.dtype)


def in_engines_words(reason: str, tensors: Sequence[str]) -> str:
    """A reason that speaks of l1[1] or l1_weights[1], with the engine's names. tensors: of both
    layers, as many of each.

    >>> in_engines_words("l2[1] must be float32", ["w13", "w13_scale", "w2", "w2_scale"])
    'w2_scale must be float32'
    """
    num_tensors = len(tensors) // 2
    for place, name in enumerate(tensors):
        layer, index = divmod(place, num_tensors)
        for word in ("", "_weights"):
            reason = reason.replace(f"l{layer + 1}{word}[{index}]", name)
    return reason


def check_known(module: torch.nn.Module, tensors: Iterable[str]) -> None:
    """Raise UnsupportedError if a layer has tensors beside those of its form, `tensors`, that may
    change what these mean."""
    known = {*tensors, *(layer + suffix for layer in LAYERS for suffix in _HARMLESS)}
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in known and name.startswith(LAYERS):
            raise UnsupportedError(f"nobody knows what {name} means for the weights")


def own_tensors(module: torch.nn.Module, tensors: Iterable[str]) -> dict[str, torch.Tensor]:
    """Of a layer, by name. Raises UnsupportedError for one that is not there, or has no values."""
    own = {}
    for name in tensors:
        tensor = getattr(module, name, None)
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedError(f"there is no tensor {name}")
        try:
            check_memory(name, tensor)
        except ValueError as error:
            raise UnsupportedError(str(error)) from None
        if not tensor.numel():
            raise UnsupportedError(f"{name} is empty, of shape {[*tensor.shape]}")
        own[name] = tensor.data
    return own


def of_format(weights: str, suffixes: Suffixes, **more: Any) -> EngineForm:
    """The form of a format's tensors that have such suffixes in checkpoints, each with a `.` where
    the parameters' names have a `_`."""
    spelled = {key: suffix.replace("_", ".", 1) for key, suffix in suffixes.items()}
    for stored in folder_module(weights, "checkpoint").FORMS:
        if spelled in stored.spellings:
            if stored.token_scale is not None:
                more = {"token_suffix": stored.token_scale.replace(".", "_"), **more}
            return EngineForm(stored, suffixes, **more)
    raise ValueError(f"suffixes must be of a spelling of {weights}; got {spelled}")


def _narrowed(name: str, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales in the type that checkpoints have them in, or CheckpointError if they are no numbers
    of it. An engine may hold them in float32."""
    if scales.dtype not in (dtype, torch.float32):
        raise CheckpointError(f"{name} must be {dtype} or torch.float32; got {scales.dtype}")
    made = scales.to(dtype)
    wrong = ((made != scales) & ~scales.isnan()).nonzero()
    if wrong.numel():
        place = tuple(wrong[0].tolist())
        raise CheckpointError(
            f"{name} must hold numbers of {dtype}, as checkpoints have them; got "
            f"{scales[place].item()} in row {place[0]}"
        )
    return made
