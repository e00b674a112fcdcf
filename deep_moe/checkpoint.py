"""Expert weights from safetensors checkpoints, for one rank at a time.

Three ways to name the tensors are known (`NAMINGS`); others can be given. Whatever the naming, a
rank opens only files that hold experts of its own and reads only their bytes. The result is in the
layout of checkpoints: `transform_weights_for_mega_moe` comes next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .errors import CheckpointError
from .formats import GROUP_SIZE, pack_ue8m0, unpack_ue8m0
from .weights import LayerWeights, MegaMoEWeights, Pair

INDEX_NAME = "model.safetensors.index.json"

_WEIGHT_DTYPES = (torch.uint8, torch.int8)
_SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class ExpertNaming:
    """A tensor per expert and projection: packed E2M1 [rows, K/2], UE8M0 scales [rows, K/32].

    The names contain {layer} and {expert}; `weight` and `scale` are appended to each.
    """

    gate: str
    up: str
    down: str
    weight: str
    scale: str


@dataclass(frozen=True)
class StackedNaming:
    """All experts of a layer in one tensor per projection: E2M1 blocks [experts, rows, K/32, 16] or
    [experts, rows, K/2], scales [experts, rows, K/32].

    The names contain {layer}. interleaved: rows of gate and up alternate, as opposed to all of gate
    before all of up. bias: suffix of biases; no kernel adds them, so a layer that has some is
    refused.
    """

    gate_up: str
    down: str
    weight: str
    scale: str
    bias: str
    interleaved: bool


DEFAULT_NAMING = ExpertNaming(
    gate="model.layers.{layer}.mlp.experts.{expert}.gate_proj",
    up="model.layers.{layer}.mlp.experts.{expert}.up_proj",
    down="model.layers.{layer}.mlp.experts.{expert}.down_proj",
    weight=".weight",
    scale=".weight_scale",
)

NAMINGS: dict[str, ExpertNaming | StackedNaming] = {
    "experts": DEFAULT_NAMING,
    "numbered": ExpertNaming(
        gate="layers.{layer}.ffn.experts.{expert}.w1",
        up="layers.{layer}.ffn.experts.{expert}.w3",
        down="layers.{layer}.ffn.experts.{expert}.w2",
        weight=".weight",
        scale=".scale",
    ),
    "stacked": StackedNaming(
        gate_up="model.layers.{layer}.mlp.experts.gate_up_proj",
        down="model.layers.{layer}.mlp.experts.down_proj",
        weight="_blocks",
        scale="_scales",
        bias="_bias",
        interleaved=True,
    ),
}


def load_experts(
    path: str | Path,
    layer: int,
    *,
    rank_idx: int = 0,
    num_ranks: int = 1,
    naming: ExpertNaming | StackedNaming | None = None,
    device: torch.device | str = "cpu",
) -> MegaMoEWeights:
    """The experts of one layer that rank `rank_idx` of `num_ranks` owns.

    path: a .safetensors file, or a folder with an index or with such files. naming: by default the
    one of `NAMINGS` that the checkpoint follows.

    Returns l1 = (int8 [E, 2*I, H/2], int32 [E, 2*I, H/128]), gate rows before up rows, and
    l2 = (int8 [E, H, I/2], int32 [E, H, I/128]). What is missing or has another shape or type is a
    CheckpointError that names the tensor.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1; got {num_ranks}")
    if not 0 <= rank_idx < num_ranks:
        raise ValueError(f"rank_idx must be 0 to {num_ranks - 1}; got {rank_idx}")
    with _Tensors(Path(path)) as tensors:
        naming = naming or _detect_naming(tensors, layer)
        num_experts = _num_experts(tensors, naming, layer)
        if num_experts % num_ranks:
            raise ValueError(
                f"num_ranks must divide the {num_experts} experts of layer {layer}; got {num_ranks}"
            )
        per_rank = num_experts // num_ranks
        experts = range(rank_idx * per_rank, (rank_idx + 1) * per_rank)
        if isinstance(naming, StackedNaming):
            return _load_stacked(tensors, naming, layer, experts, torch.device(device))
        return _load_separate(tensors, naming, layer, experts, torch.device(device))


