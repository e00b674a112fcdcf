"""A whole expert-parallel MoE layer as one persistent CUDA kernel, on GPUs or emulated on a CPU.

Public names are imported when they are first used: `import deep_moe` loads neither torch nor CUDA.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .buffer import SymmBuffer, get_symm_buffer_for_mega_moe
    from .emulated_ranks import EmulatedRanks
    from .errors import (
        CacheError,
        CheckpointError,
        CompileError,
        DeepMoEError,
        MegaMoEError,
        MegaMoETimeoutError,
        MissingPackageError,
    )
    from .input_preparation import prepare_inputs
    from .mega_moe import fp8_fp4_mega_moe
    from .weights import transform_weights_for_mega_moe

__version__ = "0.1.0"

_SOURCE_ROOT = Path(__file__).resolve().parent.parent
if (_SOURCE_ROOT / "jit" / "template").is_dir() and not (Path(__file__).parent / "jit").is_dir():
    # A source checkout keeps jit, heuristics and emulator beside this folder; installed, they are
    # inside it.
    __path__.append(str(_SOURCE_ROOT))

_MODULES = {
    "CacheError": "errors",
    "CheckpointError": "errors",
    "CompileError": "errors",
    "DeepMoEError": "errors",
    "EmulatedRanks": "emulated_ranks",
    "MegaMoEError": "errors",
    "MegaMoETimeoutError": "errors",
    "MissingPackageError": "errors",
    "SymmBuffer": "buffer",
    "fp8_fp4_mega_moe": "mega_moe",
    "get_symm_buffer_for_mega_moe": "buffer",
    "prepare_inputs": "input_preparation",
    "transform_weights_for_mega_moe": "weights",
}

__all__ = [
    "CacheError",
    "CheckpointError",
    "CompileError",
    "DeepMoEError",
    "EmulatedRanks",
    "MegaMoEError",
    "MegaMoETimeoutError",
    "MissingPackageError",
    "SymmBuffer",
    "fp8_fp4_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "prepare_inputs",
    "transform_weights_for_mega_moe",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
