"""Expert weights from safetensors checkpoints, for one rank at a time, and into them.

namings.py has the tensor names of published models, and forms.py the formats of their weights. A
rank opens only files that hold experts of its own, and reads only their bytes.

The number of experts of a layer comes from config.json or from the caller, so missing experts are
noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypedDict, overload

import torch
from safetensors.torch import save_file

from deep_moe.biases.per_expert import MegaMoEBiases
from deep_moe.described import described_as
from deep_moe.devices import named_device
from deep_moe.errors import CheckpointError
from deep_moe.heuristics.shape import MAX_SHARED_EXPERTS, require_int
from deep_moe.tensor_memory import check_memory
from deep_moe.weights import weight_format
from deep_moe.weights.layers import ExpertWeights, LayerTensors, LayerWeights, MegaMoEWeights
from deep_moe.weights.transform import empty_weights_for_mega_moe, transform_weights_for_mega_moe

from .files import Files, listed
from .forms import FORMS, form_of
from .layer import Layer, find_layer, in_matrices
from .namings import DEFAULT_NAMING, ExpertNaming, NamingName, StackedNaming
from .saving import Saving

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from deep_moe.tokens import TokenFormatName


class _LoadOptions(TypedDict, total=False):
    num_experts: int | None
    rank_idx: int
    num_ranks: int
    experts: Sequence[int] | None
    naming: NamingName | ExpertNaming | StackedNaming | None
    num_shared_experts: int
    biases_apart: bool
    arch: str | None
    token_format: TokenFormatName | None
    requantize: bool
    device: torch.device | str


@overload
def load_experts(
    path: str | Path, layer: int, *, transformed: Literal[True], **options: Unpack[_LoadOptions]
) -> MegaMoEWeights: ...
@overload
def load_experts(
    path: str | Path,
    layer: int,
    *,
    transformed: Literal[False] = False,
    **options: Unpack[_LoadOptions],
) -> ExpertWeights: ...
def load_experts(
    path: str | Path,
    layer: int,
    *,
    num_experts: int | None = None,
    rank_idx: int = 0,
    num_ranks: int = 1,
    experts: Sequence[int] | None = None,
    naming: NamingName | ExpertNaming | StackedNaming | None = None,
    num_shared_experts: int = 0,
    biases_apart: bool = False,
    transformed: bool = False,
    arch: str | None = None,
    token_format: TokenFormatName | None = None,
    requantize: bool = False,
    device: torch.device | str = "cpu",
) -> ExpertWeights | MegaMoEWeights:
    """The experts of one layer that rank `rank_idx` of `num_ranks` owns.

    Args:
        path: a .safetensors file, or a folder with an index or with such files.
        layer: its number in the checkpoint.
        num_experts: of the layer, all ranks together; by default what config.json beside the files
            says (`NUM_EXPERTS_KEYS`) or, without one, the first dimension of stacked experts.
        rank_idx: the rank, 0 to num_ranks - 1.
        num_ranks: ranks that share the experts.
        experts: those to load, in that order, one of them several times if it has copies; by
            default the rank's share of all.
        naming: one of `NAMINGS`, by name, or another; by default the one that the checkpoint
            follows. Of a model's layers for further tokens it is "mtp" or "mtp_model".
        num_shared_experts: shared experts, 0 to 4, to load behind the rank's own. Checkpoints have
            all of a layer in one, as wide as they are together, which is cut. They must be of the
            routed experts' format: those of DeepSeek-V3 are, those of DeepSeek-V4, FP8 beside
            MXFP4, are not.
        biases_apart: the caller takes biases by `load_biases`; else a layer that has some is
            refused.
        transformed: give what `transform_weights_for_mega_moe` makes of the experts, one by one:
            beside the result there is never more than one expert's raw weights.
        arch: as of `transform_weights_for_mega_moe`; the target is by default that of `device`.
        token_format: as of `transform_weights_for_mega_moe`.
        requantize: as of `transform_weights_for_mega_moe`.
        device: where the tensors are put.

    Returns l1 and l2. Of MXFP4, l1 = (int8 [E, 2*I, H/2], int32 [E, 2*I, H/128]), gate rows before
    up rows, and l2 = (int8 [E, H, I/2], int32 [E, H, I/128]). Of FP8, l1 = (float8_e4m3fn
    [E, 2*I, H], scales) and l2 = (float8_e4m3fn [E, H, I], scales), with the checkpoint's scales
    for 128 x 128 or 32 values: what `transform_weights_for_mega_moe(..., weights="fp8")` takes. Of
    BF16, which have no scales, (bfloat16 [E, 2*I, H], empty) and (bfloat16 [E, H, I], empty).

    Raises CheckpointError, which names tensor or file, for what is missing, of any rank's experts,
    for a tensor of theirs that would be ignored, or that two files hold, for another shape or type,
    for a scale that is NaN, or no positive number, or that the target cannot hold, for shared
    experts of another format or number, and if nothing says how many experts there are. Raises
    ValueError if the ranks cannot share them, and for `experts` that there are none of.

    Examples:
        >>> from tempfile import mkdtemp
        >>> from deep_moe import quantize_mxfp4, transform_weights_for_mega_moe
        >>> w13, w2 = torch.randn(4, 2 * 128, 256), torch.randn(4, 256, 128)
        >>> folder = mkdtemp()
        >>> save_experts(folder, {7: (quantize_mxfp4(w13), quantize_mxfp4(w2))})
        >>> l1, l2 = load_experts(folder, layer=7, rank_idx=1, num_ranks=2)
        >>> l1.weight.shape, l2.sf.shape
        (torch.Size([2, 256, 128]), torch.Size([2, 256, 1]))
        >>> weights = load_experts(folder, layer=7, rank_idx=1, num_ranks=2, transformed=True)
        >>> weights.l1.weight.equal(transform_weights_for_mega_moe(l1, l2).l1.weight)
        True

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
        CheckpointError: a tensor is missing, has another shape or type, or contradicts the config;
            the text names it.
    """
    _check_range("num_shared_experts", num_shared_experts, MAX_SHARED_EXPERTS)
    device = named_device(device)
    if not transformed and (arch is not None or token_format is not None or requantize):
        raise ValueError(
            f"transformed must be True for arch {arch}, token_format {token_format} and "
            f"requantize {requantize}"
        )
    opened = _opened(
        path, layer, num_experts, rank_idx, num_ranks, experts, naming, num_shared_experts
    )
    with opened as (tensors, own):
        if tensors.has_biases() and not biases_apart:
            raise CheckpointError(
                f"{path} has {tensors.modules()[0]}{tensors.bias}: load biases with load_biases, "
                "and say biases_apart=True here"
            )
        matrices = [tensors.matrices(expert) for expert in own]
        matrices += [
            tensors.shared_matrices(index, num_shared_experts)
            for index in range(num_shared_experts)
        ]
        form, (intermediate, hidden) = tensors.form, tensors.sizes
        num_raw = 1 if transformed else len(matrices)
        raw = form.empty_weights(num_raw, intermediate, hidden, device, len(matrices[0]) - 1)
        if not transformed:
            for local, expert in enumerate(matrices):
                tensors.read(expert, raw.expert(local))
            return raw
        weights = empty_weights_for_mega_moe(
            len(matrices),
            hidden,
            intermediate,
            arch=arch,
            device=device,
            weights=form.weights,
            token_format=token_format,
            has_gate=len(matrices[0]) > 2,
        )
        for local, expert in enumerate(matrices):
            tensors.read(expert, raw)
            try:
                transform_weights_for_mega_moe(
                    raw.l1,
                    raw.l2,
                    arch,
                    weights=form.weights,
                    token_format=token_format,
                    requantize=requantize,
                    out=weights.expert(local),
                )
            except ValueError as error:
                raise CheckpointError(
                    f"{path}: the expert of {expert[0].module} by itself: {error}"
                ) from error
        return weights


@described_as(load_experts)
def load_biases(
    path: str | Path,
    layer: int,
    *,
    num_experts: int | None = None,
    rank_idx: int = 0,
    num_ranks: int = 1,
    experts: Sequence[int] | None = None,
    naming: NamingName | ExpertNaming | StackedNaming | None = None,
    device: torch.device | str = "cpu",
) -> MegaMoEBiases | None:
    """The biases of the experts that `load_experts` gives for the same arguments, not yet
    transformed: l1 [E, 2*I], gate before up, and l2 [E, H], as the checkpoint has them. None, if
    the layer has none.

    Arguments are as of `load_experts`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
        CheckpointError: as of `load_experts`, or only some of the experts, or of their matrices,
            have biases.
    """
    with _opened(path, layer, num_experts, rank_idx, num_ranks, experts, naming) as (tensors, own):
        if not tensors.has_biases():
            return None
        read = [tensors.read_biases(expert) for expert in own]
        return MegaMoEBiases(
            *(torch.stack(biases).to(device) for biases in zip(*read, strict=True))
        )


@described_as(load_experts)
def load_token_scale(
    path: str | Path,
    layer: int,
    *,
    num_experts: int | None = None,
    naming: NamingName | ExpertNaming | StackedNaming | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor | None:
    """The static scale that a checkpoint of NVFP4 weights, or of FP8 weights with a scale for each
    row or matrix, has for a layer's tokens, for `prepare_inputs` and its `token_scale`: float32
    [1], by which the values of quantized tokens are multiplied. It is the largest of all experts',
    of gate and of up, because a token is quantized before it is known who gets it. None, if the
    checkpoint has none, or weights of another format.

    Linear1's output does not get such a scale: see docs/numerics.md.

    Other arguments are as of `load_experts`.

    Args:
        device: where the tensor is put.

    Raises what `load_experts` does; CheckpointError, too, if only some of the experts have such a
    scale, or if one is no positive number.
    """
    with _opened(path, layer, num_experts, 0, 1, None, naming) as (tensors, own):
        scale = tensors.token_scale(own)
        return None if scale is None else scale.to(device)


@contextmanager
def _opened(
    path: str | Path,
    layer: int,
    num_experts: int | None,
    rank_idx: int,
    num_ranks: int,
    experts: Sequence[int] | None,
    naming: NamingName | ExpertNaming | StackedNaming | None,
    num_shared_experts: int = 0,
) -> Iterator[tuple[Layer, Sequence[int]]]:
    """A layer's tensors, checked, and the experts of the rank."""
    _check_type("path", path, (str, Path), "a path")
    _check_type(
        "naming",
        naming,
        (str, ExpertNaming, StackedNaming, type(None)),
        "a name of NAMINGS, a naming or None",
    )
    _check_range("layer", layer)
    _check_range("num_ranks", num_ranks, first=1)
    _check_range("rank_idx", rank_idx, num_ranks - 1)
    if num_experts is not None:
        _check_range("num_experts", num_experts, first=1, words="at least 1, or None")
    if experts is not None and num_ranks != 1:
        raise ValueError(
            f"num_ranks must be 1 beside experts, which are one rank's; got {num_ranks}"
        )
    with Files(Path(path)) as files:
        tensors = find_layer(files, layer, naming)
        count, source = tensors.count(num_experts)
        own: Sequence[int]
        if experts is not None:
            _check_type("experts", experts, Iterable, f"some of 0 to {count - 1}, or None")
            own = _as_ints(experts)
            unknown = [e for e in own if not (type(e) is int and 0 <= e < count)]
            if unknown or not own:
                raise ValueError(
                    f"experts must be some of 0 to {count - 1}, those of layer {layer}; got "
                    f"{listed(unknown) if own else 'none'}"
                )
        else:
            if count % num_ranks:
                raise ValueError(
                    f"num_ranks must divide the {count} experts of layer {layer}; got {num_ranks}"
                )
            per_rank = count // num_ranks
            own = range(rank_idx * per_rank, (rank_idx + 1) * per_rank)
        tensors.check(count, source, own, num_shared_experts)
        yield tensors, own


