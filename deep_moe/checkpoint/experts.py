"""Expert weights from safetensors checkpoints, for one rank at a time.

The ways of published models to name the tensors are known (`NAMINGS`); others can be given. Weights
are MXFP4, FP8 or BF16 (forms.py), by what the tensors hold. Whatever the naming, a
rank opens only files that hold experts of its own and reads only their bytes.

How many experts a layer has says config.json, or the caller: what is missing is then known to be.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from deep_moe.errors import CheckpointError
from deep_moe.formats.biases import MegaMoEBiases
from deep_moe.formats.block_scaled import GROUP_SIZE, unpack_ue8m0
from deep_moe.formats.weights import (
    MegaMoEWeights,
    Pair,
    empty_weights_for_mega_moe,
    transform_weights_for_mega_moe,
)
from deep_moe.heuristics.shape import MAX_SHARED_EXPERTS, require_int

from .forms import Bf16, Form, Fp8, Mxfp4

INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
# What published models call the number of routed experts of a layer.
NUM_EXPERTS_KEYS = (
    "n_routed_experts",
    "num_routed_experts",
    "num_local_experts",
    "num_experts",
    "moe_num_experts",
)

_ROUTED, _SHARED = "experts.{expert}", "shared_experts"
_MAX_NAMED = 8  # experts or files that an error lists


@dataclass(frozen=True)
class ExpertNaming:
    """A tensor per expert and projection: packed E2M1 [rows, K/2] with UE8M0 scales [rows, K/32],
    or E4M3 [rows, K] with scales [rows/128, K/128] or [rows, K/32], or BF16 [rows, K].

    The names contain {layer} and {expert}; `weight` and `scale` are appended to each. scale: None
    where there are no scales, for BF16. Shared experts have "shared_experts" in place of
    "experts.{expert}".
    """

    gate: str
    up: str
    down: str
    weight: str
    scale: str | None


@dataclass(frozen=True)
class StackedNaming:
    """All experts of a layer in one tensor per projection: E2M1 blocks [experts, rows, K/32, 16] or
    [experts, rows, K/2], scales [experts, rows, K/32], or BF16 [experts, rows, K].

    The names contain {layer}. scale: None where there are no scales, for BF16. interleaved: rows of
    gate and up alternate, as opposed to all of gate before all of up, in biases, too. bias: suffix
    of these, [experts, rows].
    """

    gate_up: str
    down: str
    weight: str
    scale: str | None
    bias: str
    interleaved: bool


_MODULES = "model.layers.{layer}.mlp.experts.{expert}."
_PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def _by_modules(weight: str, scale: str | None) -> ExpertNaming:
    names = {part: _MODULES + name for part, name in _PARTS.items()}
    return ExpertNaming(**names, weight=weight, scale=scale)


def _numbered(prefix: str) -> ExpertNaming:
    """DeepSeek-V4's."""
    return ExpertNaming(
        gate=f"{prefix}.ffn.experts.{{expert}}.w1",
        up=f"{prefix}.ffn.experts.{{expert}}.w3",
        down=f"{prefix}.ffn.experts.{{expert}}.w2",
        weight=".weight",
        scale=".scale",
    )


DEFAULT_NAMING = _by_modules(".weight", ".weight_scale")

# By name. "mtp": the layers behind the others that predict further tokens, counted from 0.
# "scale_inv": DeepSeek-V3 and those like it. "compressed": compressed-tensors. "plain", "mixtral"
# and "stacked_plain": BF16.
NAMINGS: dict[str, ExpertNaming | StackedNaming] = {
    "experts": DEFAULT_NAMING,
    "scale_inv": _by_modules(".weight", ".weight_scale_inv"),
    "compressed": _by_modules(".weight_packed", ".weight_scale"),
    "numbered": _numbered("layers.{layer}"),
    "numbered_model": _numbered("model.layers.{layer}"),
    "mtp": _numbered("mtp.{layer}"),
    "mtp_model": _numbered("model.mtp.{layer}"),
    "stacked": StackedNaming(
        gate_up="model.layers.{layer}.mlp.experts.gate_up_proj",
        down="model.layers.{layer}.mlp.experts.down_proj",
        weight="_blocks",
        scale="_scales",
        bias="_bias",
        interleaved=True,
    ),
    "plain": _by_modules(".weight", None),
    "mixtral": ExpertNaming(
        gate="model.layers.{layer}.block_sparse_moe.experts.{expert}.w1",
        up="model.layers.{layer}.block_sparse_moe.experts.{expert}.w3",
        down="model.layers.{layer}.block_sparse_moe.experts.{expert}.w2",
        weight=".weight",
        scale=None,
    ),
    "stacked_plain": StackedNaming(
        gate_up="model.layers.{layer}.mlp.experts.gate_up_proj",
        down="model.layers.{layer}.mlp.experts.down_proj",
        weight="",
        scale=None,
        bias="_bias",
        interleaved=False,
    ),
}