def save_experts(
    folder: str | Path,
    layers: Mapping[int, tuple[Pair, Pair]],
    *,
    naming: ExpertNaming = DEFAULT_NAMING,
    experts_per_file: int = 8,
) -> None:
    """Write the experts of whole layers, by layer number, as a sharded checkpoint with an index.

    The pairs are as `load_experts` returns them.
    """
    if experts_per_file < 1:
        raise ValueError(f"experts_per_file must be at least 1; got {experts_per_file}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = []
    for layer, (l1, l2) in layers.items():
        for expert in range(l1[0].shape[0]):
            if expert % experts_per_file == 0:
                shards.append({})
            shards[-1].update(_expert_tensors(naming, layer, expert, l1, l2))
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name)
        weight_map.update(dict.fromkeys(shard, name))
    total_size = sum(t.numel() for shard in shards for t in shard.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")


def _expert_tensors(
    naming: ExpertNaming, layer: int, expert: int, l1: Pair, l2: Pair
) -> Iterator[tuple[str, torch.Tensor]]:
    gate_up, gate_up_sf = l1[0][expert].view(torch.uint8), unpack_ue8m0(l1[1][expert])
    num_rows = gate_up.shape[0] // 2
    parts = (
        (naming.gate, gate_up[:num_rows], gate_up_sf[:num_rows]),
        (naming.up, gate_up[num_rows:], gate_up_sf[num_rows:]),
        (naming.down, l2[0][expert].view(torch.uint8), unpack_ue8m0(l2[1][expert])),
    )
    for template, weight, scale in parts:
        name = template.format(layer=layer, expert=expert)
        yield name + naming.weight, weight.clone()
        yield name + naming.scale, scale.clone()


class _Tensors:
    """Tensors of a checkpoint by name. Files are opened when first needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open_files: dict[Path, Any] = {}
        self._stack = ExitStack()
        self._file_of = _file_of_tensors(path)

    def __enter__(self) -> _Tensors:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header, without reading the tensor."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._file(name).get_tensor(name)

    def read_entry(self, name: str, index: int) -> torch.Tensor:
        """One entry of the first dimension as a matrix, its other dimensions joined."""
        part = self._file(name).get_slice(name)
        num_entries = part.get_shape()[0]
        if index >= num_entries:
            raise CheckpointError(f"{name} must have an entry per expert; got {num_entries}")
        return part[index : index + 1].flatten(2)[0]

    def _file(self, name: str) -> Any:
        if name not in self._file_of:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        file = self._file_of[name]
        if file not in self._open_files:
            self._open_files[file] = self._stack.enter_context(_open(file))
        handle = self._open_files[file]
        if name not in handle.keys():  # noqa: SIM118 (a safe_open handle is no mapping)
            raise CheckpointError(f"{file} has no tensor {name}, although the index says so")
        return handle


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint file {file} is missing") from None
    except SafetensorError as error:
        raise CheckpointError(f"{file} is no safetensors file: {error}") from error


def _file_of_tensors(path: Path) -> dict[str, Path]:
    """File of each tensor name: from the index, or from the headers if there is none."""
    if (path / INDEX_NAME).is_file():
        try:
            weight_map = json.loads((path / INDEX_NAME).read_text())["weight_map"]
            return {name: path / file for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path / INDEX_NAME} must hold a JSON object with a weight_map: {error!r}"
            ) from error
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} must be a .safetensors file or a folder with such files")
    file_of = {}
    for file in files:
        with _open(file) as handle:
            file_of.update(dict.fromkeys(handle.keys(), file))
    return file_of


def _first_weight(naming: ExpertNaming | StackedNaming, layer: int) -> str:
    template = naming.gate_up if isinstance(naming, StackedNaming) else naming.gate
    return template.format(layer=layer, expert=0) + naming.weight


def _detect_naming(tensors: _Tensors, layer: int) -> ExpertNaming | StackedNaming:
    for naming in NAMINGS.values():
        if _first_weight(naming, layer) in tensors:
            return naming
    candidates = ", ".join(_first_weight(naming, layer) for naming in NAMINGS.values())
    raise CheckpointError(
        f"{tensors.path} has no experts of layer {layer} under a known name; "
        f"looked for {candidates}"
    )


def _num_experts(tensors: _Tensors, naming: ExpertNaming | StackedNaming, layer: int) -> int:
    if isinstance(naming, StackedNaming):
        return tensors.shape(_first_weight(naming, layer))[0]
    count = 0
    while naming.gate.format(layer=layer, expert=count) + naming.weight in tensors:
        count += 1
    if count == 0:
        raise CheckpointError(f"{tensors.path} has no tensor {_first_weight(naming, layer)}")
    return count


def _load_separate(
    tensors: _Tensors, naming: ExpertNaming, layer: int, experts: range, device: torch.device
) -> MegaMoEWeights:
    first = naming.gate.format(layer=layer, expert=experts[0]) + naming.weight
    shape = tensors.shape(first)
    if len(shape) != 2:
        raise CheckpointError(f"{first} must have shape [rows, K/2]; got {shape}")
    num_rows = shape[0]
    weights = _empty_weights(len(experts), num_rows, 2 * shape[1], device)
    for local, expert in enumerate(experts):
        l1 = LayerWeights(weights.l1.weight[local], weights.l1.sf[local])
        targets = (
            (naming.gate, l1.weight[:num_rows], l1.sf[:num_rows]),
            (naming.up, l1.weight[num_rows:], l1.sf[num_rows:]),
            (naming.down, weights.l2.weight[local], weights.l2.sf[local]),
        )
        for template, weight, sf in targets:
            prefix = template.format(layer=layer, expert=expert)
            weight_name, scale_name = prefix + naming.weight, prefix + naming.scale
            weight.copy_(_as_e2m1(weight_name, tensors.read(weight_name), weight))
            sf.copy_(_as_words(scale_name, tensors.read(scale_name), sf))
    return weights


def _load_stacked(
    tensors: _Tensors, naming: StackedNaming, layer: int, experts: range, device: torch.device
) -> MegaMoEWeights:
    gate_up, down = naming.gate_up.format(layer=layer), naming.down.format(layer=layer)
    for name in (gate_up + naming.bias, down + naming.bias):
        if name in tensors:
            raise CheckpointError(f"{tensors.path} has {name}; no kernel adds biases of experts")
    first = gate_up + naming.weight
    shape = tensors.shape(first)
    if len(shape) not in (3, 4):
        raise CheckpointError(
            f"{first} must have shape [experts, rows, K/32, 16] or [experts, rows, K/2]; "
            f"got {shape}"
        )
    weights = _empty_weights(len(experts), shape[1] // 2, 2 * prod(shape[2:]), device)
    for prefix, target in ((gate_up, weights.l1), (down, weights.l2)):
        weight_name, scale_name = prefix + naming.weight, prefix + naming.scale
        interleaved = naming.interleaved and prefix == gate_up
        # Expert by expert: a rank's share of a layer may be gigabytes.
        for local, expert in enumerate(experts):
            weight, sf = target.weight[local], target.sf[local]
            packed = _as_e2m1(weight_name, tensors.read_entry(weight_name, expert), weight)
            words = _as_words(scale_name, tensors.read_entry(scale_name, expert), sf)
            weight.copy_(_separate_rows(packed) if interleaved else packed)
            sf.copy_(_separate_rows(words) if interleaved else words)
    return weights


def _separate_rows(rows: torch.Tensor) -> torch.Tensor:
    """Even rows (gate), then odd rows (up)."""
    return torch.cat([rows[0::2], rows[1::2]])


def _empty_weights(
    num_experts: int, intermediate: int, hidden: int, device: torch.device
) -> MegaMoEWeights:
    if intermediate % 128 or hidden % 128 or not intermediate or not hidden:
        raise CheckpointError(
            "hidden and intermediate sizes must be positive multiples of 128; the checkpoint has "
            f"{hidden} and {intermediate}"
        )

    def empty(num_rows: int, num_columns: int) -> LayerWeights:
        return LayerWeights(
            torch.empty((num_experts, num_rows, num_columns // 2), dtype=torch.int8, device=device),
            torch.empty(
                (num_experts, num_rows, num_columns // 128), dtype=torch.int32, device=device
            ),
        )

    return MegaMoEWeights(empty(2 * intermediate, hidden), empty(hidden, intermediate))


def _as_e2m1(name: str, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A packed weight as int8, checked against where it goes."""
    if tensor.dtype not in _WEIGHT_DTYPES:
        raise CheckpointError(
            f"{name} must be uint8 or int8, two E2M1 values per byte; got {tensor.dtype}"
        )
    _check_shape(name, tensor, tuple(like.shape))
    return tensor.view(torch.int8)


def _as_words(name: str, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Scale bytes packed four to an int32, checked against where they go."""
    if tensor.dtype not in _SCALE_DTYPES:
        raise CheckpointError(
            f"{name} must be uint8 or float8_e8m0fnu, one UE8M0 scale per {GROUP_SIZE} values; "
            f"got {tensor.dtype}"
        )
    _check_shape(name, tensor, (like.shape[0], 4 * like.shape[1]))
    return pack_ue8m0(tensor.view(torch.uint8))


def _check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise CheckpointError(
            f"{name} must have shape {expected} to go with the other tensors; "
            f"got {tuple(tensor.shape)}"
        )
