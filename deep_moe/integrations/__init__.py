"""Engines and trainers that call deep_moe, by their names. Each is imported when its adapter is
used."""

from typing import TYPE_CHECKING

from deep_moe.lazy import names_on_use

if TYPE_CHECKING:
    from . import megatron, sglang, transformers, vllm

__all__ = ["megatron", "sglang", "transformers", "vllm"]

if not TYPE_CHECKING:  # so that type checkers find names that do not exist
    __getattr__, __dir__ = names_on_use(__name__, {}, __all__)