def load_experts(
    path: str | Path,
    layer: int,
    *,
    num_experts: int | None = None,
    rank_idx: int = 0,
    num_ranks: int = 1,
    experts: Sequence[int] | None = None,
    naming: str | ExpertNaming | StackedNaming | None = None,
    num_shared_experts: int = 0,
    biases_apart: bool = False,
    device: torch.device | str = "cpu",
) -> MegaMoEWeights:
    """The experts of one layer that rank `rank_idx` of `num_ranks` owns, not yet transformed.

    path: a .safetensors file, or a folder with an index or with such files. num_experts: of the
    layer, all ranks together; by default what config.json beside the files says
    (`NUM_EXPERTS_KEYS`) or, without one, the first dimension of stacked experts. experts: those to
    load, in that order, one of them several times if it has copies; by default the rank's share of
    all. naming: one of `NAMINGS`, by name, or another; by default the first one of these that the
    checkpoint follows. Of a model's layers for further tokens it is "mtp" or "mtp_model".
    num_shared_experts: shared experts, 0 to 4, to load behind the rank's own. Checkpoints have all
    of a layer in one, as wide as they are together, which is cut. They must be of the routed
    experts' format: those of DeepSeek-V3 are, those of DeepSeek-V4, FP8 beside MXFP4, are not.
    biases_apart: the caller takes biases by `load_biases`; else a layer that has some is refused.

    Returns l1 and l2. Of MXFP4, l1 = (int8 [E, 2*I, H/2], int32 [E, 2*I, H/128]), gate rows before
    up rows, and l2 = (int8 [E, H, I/2], int32 [E, H, I/128]). Of FP8, l1 = (float8_e4m3fn
    [E, 2*I, H], scales) and l2 = (float8_e4m3fn [E, H, I], scales), with the checkpoint's scales
    for 128 x 128 or 32 values: what `transform_weights_for_mega_moe(..., weights="fp8")` takes. Of
    BF16, which have no scales, (bfloat16 [E, 2*I, H], empty) and (bfloat16 [E, H, I], empty).

    Raises CheckpointError, which names tensor or file, for what is missing, of any rank's experts,
    for another shape or type, for a scale that is NaN, or no positive number, for shared experts of
    another format or number, and if nothing says how many experts there are. Raises ValueError if
    the ranks cannot share them, and for `experts` that there are none of.

    >>> from tempfile import mkdtemp
    >>> from deep_moe import quantize_mxfp4, transform_weights_for_mega_moe
    >>> w13, w2 = torch.randn(4, 2 * 128, 256), torch.randn(4, 256, 128)
    >>> folder = mkdtemp()
    >>> save_experts(folder, {7: (quantize_mxfp4(w13), quantize_mxfp4(w2))})
    >>> l1, l2 = load_experts(folder, layer=7, rank_idx=1, num_ranks=2)
    >>> l1.weight.shape, l2.sf.shape
    (torch.Size([2, 256, 128]), torch.Size([2, 256, 1]))
    >>> weights = transform_weights_for_mega_moe(l1, l2)
    """
    opened = _opened(path, layer, num_experts, rank_idx, num_ranks, experts, naming)
    with opened as (tensors, own):
        if not biases_apart:
            tensors.refuse_biases()
        form, sizes = tensors.form(own[0]), tensors.sizes(own[0])
        names = _local_experts(own, num_shared_experts)
        weights = form.empty_weights(len(names), *sizes, torch.device(device))
        for local, expert in enumerate(names):
            tensors.read_any(expert, form, weights.expert(local))
        return weights


