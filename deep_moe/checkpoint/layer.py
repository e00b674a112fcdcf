"""The experts of one layer of a checkpoint: which tensors are theirs, whether all are there and
nothing else is, and reading them.

Names, types and shapes are checked before the first byte of a tensor is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deep_moe.errors import CheckpointError
from deep_moe.weights.layers import ExpertWeights, LayerWeights
from deep_moe.weights.stored_form import StoredForm, Suffixes, Tensors

from .config import CONFIG_NAME, NUM_EXPERTS_KEYS, count_of_config
from .files import Files, first_missing, listed
from .forms import FOREIGN, FORMS, check_sizes, form_like
from .namings import NAMINGS, ExpertNaming, NamingName, StackedNaming
from .quantization import quantization_of


@dataclass(frozen=True)
class Matrix:
    """One of an expert's matrices. module: the names of its tensors, without suffixes. entry: of
    their first dimension. half, interleaved: of their rows, gate or up. part: (index, count, dim)
    of shared experts, all of which are in one."""

    module: str
    entry: int | None = None
    half: int | None = None
    interleaved: bool = False
    part: tuple[int, int, int] | None = None

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What is its own of a tensor: of a single number, all."""
        if tensor.numel() == 1:
            return tensor
        if self.entry is not None and tensor.dim() > 2:  # blocks [rows, K/32, 16]
            tensor = tensor.flatten(1)
        if self.half is not None:
            rows = self._share(name, tensor, 2, 0)
            first, step = (self.half, 2) if self.interleaved else (self.half * rows, 1)
            return tensor[first : first + rows * step : step]
        if self.part is not None:
            index, count, dim = self.part
            if dim == tensor.dim() == 1:  # of whole rows
                return tensor
            size = self._share(name, tensor, count, dim)
            return tensor.narrow(dim, index * size, size)
        return tensor

    def whole(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of all that the tensors hold, by those that are its own."""
        _, count, dim = self.part or (0, 1, 0)
        rows, columns = size
        return (rows, columns * count) if dim else (rows * count, columns)

    @staticmethod
    def _share(name: str, tensor: torch.Tensor, count: int, dim: int) -> int:
        if tensor.dim() <= dim or tensor.shape[dim] % count:
            raise CheckpointError(
                f"{name} must be of {count} equal parts along dimension {dim}; got "
                f"{list(tensor.shape)}"
            )
        return tensor.shape[dim] // count


class Layer(ABC):
    """The tensors of one layer's experts, by a naming."""

    form: StoredForm
    suffixes: Suffixes
    sizes: tuple[int, int]  # intermediate and hidden

    def __init__(self, files: Files, layer: int, naming: ExpertNaming | StackedNaming) -> None:
        self.files = files
        self.layer = layer
        self.bias = naming.bias
        self.beginnings = naming.beginnings(layer)
        self.spellings = [
            (form, suffixes)
            for form in FORMS
            for suffixes in (form.spellings if naming.suffixes is None else (naming.suffixes,))
            if suffixes.keys() == form.spellings[0].keys()
        ]
        if not self.spellings:
            raise ValueError(f"naming must have suffixes of a known format; got {naming.suffixes}")

    @property
    @abstractmethod
    def is_there(self) -> bool:
        """Whether there is any tensor of its experts."""

    @abstractmethod
    def count(self, num_experts: int | None) -> tuple[int, str]:
        """How many experts there are, and who says so. num_experts: what the caller says."""

    @abstractmethod
    def matrices(self, expert: int) -> list[Matrix]:
        """Gate, up and down."""

    @abstractmethod
    def shared_matrices(self, index: int, count: int) -> list[Matrix]:
        """The same of one of the shared experts."""

    @abstractmethod
    def modules(self) -> list[str]:
        """Of all experts that have tensors."""

    @abstractmethod
    def own_names(self) -> Iterable[str]:
        """Of all tensors that are in their place."""

    @abstractmethod
    def check_complete(self, count: int, source: str) -> None:
        """Raise if one of `count` experts lacks a tensor."""

    def check(self, count: int, source: str, experts: Sequence[int], num_shared: int) -> None:
        """Find the format, and raise unless all tensors are there, no others are, and those of
        `experts` and of shared experts are of its types and shapes."""
        first = self.matrices(experts[0])[0]
        quantization = quantization_of(self._folder)
        declared = None if quantization is None else quantization.of(first.module)
        form, self.suffixes = self._spelling(first)
        is_plain = len(self.suffixes) == 1
        if declared is not None and not is_plain:
            declared.refuse(self._labels(first)["weight"])
        self.check_complete(count, source)
        self.files.guard(self.beginnings)
        self.form, (num_rows, num_columns) = self._form_of(form, first)
        self.sizes = num_rows, num_columns * self.form.values_per_element
        if declared is not None and not is_plain:
            declared.check(self._labels(first)["weight"], self.form, self.suffixes, self.sizes)
        self._check_accounted(self.own_names(), self.modules(), self.bias)
        check_sizes(self._labels(first)["weight"], *self.sizes)
        if first.interleaved and self.form.rows_of_scale > 1:
            raise CheckpointError(
                f"{first.module} must have scales for single rows, for those of gate and up "
                f"alternate; got some for {self.form.rows_of_scale}"
            )
        for expert in dict.fromkeys(experts):
            self._check_shapes(self.matrices(expert))
        if num_shared:
            self._check_shared(num_shared)

    def read(self, matrices: Sequence[Matrix], target: ExpertWeights) -> None:
        """Read one expert into tensors [1, ...]."""
        for matrix, own in zip(matrices, in_matrices(target, len(matrices) - 1), strict=True):
            names = self._names(matrix).items()
            tensors = {key: self.files.read(name, matrix.entry) for key, name in names}
            self.form.put(self._labels(matrix), self._cut(matrix, self.form, tensors), own)

    def has_biases(self) -> bool:
        """Whether all experts have some; an error if only some have."""
        names = [module + self.bias for module in self.modules()]
        missing = [name for name in names if name not in self.files]
        if 0 < len(missing) < len(names):
            there = next(name for name in names if name in self.files)
            raise CheckpointError(
                f"{self.files.path} has {there}, but {self.files.missing(missing)}"
            )
        return not missing

    def read_biases(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of both linear layers, gate before up."""
        parts = []
        matrices = self.matrices(expert)
        for matrix, (num_rows, _) in zip(matrices, self._sizes_of(matrices), strict=True):
            name = matrix.module + self.bias
            bias = matrix.of(name, self.files.header(name, matrix.entry))
            if tuple(bias.shape) != (num_rows,):
                raise CheckpointError(
                    f"{name} must have {num_rows} rows to go with the weights; got "
                    f"{list(bias.shape)}"
                )
            if bias.dtype not in (torch.bfloat16, torch.float32):
                raise CheckpointError(f"{name} must be bfloat16 or float32; got {bias.dtype}")
            parts.append(matrix.of(name, self.files.read(name, matrix.entry)))
        *l1, down = parts
        if len({part.dtype for part in l1}) > 1:
            l1 = [part.float() for part in l1]
        return torch.cat(l1), down

    def token_scale(self, experts: Iterable[int]) -> torch.Tensor | None:
        """The largest by which tokens of Linear1 are quantized, float32 [1]; None if there is
        none."""
        suffix = self.form.token_scale
        if suffix is None:
            return None
        matrices = [matrix for expert in experts for matrix in self.matrices(expert)[:-1]]
        names = [(matrix.module + suffix, matrix.entry) for matrix in matrices]
        missing = [name for name, _ in names if name not in self.files]
        if len(missing) == len(names):
            return None
        if missing:
            there = next(name for name, _ in names if name in self.files)
            raise CheckpointError(
                f"{self.files.path} has {there}, but {self.files.missing(missing)}"
            )
        factors = []
        for name, entry in names:
            scale, label = self.files.read(name, entry), self.files.label(name)
            if scale.numel() != 1 or scale.dtype != torch.float32:
                raise CheckpointError(
                    f"{label} must be one float32; got {scale.dtype} {list(scale.shape)}"
                )
            factors.append(self.form.token_factor(label, scale))
        return torch.cat(factors).amax(dim=0, keepdim=True)

    def _names(self, matrix: Matrix) -> dict[str, str]:
        return {key: matrix.module + suffix for key, suffix in self.suffixes.items()}

    def _labels(self, matrix: Matrix) -> dict[str, str]:
        """The names for errors."""
        return {key: self.files.label(name) for key, name in self._names(matrix).items()}

    def _headers(self, matrix: Matrix) -> dict[str, torch.Tensor]:
        """Types and shapes of a matrix's tensors, whole ones."""
        names = self._names(matrix).items()
        return {key: self.files.header(name, matrix.entry) for key, name in names}

    def _cut(
        self, matrix: Matrix, form: StoredForm | type[StoredForm], tensors: Tensors
    ) -> dict[str, torch.Tensor]:
        """What is a matrix's own of tensors."""
        labels = self._labels(matrix)
        return {key: matrix.of(labels[key], own) for key, own in form.plain(tensors).items()}

    def _plain(self, matrix: Matrix, form: type[StoredForm], suffixes: Suffixes) -> Tensors:
        """Types and shapes of a matrix's tensors by some suffixes."""
        names = {key: matrix.module + suffix for key, suffix in suffixes.items()}
        return form.plain(
            {key: self.files.header(name, matrix.entry) for key, name in names.items()}
        )

    def _form_of(self, form: type[StoredForm], matrix: Matrix) -> tuple[StoredForm, torch.Size]:
        """With the shape of the weights' tensor."""
        headers, labels = self._cut(matrix, form, self._headers(matrix)), self._labels(matrix)
        shape = headers["weight"].shape
        if len(shape) != 2:
            raise CheckpointError(
                f"{labels['weight']} must be a matrix for each expert; got {list(shape)}"
            )
        return form.of(labels, headers), shape

    def _spelling(self, matrix: Matrix) -> tuple[type[StoredForm], Suffixes]:
        """The known suffixes of which there are the most, of those that go with the type of this
        matrix's weights, if they are there; of as many those that go with the other types, and with
        the shapes, too."""
        module = matrix.module
        suffixes = dict.fromkeys(suffix for _, own in self.spellings for suffix in own.values())
        dtypes = {
            suffix: self.files.header(module + suffix).dtype
            for suffix in suffixes
            if module + suffix in self.files
        }
        weights = {own["weight"] for _, own in self.spellings} & dtypes.keys()
        candidates = [
            (form, own)
            for form, own in self.spellings
            if not weights or dtypes.get(own["weight"]) in form.dtypes["weight"]
        ]
        if not candidates:
            allowed = " or ".join(
                f"{', '.join(map(str, form.dtypes['weight']))} ({form.weights})"
                for form in dict.fromkeys(form for form, _ in self.spellings)
            )
            suffix = next(suffix for suffix in suffixes if suffix in weights)
            raise CheckpointError(f"{module}{suffix} must be {allowed}; got {dtypes[suffix]}")
        modules = self.modules()

        def rank(spelling: tuple[type[StoredForm], Suffixes]) -> tuple[int, int, bool]:
            form, own = spelling
            num_fitting = sum(dtypes.get(suffix) in form.dtypes[key] for key, suffix in own.items())
            return (
                sum(name + suffix in self.files for name in modules for suffix in own.values()),
                num_fitting,
                num_fitting == len(own) and form.is_like(self._plain(matrix, form, own)),
            )

        return max(candidates, key=rank)

    def _check_accounted(self, names: Iterable[str], modules: list[str], *also: str) -> None:
        """Raise if there are other names than those of modules with known suffixes."""
        suffixes = [*self.suffixes.values(), *self.form.beside, *also]
        known = {module + suffix for module in modules for suffix in suffixes}
        strange = [name for name in names if name not in known]
        if strange:
            why = next((f" ({FOREIGN[key]})" for key in FOREIGN if key in strange[0]), "")
            raise CheckpointError(
                f"{self.files.path} has tensors of experts of layer {self.layer} that would be "
                f"ignored beside {', '.join(self.suffixes.values())}: {listed(strange)}{why}"
            )

    def _sizes_of(self, matrices: Sequence[Matrix]) -> list[tuple[int, int]]:
        """Rows and columns of an expert's matrices."""
        intermediate, hidden = self.sizes
        return [(intermediate, hidden)] * (len(matrices) - 1) + [(hidden, intermediate)]

    def _check_shapes(self, matrices: Sequence[Matrix]) -> None:
        for matrix, size in zip(matrices, self._sizes_of(matrices), strict=True):
            headers = self._cut(matrix, self.form, self._headers(matrix))
            self.form.check(self._labels(matrix), headers, *size)
            for suffix in self.form.beside:
                name = matrix.module + suffix
                if name in self.files:
                    beside = self.files.read(name, matrix.entry)
                    self.form.check_beside(
                        suffix, self.files.label(name), beside, *matrix.whole(size)
                    )

    def _check_shared(self, count: int) -> None:
        matrices = self.shared_matrices(0, count)
        names = [name for matrix in matrices for name in self._names(matrix).values()]
        missing = [name for name in names if name not in self.files]
        beside = "compute shared experts beside the layer, without num_shared_experts"
        if missing:
            raise CheckpointError(
                f"{self.files.path} lacks the shared experts of layer {self.layer} with tensors "
                f"like those of its routed experts: {self.files.missing(missing)}; {beside}"
            )
        modules = [matrix.module for matrix in matrices]
        start = modules[0][: modules[0].rfind(".") + 1]
        self.files.guard((*self.beginnings, start))
        self._check_accounted((n for n in self.files.file_of if n.startswith(start)), modules)
        whole = replace(matrices[0], part=None)
        headers = self._headers(whole)
        form = form_like(headers, type(self.form))
        own = None if form is None else self._form_of(form, whole)[0]
        if form is None or own != self.form:
            got = "something else" if own is None else own.weights
            scales = ", with other scales" if got == self.form.weights else ""
            raise CheckpointError(
                f"{names[0]} must be of the format of the layer's routed experts, "
                f"{self.form.weights}; it is {got}{scales}: {beside}"
            )
        num_rows, width = self._form_of(form, whole)[1][0], self.sizes[0]
        if num_rows != count * width:
            raise CheckpointError(
                f"{names[0]} must have {count} x {width} rows for num_shared_experts {count} of "
                f"the routed experts' width; got {num_rows}"
            )
        if count > 1 and width % self.form.rows_of_scale:
            raise CheckpointError(
                f"{names[0]} must have experts of a multiple of {self.form.rows_of_scale} rows, "
                f"which share scales, for num_shared_experts {count}; got {width}: {beside}"
            )
        for index in range(count):
            self._check_shapes(self.shared_matrices(index, count))

    def _count(self, num_experts: int | None) -> tuple[int | None, str]:
        if num_experts is not None:
            return num_experts, "num_experts"
        config = self._folder / CONFIG_NAME
        return count_of_config(config), str(config)

    @property
    def _folder(self) -> Path:
        path = self.files.path
        return path.parent if path.is_file() else path


class SeparateExperts(Layer):
    def __init__(self, files: Files, layer: int, naming: ExpertNaming) -> None:
        super().__init__(files, layer, naming)
        self.naming = naming
        self._own = dict(naming.numbers(layer, list(files.file_of)))
        self.present = {expert for expert in self._own.values() if expert is not None}

    @property
    def is_there(self) -> bool:
        return bool(self.present)

    def modules(self) -> list[str]:
        return [
            own
            for expert in sorted(self.present)
            for own in self.naming.modules(self.layer, expert)
        ]

    def own_names(self) -> Iterable[str]:
        return self._own

    def matrices(self, expert: int) -> list[Matrix]:
        return [Matrix(module) for module in self.naming.modules(self.layer, expert)]

    def shared_matrices(self, index: int, count: int) -> list[Matrix]:
        modules = self.naming.shared_modules(self.layer)
        return [
            Matrix(module, part=(index, count, dim))
            for module, dim in zip(modules, [0] * (len(modules) - 1) + [1], strict=True)
        ]

    def count(self, num_experts: int | None) -> tuple[int, str]:
        count, source = self._count(num_experts)
        if count is None:
            raise CheckpointError(
                f"{self.files.path} does not say how many experts layer {self.layer} has: there is "
                f"no {source} with one of {', '.join(NUM_EXPERTS_KEYS)}; give num_experts. There "
                f"are tensors of {_numbers(self.present)}"
            )
        beyond = {expert for expert in self.present if expert >= count}
        if beyond:
            raise CheckpointError(
                f"{self.files.path} has tensors of {_numbers(beyond)} of layer {self.layer}, which "
                f"has {count} experts as {source} says"
            )
        return count, source

    def check_complete(self, count: int, source: str) -> None:
        def names(expert: int) -> list[str]:
            return [n for own in self.matrices(expert) for n in self._names(own).values()]

        lacking = {
            expert: [name for name in names(expert) if name not in self.files]
            for expert in [*self.present, *first_missing(self.present, count)]
        }
        lacking = {expert: lacking[expert] for expert in sorted(lacking) if lacking[expert]}
        if not lacking:
            return
        more = count - len(self.present | lacking.keys())  # of which there is nothing
        missing = [name for own in lacking.values() for name in own]
        raise CheckpointError(
            f"{self.files.path} lacks {_numbers(lacking, more)} of the {count} of layer "
            f"{self.layer}, whole or in part: "
            f"{self.files.missing(missing, more * len(names(0)))} (the number of experts is that "
            f"of {source})"
        )


class StackedExperts(Layer):
    def __init__(self, files: Files, layer: int, naming: StackedNaming) -> None:
        super().__init__(files, layer, naming)
        self.naming = naming
        self.suffixes = naming.suffixes
        self.gate_up, self.down = naming.modules(layer)

    @property
    def is_there(self) -> bool:
        return any(name in self.files for name in self._stacks())

    def modules(self) -> list[str]:
        return [self.gate_up, self.down]

    def own_names(self) -> Iterable[str]:
        return (n for n in self.files.file_of if n.startswith(self.beginnings))

    def matrices(self, expert: int) -> list[Matrix]:
        gate_up = Matrix(self.gate_up, expert, 0, self.naming.interleaved)
        return [gate_up, replace(gate_up, half=1), Matrix(self.down, expert)]

    def shared_matrices(self, index: int, count: int) -> list[Matrix]:
        raise CheckpointError(
            f"num_shared_experts must be 0 where experts are stacked, as in {self.files.path}: "
            f"no naming of shared ones is known there; got {count}"
        )

    def count(self, num_experts: int | None) -> tuple[int, str]:
        count, source = self._count(num_experts)
        if count is None:
            source = self._stacks()[0]
            count = next(iter(self.files.header(source).shape), 0)
        if count == 0:
            raise CheckpointError(f"{self.files.label(source)} must have experts; got none")
        return count, source

    def check_complete(self, count: int, source: str) -> None:
        missing = [name for name in self._stacks() if name not in self.files]
        if missing:
            raise CheckpointError(f"{self.files.path} {self.files.missing(missing)}")
        for name in self._stacks():
            own = next(iter(self.files.header(name).shape), None)
            if own != count:
                raise CheckpointError(
                    f"{name} must have an entry for each of the {count} experts that {source} "
                    f"speaks of; got {own}"
                )

    def _stacks(self) -> list[str]:
        return [own + suffix for own in self.modules() for suffix in self.suffixes.values()]


def in_matrices(weights: ExpertWeights, num_l1_matrices: int) -> list[LayerWeights]:
    """The tensors of one expert, [1, ...], by its matrices: gate, up and down."""
    l1 = [tensor[0].tensor_split(num_l1_matrices) for tensor in weights.l1]
    return [
        *(LayerWeights(*own) for own in zip(*l1, strict=True)),
        LayerWeights(*(tensor[0] for tensor in weights.l2)),
    ]


def find_layer(
    files: Files, layer: int, naming: NamingName | ExpertNaming | StackedNaming | None
) -> Layer:
    """The layer, by the given naming or by the first known one that it has any tensors of."""
    if isinstance(naming, str) and naming not in NAMINGS:
        raise ValueError(f"naming must be one of {', '.join(NAMINGS)}; got {naming!r}")
    known: dict[str, ExpertNaming | StackedNaming] = {
        str(name): own for name, own in NAMINGS.items()
    }
    if naming is not None:
        known = {"": NAMINGS[naming] if isinstance(naming, str) else naming}
    layers = {name: _layer(files, layer, own) for name, own in known.items()}
    there = [name for name, own in layers.items() if own.is_there]
    several = [name for name in there if not name.startswith("mtp")]
    if len(several) > 1:
        raise CheckpointError(
            f"{files.path} has experts of layer {layer} by more than one naming: give naming, one "
            f"of {', '.join(several)}"
        )
    if there:
        return layers[there[0]]
    looked_for = ", ".join(
        own.modules(layer)[0] if isinstance(own, StackedNaming) else own.modules(layer, 0)[0]
        for own in known.values()
    )
    kind = "a known name" if naming is None else "the name given"
    raise CheckpointError(
        f"{files.path} has no experts of layer {layer} under {kind}; looked for {looked_for}"
    )


def _layer(files: Files, layer: int, naming: ExpertNaming | StackedNaming) -> Layer:
    if isinstance(naming, StackedNaming):
        return StackedExperts(files, layer, naming)
    return SeparateExperts(files, layer, naming)


def _numbers(experts: Iterable[int], more: int = 0) -> str:
    """Words for some experts, `more` of which are not among them.

    >>> _numbers({3}), _numbers({0, 2, 3})
    ('expert 3', 'experts 0, 2, 3')
    """
    experts = sorted(experts)
    return f"expert{'s' if len(experts) > 1 else ''} {listed(experts, more)}"