def _as_ints(values: Iterable[Any]) -> list[Any]:
    """Those of a tensor or an array as ints, too; what is none stays."""
    if isinstance(values, torch.Tensor):
        return list(values.tolist()) if values.ndim == 1 else [values]
    return [
        index(value) if isinstance(value, SupportsIndex) and not isinstance(value, bool) else value
        for value in values
    ]


def save_experts(
    folder: str | Path,
    layers: Mapping[int, tuple[LayerTensors, LayerTensors]],
    *,
    naming: ExpertNaming = DEFAULT_NAMING,
    experts_per_file: int = 8,
    overwrite: bool = False,
) -> None:
    """Write the experts of whole layers, by layer number, as a sharded checkpoint with an index.

    Args:
        folder: where the files go; made if it is not there.
        layers: pairs as `load_experts` returns them, of all ranks. Layers that were saved into the
            folder before stay.
        naming: how the tensors are called.
        experts_per_file: experts of a layer that share a file.
        overwrite: replace those that are there already, or add to a checkpoint that `save_experts`
            has not written; otherwise both are refused. What is replaced is deleted, all else
            stays. config.json is made, or completed, so that it says how many experts a layer has.

    All or nothing: after an error, or if the process is killed, the folder holds the checkpoint
    that it held before. Several processes may save into one folder; they wait for each other.

    Raises ValueError, before anything is written, if layers, or an existing config.json, differ in
    the number of experts, if a layer has not the form of a known format, and for what would have to
    be overwritten. Raises OSError if a file cannot be written.

    Examples:
        >>> from tempfile import mkdtemp
        >>> from deep_moe import quantize_mxfp4
        >>> l1 = quantize_mxfp4(torch.randn(4, 2 * 128, 256))
        >>> l2 = quantize_mxfp4(torch.randn(4, 256, 128))
        >>> folder = mkdtemp()
        >>> save_experts(folder, {0: (l1, l2)})
        >>> load_experts(folder, layer=0).l1.weight.equal(l1.weight)
        True

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
        CheckpointError: the folder holds a checkpoint that cannot be read.
        OSError: a file cannot be written; the folder then holds what it held before.
    """
    _check_range("experts_per_file", experts_per_file, first=1)
    _check_type("folder", folder, (str, Path), "a path")
    _check_type("layers", layers, Mapping, "a dict of pairs (l1, l2), by layer number")
    _check_type("naming", naming, ExpertNaming, "an ExpertNaming")
    _check_type("overwrite", overwrite, bool, "a bool")
    if not layers:
        raise ValueError("layers must have at least one layer; got none")
    counts = {layer: _checked(layer, weights, naming) for layer, weights in layers.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"layers must have one number of experts; got {counts}, by layer")
    num_experts = next(iter(counts.values()))
    files = [
        (layer, range(first, min(first + experts_per_file, num_experts)))
        for layer in layers
        for first in range(0, num_experts, experts_per_file)
    ]
    with Saving(Path(folder), num_experts, overwrite=overwrite) as saving:
        for layer in layers:
            own = [name for name, _ in naming.numbers(layer, saving.names)]
            saving.drop(own, f"layer {layer}")
        for layer, experts in files:
            tensors = {
                name: tensor
                for expert in experts
                for name, tensor in _expert_tensors(naming, layer, expert, *layers[layer])
            }
            saving.write(len(files), tensors, save_file)
        saving.commit()