def load_transformed_experts(
    path: str | Path,
    layer: int,
    *,
    num_experts: int | None = None,
    rank_idx: int = 0,
    num_ranks: int = 1,
    experts: Sequence[int] | None = None,
    naming: str | ExpertNaming | StackedNaming | None = None,
    num_shared_experts: int = 0,
    arch: str | None = None,
    requantize: bool = False,
    biases_apart: bool = False,
    device: torch.device | str = "cpu",
) -> MegaMoEWeights:
    """What `transform_weights_for_mega_moe` makes of `load_experts`, expert by expert: beside the
    result there is never more than one expert's raw weights.

    arch: the target; by default that of `device`. requantize: as in
    `transform_weights_for_mega_moe`. The others, and what is raised, are as in `load_experts`;
    CheckpointError also for scales that the target cannot hold.

    >>> from tempfile import mkdtemp
    >>> from deep_moe import quantize_mxfp4
    >>> w13, w2 = torch.randn(4, 2 * 128, 256), torch.randn(4, 256, 128)
    >>> folder = mkdtemp()
    >>> save_experts(folder, {7: (quantize_mxfp4(w13), quantize_mxfp4(w2))})
    >>> l1, l2 = load_transformed_experts(folder, layer=7, rank_idx=1, num_ranks=2)
    """
    opened = _opened(path, layer, num_experts, rank_idx, num_ranks, experts, naming)
    with opened as (tensors, own):
        if not biases_apart:
            tensors.refuse_biases()
        form = tensors.form(own[0])
        intermediate, hidden = tensors.sizes(own[0])
        raw = form.empty_weights(1, intermediate, hidden, torch.device(device))
        names = _local_experts(own, num_shared_experts)
        weights = empty_weights_for_mega_moe(
            len(names), hidden, intermediate, arch=arch, device=device, weights=form.weights
        )
        for local, expert in enumerate(names):
            tensors.read_any(expert, form, raw)
            try:
                transform_weights_for_mega_moe(
                    *raw,
                    arch,
                    weights=form.weights,
                    requantize=requantize,
                    out=weights.expert(local),
                )
            except ValueError as error:
                raise CheckpointError(
                    f"{path}: expert {expert} of layer {layer} by itself: {error}"
                ) from error
        return weights


def load_biases(
    path: str | Path,
    layer: int,
    *,
    num_experts: int | None = None,
    rank_idx: int = 0,
    num_ranks: int = 1,
    experts: Sequence[int] | None = None,
    naming: str | ExpertNaming | StackedNaming | None = None,
    device: torch.device | str = "cpu",
) -> MegaMoEBiases | None:
    """The biases of the experts that `load_experts` gives for the same arguments, not yet
    transformed: l1 [E, 2*I], gate before up, and l2 [E, H], as the checkpoint has them. None, if
    the layer has none.

    Raises what `load_experts` does; CheckpointError, too, if only one of the two layers has some.
    """
    opened = _opened(path, layer, num_experts, rank_idx, num_ranks, experts, naming)
    with opened as (tensors, own):
        if not tensors.bias_names():
            return None
        intermediate, hidden = tensors.sizes(own[0])
        read = [tensors.read_biases(expert, 2 * intermediate, hidden) for expert in own]
        return MegaMoEBiases(
            *(torch.stack(biases).to(device) for biases in zip(*read, strict=True))
        )


@dataclass(frozen=True)
class _Shared:
    """One of a layer's shared experts, in place of a routed one's number."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}, a shared one,"


def _local_experts(own: Sequence[int], num_shared_experts: int) -> list[int | _Shared]:
    """What a rank holds, in the order of its weights."""
    allowed = f"0 to {MAX_SHARED_EXPERTS}"
    if (
        not 0
        <= require_int("num_shared_experts", num_shared_experts, allowed)
        <= MAX_SHARED_EXPERTS
    ):
        raise ValueError(f"num_shared_experts must be {allowed}; got {num_shared_experts}")
    return [*own, *(_Shared(idx, num_shared_experts) for idx in range(num_shared_experts))]


@contextmanager
def _opened(
    path: str | Path,
    layer: int,
    num_experts: int | None,
    rank_idx: int,
    num_ranks: int,
    experts: Sequence[int] | None,
    naming: str | ExpertNaming | StackedNaming | None,
) -> Iterator[tuple[_LayerTensors, Sequence[int]]]:
    """A layer's tensors, complete by name, and the experts of the rank."""
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1; got {num_ranks}")
    if not 0 <= rank_idx < num_ranks:
        raise ValueError(f"rank_idx must be 0 to {num_ranks - 1}; got {rank_idx}")
    if num_experts is not None and num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, or None; got {num_experts}")
    if experts is not None and num_ranks != 1:
        raise ValueError(
            f"num_ranks must be 1 beside experts, which are one rank's; got {num_ranks}"
        )
    if isinstance(naming, str):
        if naming not in NAMINGS:
            raise ValueError(f"naming must be one of {', '.join(NAMINGS)}; got {naming!r}")
        naming = NAMINGS[naming]
    with _Tensors(Path(path)) as tensors:
        own = _find_layer(tensors, layer, naming)
        count = own.check(num_experts)
        if experts is not None:
            unknown = [e for e in experts if not (isinstance(e, int) and 0 <= e < count)]
            if unknown or not experts:
                raise ValueError(
                    f"experts must be some of 0 to {count - 1}, those of layer {layer}; got "
                    f"{_listed(unknown) if experts else 'none'}"
                )
            yield own, experts
            return
        if count % num_ranks:
            raise ValueError(
                f"num_ranks must divide the {count} experts of layer {layer}; got {num_ranks}"
            )
        per_rank = count // num_ranks
        yield own, range(rank_idx * per_rank, (rank_idx + 1) * per_rank)


