"""deep_moe as a value of vLLM's own `--moe-backend`, beside the kernels that vLLM has."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic.dataclasses import rebuild_dataclass
from vllm.config import kernel

BACKEND = "deep_moe"

_OPTION = "moe_backend"


def add_backend() -> None:
    """From now on, vLLM's config of kernels takes the name, and its commands list it. vLLM loads
    plugins before it makes a command's options, and in every process."""
    names = get_args(kernel.MoEBackend)
    if BACKEND in names:
        return
    literal: Any = Literal
    with_ours = (*names, BACKEND)
    backends, config = literal[with_ours], kernel.KernelConfig
    config.__annotations__[_OPTION] = backends
    config.__dataclass_fields__[_OPTION].type = backends
    rebuild_dataclass(config, force=True)
    kernel.MoEBackend = backends


def take_request(moe: Any) -> bool:
    """Whether a layer's `moe_config` asks for deep_moe by name. vLLM's methods, which make the
    tensors in any case, do not know the name, and choose by themselves from then on."""
    if moe.moe_backend != BACKEND:
        return False
    moe.moe_backend = "auto"
    return True