def _checked(layer: int, weights: tuple[LayerTensors, LayerTensors], naming: ExpertNaming) -> int:
    """How many experts a layer has, which can be saved."""
    _check_range("layers", layer)
    name = f"layers[{layer}]"
    _check_type(name, weights, (tuple, list), "a pair (l1, l2)")
    if len(weights) != 2:
        raise ValueError(f"{name} must be a pair (l1, l2); got {len(weights)} values")
    for which, own in enumerate(weights):
        allowed = "a tuple of two or three tensors"
        _check_type(f"{name}[{which}]", own, (tuple, list), allowed)
        if len(own) not in (2, 3):
            raise ValueError(f"{name}[{which}] must be {allowed}; got {len(own)} values")
        for i, tensor in enumerate(own):
            _check_type(f"{name}[{which}][{i}]", tensor, torch.Tensor, "a tensor")
    l1, l2 = (LayerWeights(*own) for own in weights)
    form = form_of(l1)
    if form is None:
        allowed = ", ".join(dict.fromkeys(form.weights for form in FORMS))
        got = ", ".join(str(tensor.dtype) for tensor in l1)
        raise ValueError(f"layers must have weights in {allowed}; got {got} in {layer}")
    stored = form.spellings[0].keys()
    if naming.suffixes is not None and naming.suffixes.keys() != stored:
        raise ValueError(
            f"naming must have suffixes for {', '.join(stored)} of {form.weights}; got "
            f"{naming.suffixes}"
        )
    try:
        sizes = weight_format(form.weights).check(l1, l2)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
    for which, tensors in enumerate((l1, l2)):
        for i, tensor in enumerate(tensors):
            check_memory(f"{name}[{which}][{i}]", tensor)
    if sizes.has_gate is not (naming.gate is not None):
        rows = "2*I rows in l1" if naming.gate is not None else "I rows in l1, without a gate"
        raise ValueError(
            f"{name} must have {rows} for a naming with gate {naming.gate!r}; got "
            f"{tuple(l1.weight.shape)} beside {tuple(l2.weight.shape)}"
        )
    return sizes.num_experts


def _expert_tensors(
    naming: ExpertNaming, layer: int, expert: int, l1: LayerTensors, l2: LayerTensors
) -> Iterator[tuple[str, torch.Tensor]]:
    weights = ExpertWeights(LayerWeights(*l1), LayerWeights(*l2)).expert(expert)
    form = form_of(weights.l1)
    assert form is not None
    suffixes = form.spellings[0] if naming.suffixes is None else naming.suffixes
    modules = naming.modules(layer, expert)
    for module, matrix in zip(modules, in_matrices(weights, len(modules) - 1), strict=True):
        for key, tensor in form.stored(matrix).items():
            yield (
                module + suffixes.get(key, key),
                tensor.detach().clone(memory_format=torch.contiguous_format),
            )


def _check_type(name: str, value: object, types: Any, allowed: str) -> None:
    if not isinstance(value, types):
        raise TypeError(f"{name} must be {allowed}; got {type(value).__name__}")


def _check_range(
    name: str, value: int, last: int | None = None, *, first: int = 0, words: str = ""
) -> None:
    words = words or (f"at least {first}" if last is None else f"{first} to {last}")
    if require_int(name, value, words) < first or (last is not None and value > last):
        raise ValueError(f"{name} must be {words}; got {value}")
