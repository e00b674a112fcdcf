"""`Declared`: a config's description of a module's weights, and whether its tensors match."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deep_moe.errors import CheckpointError
from deep_moe.formats.sizes import WHOLE_MATRIX, WHOLE_ROW
from deep_moe.weights.stored_form import StoredForm

Block = tuple[int, int]


@dataclass(frozen=True)
class Declared:
    """words: what the config says, and where, for errors. weights: names of the formats that this
    may be. blocks: rows and columns that may share a scale; empty: the config does not say.
    refusal: why such weights are not taken. suffixes: of tensors, by their meaning, where those
    that mean something else have other names.
    """

    words: str
    weights: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()
    refusal: str | None = None
    suffixes: Mapping[str, str] = field(default_factory=dict)

    def refuse(self, name: str) -> None:
        """Raise CheckpointError if such weights are not taken. name: of their tensor."""
        if self.refusal is not None:
            raise CheckpointError(f"{name}: {self.words}: {self.refusal}")

    def check(
        self, name: str, form: StoredForm, suffixes: Mapping[str, str], size: tuple[int, int]
    ) -> None:
        """Raise CheckpointError unless weights, whose tensors are of a form and have such suffixes,
        are what is said of them. name: of their tensor. size: rows and columns, for a block may be
        the whole matrix."""
        self.refuse(name)
        if form.weights not in self.weights:
            raise CheckpointError(
                f"{name} must be {' or '.join(self.weights)}, as {self.words}; by its tensors it "
                f"is {form.weights}"
            )
        block = form.scale_block
        allowed_blocks = {_cut(allowed, size) for allowed in self.blocks}
        if self.blocks and block is not None and _cut(block, size) not in allowed_blocks:
            allowed = " or ".join(map(block_words, self.blocks))
            raise CheckpointError(
                f"{name} must have a scale for {allowed}, as {self.words}; it has one for "
                f"{block_words(block)}"
            )
        for key, suffix in self.suffixes.items():
            if suffixes.get(key, suffix) != suffix:
                raise CheckpointError(
                    f"{name} must have {suffix} beside it, as {self.words}; it has "
                    f"{suffixes[key]}, which has another meaning"
                )


class Quantization(ABC):
    """How a checkpoint's weights are quantized, by its config."""

    @abstractmethod
    def of(self, module: str) -> Declared | None:
        """What is said of a module, by its name in the files; None, if nothing, or that its weights
        are not quantized."""


def _cut(block: Block, size: tuple[int, int]) -> Block:
    (rows, columns), (num_rows, num_columns) = block, size
    return min(rows, num_rows), min(columns, num_columns)


def block_words(block: Block) -> str:
    """
    >>> block_words((1, 32)), block_words((128, 128))
    ('32 values', '128 x 128 values')
    >>> block_words(WHOLE_ROW), block_words(WHOLE_MATRIX)
    ('each row', 'the whole matrix')
    """
    if block in (WHOLE_ROW, WHOLE_MATRIX):
        return "each row" if block == WHOLE_ROW else "the whole matrix"
    rows, columns = block
    return f"{columns} values" if rows == 1 else f"{rows} x {columns} values"


def patterns_of(source: str, key: str, part: Mapping[str, Any]) -> list[str]:
    """A list of modules in a config."""
    found = part.get(key) or []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise CheckpointError(f"{source} must have a list of modules as {key}; got {found!r:.100}")
    return found


def group_size_of(source: str, part: Mapping[str, Any]) -> int | None:
    """Values that share a scale, by a config; None, if it does not say."""
    found = part.get("group_size")
    if found is None or found == 0:
        return None
    if isinstance(found, bool) or not str(found).isdecimal():
        raise CheckpointError(f"{source} must have a number as group_size; got {found!r:.100}")
    return int(found)