def save_experts(
    folder: str | Path,
    layers: Mapping[int, tuple[Pair, Pair]],
    *,
    naming: ExpertNaming = DEFAULT_NAMING,
    experts_per_file: int = 8,
) -> None:
    """Write the experts of whole layers, by layer number, as a sharded checkpoint with an index.

    The pairs are as `load_experts` returns them, of all ranks. config.json is made, or completed,
    so that it says how many experts a layer has. Raises ValueError if layers, or an existing
    config.json, differ in that.

    >>> from tempfile import mkdtemp
    >>> from deep_moe import quantize_mxfp4
    >>> l1 = quantize_mxfp4(torch.randn(4, 2 * 128, 256))
    >>> l2 = quantize_mxfp4(torch.randn(4, 256, 128))
    >>> folder = mkdtemp()
    >>> save_experts(folder, {0: (l1, l2)})
    >>> load_experts(folder, layer=0).l1.weight.equal(l1.weight)
    True
    """
    if experts_per_file < 1:
        raise ValueError(f"experts_per_file must be at least 1; got {experts_per_file}")
    counts = {layer: l1[0].shape[0] for layer, (l1, _) in layers.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"layers must have one number of experts; got {counts}, by layer")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for num_experts in set(counts.values()):
        _write_config(folder / CONFIG_NAME, num_experts)
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
    total_size = sum(t.nbytes for shard in shards for t in shard.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")


def _expert_tensors(
    naming: ExpertNaming, layer: int, expert: int, l1: Pair, l2: Pair
) -> Iterator[tuple[str, torch.Tensor]]:
    if l1[0].dtype == torch.bfloat16:
        gate, up = l1[0][expert].chunk(2)
        for template, weight in (
            (naming.gate, gate),
            (naming.up, up),
            (naming.down, l2[0][expert]),
        ):
            yield template.format(layer=layer, expert=expert) + naming.weight, weight.clone()
        return
    if naming.scale is None:
        raise ValueError(f"naming must have names for scales of {l1[0].dtype}; got {naming}")

    def scales(pair: Pair) -> torch.Tensor:
        num_groups = 2 * pair[0].shape[2] // GROUP_SIZE
        return unpack_ue8m0(pair[1][expert])[:, :num_groups]

    gate_up, gate_up_sf = l1[0][expert].view(torch.uint8), scales(l1)
    num_rows = gate_up.shape[0] // 2
    parts = (
        (naming.gate, gate_up[:num_rows], gate_up_sf[:num_rows]),
        (naming.up, gate_up[num_rows:], gate_up_sf[num_rows:]),
        (naming.down, l2[0][expert].view(torch.uint8), scales(l2)),
    )
    for template, weight, scale in parts:
        name = template.format(layer=layer, expert=expert)
        yield name + naming.weight, weight.clone()
        yield name + naming.scale, scale.clone()


_SHARD_NAME = re.compile(r"(.*?)(\d+)-of-(\d+)\.safetensors")


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

    def names(self) -> Iterable[str]:
        return self._file_of

    def lost_files(self) -> list[str]:
        """Shards that the others' numbering speaks of, for a folder without an index."""
        names = {file.name for file in self._file_of.values()}
        lost: set[str] = set()
        for name in names:
            match = _SHARD_NAME.fullmatch(name)
            if match is None:
                continue
            stem, number, count = match.groups()
            width = len(number)
            all_shards = (f"{i:0{width}d}-of-{count}" for i in range(1, int(count) + 1))
            lost |= {f"{stem}{shard}.safetensors" for shard in all_shards} - names
        return sorted(lost)

    def dtype(self, name: str) -> str:
        """As safetensors calls it, from the header."""
        return str(self._file(name).get_slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header, without reading the tensor."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._file(name).get_tensor(name)

    def read_entry(self, name: str, index: int) -> torch.Tensor:
        """One entry of the first dimension as a matrix, its other dimensions joined."""
        part = self._file(name).get_slice(name)
        return part[index : index + 1].flatten(2)[0]

    def read_row(self, name: str, index: int) -> torch.Tensor:
        """One row of a matrix."""
        row: torch.Tensor = self._file(name).get_slice(name)[index : index + 1][0]
        return row

    def _file(self, name: str) -> Any:
        if name not in self._file_of:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        file = self._file_of[name]
        if file not in self._open_files:
            if not file.is_file():
                raise CheckpointError(f"{file} is missing; the index says that it holds {name}")
            self._open_files[file] = self._stack.enter_context(_open(file))
        handle = self._open_files[file]
        if name not in handle.keys():  # noqa: SIM118 (a safe_open handle is no mapping)
            raise CheckpointError(f"{file} has no tensor {name}, although the index says so")
        return handle


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
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


class _LayerTensors(ABC):
    """The tensors of one layer's experts, by their naming."""

    def __init__(self, tensors: _Tensors, layer: int) -> None:
        self.tensors = tensors
        self.layer = layer

    @abstractmethod
    def present(self) -> set[int]:
        """Experts of which there is any tensor."""

    @property
    @abstractmethod
    def has_pairs(self) -> bool:
        """Whether there are weights and scales, or BF16 weights for a naming without scales;
        namings may share the names of one of these."""

    @abstractmethod
    def check(self, num_experts: int | None) -> int:
        """How many experts there are, all of them complete. num_experts: what the caller says."""

    def bias_names(self) -> list[str]:
        """Of the biases that there are."""
        return []

    def refuse_biases(self) -> None:
        for name in self.bias_names():
            raise CheckpointError(
                f"{self.tensors.path} has {name}: load biases with load_biases, and say "
                "biases_apart=True here"
            )

    def read_biases(
        self, expert: int, num_l1_rows: int, num_l2_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One expert's, where there are some."""
        raise NotImplementedError

    @abstractmethod
    def sizes(self, expert: int) -> tuple[int, int]:
        """Intermediate and hidden size, by the tensors of this expert."""

    @abstractmethod
    def form(self, expert: int) -> Form:
        """What the tensors hold, by those of this expert."""

    @abstractmethod
    def read(self, expert: int, form: Form, target: MegaMoEWeights) -> None:
        """Read one expert into tensors [1, ...]."""

    @abstractmethod
    def read_shared(self, shared: _Shared, form: Form, target: MegaMoEWeights) -> None:
        """Read one shared expert into tensors [1, ...]."""

    def read_any(self, expert: int | _Shared, form: Form, target: MegaMoEWeights) -> None:
        """Read a routed expert or a shared one."""
        if isinstance(expert, _Shared):
            self.read_shared(expert, form, target)
        else:
            self.read(expert, form, target)

    def expected_count(self, num_experts: int | None) -> tuple[int | None, str]:
        """The number of experts, if it is known, and who says so."""
        if num_experts is not None:
            return num_experts, "num_experts"
        path = self.tensors.path
        config = (path.parent if path.is_file() else path) / CONFIG_NAME
        return _count_of_config(config), str(config)


class _SeparateExperts(_LayerTensors):
    def __init__(self, tensors: _Tensors, layer: int, naming: ExpertNaming) -> None:
        super().__init__(tensors, layer)
        self.naming = naming

    def present(self) -> set[int]:
        return self._experts_with(*self._endings)

    @property
    def has_pairs(self) -> bool:
        complete = set.intersection(*map(self._experts_with, self._endings))
        if self.naming.scale is not None:
            return bool(complete)
        return any(
            name in self.tensors and self.tensors.dtype(name) == "BF16"
            for expert in complete
            for name in self._names(expert)
        )

    @property
    def _endings(self) -> list[str]:
        naming = self.naming
        return [naming.weight] if naming.scale is None else [naming.weight, naming.scale]

    def _experts_with(self, *endings: str) -> set[int]:
        """Experts of which a tensor has a name with one of these endings."""
        found = set()
        for template in (self.naming.gate, self.naming.up, self.naming.down):
            marked = template.format(layer=self.layer, expert="\0")
            prefix, _, rest = marked.partition("\0")
            suffixes = f"({'|'.join(map(re.escape, endings))})"
            pattern = re.compile(r"(\d+)" + re.escape(rest).replace("\0", r"\1") + suffixes)
            for name in self.tensors.names():
                if name.startswith(prefix):
                    match = pattern.fullmatch(name, len(prefix))
                    if match is not None:
                        found.add(int(match.group(1)))
        return found

    def check(self, num_experts: int | None) -> int:
        path = self.tensors.path
        present = self.present()
        count, source = self.expected_count(num_experts)
        if count is None:
            raise CheckpointError(
                f"{path} does not say how many experts layer {self.layer} has: there is no "
                f"{source} with one of {', '.join(NUM_EXPERTS_KEYS)}; give num_experts. There are "
                f"tensors of {_numbers(present)}"
            )
        beyond = {expert for expert in present if expert >= count}
        if beyond:
            raise CheckpointError(
                f"{path} has tensors of {_numbers(beyond)} of layer {self.layer}, which has "
                f"{count} experts as {source} says"
            )
        missing = {
            name: expert
            for expert in range(count)
            for name in self._names(expert)
            if name not in self.tensors
        }
        if missing:
            lost = self.tensors.lost_files()
            files = f"; there is no file {_listed(lost)}" if lost else ""
            raise CheckpointError(
                f"{path} lacks {_numbers(set(missing.values()))} of the {count} of layer "
                f"{self.layer}, whole or in part: has no tensor {_listed(list(missing))}{files} "
                f"(the number of experts is that of {source})"
            )
        return count

    def sizes(self, expert: int) -> tuple[int, int]:
        first = self._names(expert)[0]
        shape = self.tensors.shape(first)
        if len(shape) != 2:
            raise CheckpointError(
                f"{first} must have shape [rows, K/2] of MXFP4, or [rows, K] of FP8 or BF16; got "
                f"{shape}"
            )
        return shape[0], shape[1] * self.form(expert).values_per_byte

    def form(self, expert: int) -> Form:
        return self._form_of(self._names(expert))

    def _form_of(self, names: Sequence[str]) -> Form:
        weight = names[0]
        dtype = self.tensors.dtype(weight)
        if dtype == "BF16" or self.naming.scale is None:
            return Bf16()
        scale = names[1]
        if dtype != "F8_E4M3":
            return Mxfp4()
        num_rows, num_columns = self.tensors.shape(weight)
        return Fp8.of(scale, self.tensors.read(scale), num_rows, num_columns)

    def read(self, expert: int, form: Form, target: MegaMoEWeights) -> None:
        self._read(self._names(expert), form, target)

    def read_shared(self, shared: _Shared, form: Form, target: MegaMoEWeights) -> None:
        path = self.tensors.path
        names = self._shared_names()
        missing = [name for name in names if name not in self.tensors]
        if missing:
            raise CheckpointError(
                f"{path} lacks the shared experts of layer {self.layer} with weights and scales "
                f"like those of its routed experts: has no tensor {_listed(missing)}; compute them "
                "beside the layer, without num_shared_experts"
            )
        own = self._form_of(names)
        if own != form:
            raise CheckpointError(
                f"{names[0]} must be of the format of the layer's routed experts, {form.weights}; "
                f"it is {own.weights}{', with other scales' if own.weights == form.weights else ''}"
                ": compute shared experts beside the layer, without num_shared_experts"
            )
        num_rows, width = self.tensors.shape(names[0])[0], target.l1.weight.shape[1] // 2
        if num_rows != shared.count * width:
            raise CheckpointError(
                f"{names[0]} must have {shared.count} x {width} rows for num_shared_experts "
                f"{shared.count} of the routed experts' width; got {num_rows}"
            )
        if shared.count > 1 and width % form.rows_of_scale:
            raise CheckpointError(
                f"{names[0]} must have experts of a multiple of {form.rows_of_scale} rows, which "
                f"share scales, for num_shared_experts {shared.count}; got {width}: compute shared "
                "experts beside the layer, without num_shared_experts"
            )
        self._read(names, form, target, shared)

    def _read(
        self,
        of_expert: Sequence[str],
        form: Form,
        target: MegaMoEWeights,
        part: _Shared | None = None,
    ) -> None:
        """part: the columns of down, and the rows of the others, that are read."""

        def read(name: str, dim: int) -> torch.Tensor:
            tensor = self.tensors.read(name)
            if part is None:
                return tensor
            return tensor.chunk(part.count, dim)[part.index].contiguous()

        (l1, l1_sf), (l2, l2_sf) = target
        rows, sf_rows = l1.shape[1] // 2, l1_sf.shape[1] // 2
        targets = (
            (l1[0, :rows], l1_sf[0, :sf_rows]),
            (l1[0, rows:], l1_sf[0, sf_rows:]),
            (l2[0], l2_sf[0]),
        )
        names = iter(of_expert)
        for (weight, sf), dim in zip(targets, (0, 0, 1), strict=True):
            weight_name = next(names)
            weight.copy_(form.weight(weight_name, read(weight_name, dim), weight))
            if self.naming.scale is not None:
                scale_name = next(names)
                scale = read(scale_name, dim)
                num_columns = weight.shape[1] * form.values_per_byte
                sf.copy_(form.scale(scale_name, scale, sf, num_columns))

    def _names(self, expert: int) -> list[str]:
        """Weight and scale, if there are scales, of gate, up and down."""
        naming = self.naming
        return self._with_suffixes(
            template.format(layer=self.layer, expert=expert)
            for template in (naming.gate, naming.up, naming.down)
        )

    def _shared_names(self) -> list[str]:
        """The same of the shared experts."""
        templates = (self.naming.gate, self.naming.up, self.naming.down)
        if not all(_ROUTED in template for template in templates):
            raise CheckpointError(
                f"naming must contain {_ROUTED!r}, in place of which {_SHARED!r} names shared "
                f"experts; got {templates[0]!r}"
            )
        return self._with_suffixes(
            template.replace(_ROUTED, _SHARED).format(layer=self.layer) for template in templates
        )

    def _with_suffixes(self, names: Iterable[str]) -> list[str]:
        return [name + suffix for name in names for suffix in self._endings]


class _StackedExperts(_LayerTensors):
    def __init__(self, tensors: _Tensors, layer: int, naming: StackedNaming) -> None:
        super().__init__(tensors, layer)
        self.naming = naming
        self.gate_up = naming.gate_up.format(layer=layer)
        self.down = naming.down.format(layer=layer)

    def present(self) -> set[int]:
        is_there = any(name in self.tensors for name in self._names())
        return {0} if is_there else set()

    @property
    def has_pairs(self) -> bool:
        names = self._names()
        return all(name in self.tensors for name in names) and (
            self.naming.scale is not None or self.tensors.dtype(names[0]) == "BF16"
        )

    def check(self, num_experts: int | None) -> int:
        path = self.tensors.path
        missing = [name for name in self._names() if name not in self.tensors]
        if missing:
            lost = self.tensors.lost_files()
            files = f"; there is no file {_listed(lost)}" if lost else ""
            raise CheckpointError(f"{path} has no tensor {_listed(missing)}{files}")
        counts = {name: self.tensors.shape(name)[0] for name in self._names()}
        count, source = self.expected_count(num_experts)
        if count is None:
            source = self._names()[0]
            count = counts[source]
        for name, own in counts.items():
            if own != count:
                raise CheckpointError(
                    f"{name} must have an entry for each of the {count} experts that {source} "
                    f"speaks of; got {own}"
                )
        return count

    def sizes(self, expert: int) -> tuple[int, int]:
        first = self.gate_up + self.naming.weight
        shape = self.tensors.shape(first)
        if self.naming.scale is None:
            if len(shape) != 3:
                raise CheckpointError(f"{first} must have shape [experts, rows, K]; got {shape}")
            return shape[1] // 2, shape[2]
        if len(shape) not in (3, 4):
            raise CheckpointError(
                f"{first} must have shape [experts, rows, K/32, 16] or [experts, rows, K/2]; "
                f"got {shape}"
            )
        return shape[1] // 2, 2 * prod(shape[2:])

    def bias_names(self) -> list[str]:
        both = [prefix + self.naming.bias for prefix in (self.gate_up, self.down)]
        there = [name for name in both if name in self.tensors]
        if len(there) == 1:
            (lost,) = set(both) - set(there)
            raise CheckpointError(f"{self.tensors.path} has {there[0]}, but no tensor {lost}")
        return there

    def read_biases(
        self, expert: int, num_l1_rows: int, num_l2_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        biases = []
        for name, num_rows in zip(self.bias_names(), (num_l1_rows, num_l2_rows), strict=True):
            shape = self.tensors.shape(name)
            if shape[1:] != (num_rows,) or shape[0] <= expert:
                raise CheckpointError(
                    f"{name} must have shape [experts, {num_rows}] to go with the weights; got "
                    f"{shape}"
                )
            bias = self.tensors.read_row(name, expert)
            if bias.dtype not in (torch.bfloat16, torch.float32):
                raise CheckpointError(f"{name} must be bfloat16 or float32; got {bias.dtype}")
            biases.append(bias)
        l1_bias, l2_bias = biases
        return _separate_rows(l1_bias) if self.naming.interleaved else l1_bias, l2_bias

    def form(self, expert: int) -> Form:
        return Bf16() if self.naming.scale is None else Mxfp4()

    def read_shared(self, shared: _Shared, form: Form, target: MegaMoEWeights) -> None:
        raise CheckpointError(
            f"num_shared_experts must be 0 where experts are stacked, as in {self.tensors.path}: "
            f"no naming of shared ones is known there; got {shared.count}"
        )

    def read(self, expert: int, form: Form, target: MegaMoEWeights) -> None:
        for prefix, (weight, sf) in ((self.gate_up, target.l1), (self.down, target.l2)):
            weight_name = prefix + self.naming.weight
            read = self.tensors.read_entry
            packed = form.weight(weight_name, read(weight_name, expert), weight[0])
            is_mixed = self.naming.interleaved and prefix == self.gate_up
            weight[0].copy_(_separate_rows(packed) if is_mixed else packed)
            if self.naming.scale is not None:
                scale_name = prefix + self.naming.scale
                num_columns = weight.shape[2] * form.values_per_byte
                words = form.scale(scale_name, read(scale_name, expert), sf[0], num_columns)
                sf[0].copy_(_separate_rows(words) if is_mixed else words)

    def _names(self) -> list[str]:
        return [
            prefix + suffix
            for prefix in (self.gate_up, self.down)
            for suffix in (self.naming.weight, self.naming.scale)
            if suffix is not None
        ]


def _find_layer(
    tensors: _Tensors, layer: int, naming: ExpertNaming | StackedNaming | None
) -> _LayerTensors:
    """The layer, by the given naming or by the first known one that has any of its pairs, or
    tensors at all."""
    partial: _LayerTensors | None = None
    for candidate in NAMINGS.values() if naming is None else (naming,):
        own: _LayerTensors
        if isinstance(candidate, StackedNaming):
            own = _StackedExperts(tensors, layer, candidate)
        else:
            own = _SeparateExperts(tensors, layer, candidate)
        if own.has_pairs:
            return own
        if partial is None and own.present():
            partial = own
    if partial is not None:
        return partial
    looked_for = ", ".join(
        own.gate_up if isinstance(own, StackedNaming) else own.gate
        for own in (NAMINGS.values() if naming is None else (naming,))
    ).format(layer=layer, expert=0)
    kind = "a known name" if naming is None else "the name given"
    raise CheckpointError(
        f"{tensors.path} has no experts of layer {layer} under {kind}; looked for {looked_for}"
    )


def _count_of_config(config: Path) -> int | None:
    """Experts of a layer by config.json, by its outermost part that speaks of them."""
    parts = [_read_config(config)] if config.is_file() else []
    while parts:
        counts = {
            key: part[key]
            for part in parts
            for key in NUM_EXPERTS_KEYS
            if part.get(key) is not None
        }
        if counts:
            return _one_count(counts, config)
        parts = [value for part in parts for value in part.values() if isinstance(value, dict)]
    return None


def _one_count(counts: Mapping[str, Any], config: Path) -> int:
    said = ", ".join(f"{key} {value!r}" for key, value in counts.items())
    first, *others = counts.values()
    if not isinstance(first, int) or isinstance(first, bool) or first < 1:
        raise CheckpointError(f"{config} must give experts as a positive int; got {said}")
    if any(other != first for other in others):
        raise CheckpointError(
            f"{config} must give one number of experts; got {said}: give num_experts"
        )
    return first


def _read_config(config: Path) -> dict[str, Any]:
    try:
        document = json.loads(config.read_text())
    except ValueError as error:
        raise CheckpointError(f"{config} must hold a JSON object: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{config} must hold a JSON object; got {type(document).__name__}")
    return document


def _write_config(config: Path, num_experts: int) -> None:
    """Say in config.json how many experts a layer has, beside what it says already."""
    count = _count_of_config(config)
    if count is None:
        document = _read_config(config) if config.is_file() else {}
        document["num_experts"] = num_experts
        config.write_text(json.dumps(document, indent=1) + "\n")
    elif count != num_experts:
        raise ValueError(f"layers must have the {count} experts of {config}; got {num_experts}")


def _numbers(experts: set[int]) -> str:
    """Words for some experts.

    >>> _numbers({3}), _numbers({0, 2, 3})
    ('expert 3', 'experts 0, 2, 3')
    """
    return f"expert{'s' if len(experts) > 1 else ''} {_listed(sorted(experts))}"


def _listed(names: list[Any]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(map(str, names[:_MAX_NAMED])) + more


def _separate_rows(rows: torch.Tensor) -> torch.Tensor:
    """Even rows (gate), then odd rows (up); of biases, too."""
    return torch.cat([rows[0::2], rows[1::2]])
