"""Renders the translation unit of a kernel from its config."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from .kernel_args import (
    KernelArgs,
    PrepareInputsArgs,
    TraceAnchor,
    TraceCta,
    TraceRecord,
    WaitStatus,
    layout_checks,
)

if TYPE_CHECKING:
    import jinja2

    from deep_moe.heuristics.config import MegaMoEConfig
    from deep_moe.heuristics.prepare_inputs import PrepareInputsConfig

KERNEL_NAME = "mega_moe_kernel"
PREPARE_INPUTS_NAME = "prepare_inputs_kernel"

# Folder and namespace of each target's kernel in the header library.
_NAMESPACES = {"sm_100a": "sm100", "sm_90a": "sm90"}


@dataclass(frozen=True)
class _Constant:
    name: str
    type: str
    value: str


@dataclass(frozen=True)
class _LayoutStruct:
    name: str
    constants: tuple[_Constant, ...]


def render_kernel(config: MegaMoEConfig) -> str:
    """CUDA C++ source of the Mega MoE kernel for `config`."""
    namespace = _NAMESPACES[config.arch]
    layouts = [
        _layout_struct("Symm", config.symm_buffer_layout.constants(), "unsigned long long"),
        _layout_struct("Smem", config.smem_layout.constants(), "unsigned int"),
    ]
    if config.tmem_layout is not None:
        layouts.append(_layout_struct("Tmem", config.tmem_layout.constants(), "unsigned int"))
    return _template("mega_moe.cu.j2").render(
        arch=config.arch,
        header=f"deep_moe/{namespace}/mega_moe.cuh",
        namespace=namespace,
        kernel=KERNEL_NAME,
        has_clusters=config.cluster_size > 1,
        constants=_constants(config.kernel_fields()),
        layouts=layouts,
        layout_checks=list(
            layout_checks(KernelArgs, WaitStatus, TraceRecord, TraceAnchor, TraceCta)
        ),
    )


def render_prepare_inputs(config: PrepareInputsConfig) -> str:
    """CUDA C++ source of the kernel that prepares inputs."""
    return _template("prepare_inputs.cu.j2").render(
        arch=config.arch,
        kernel=PREPARE_INPUTS_NAME,
        constants=_constants(config.kernel_fields()),
        layout_checks=list(layout_checks(PrepareInputsArgs)),
    )


@lru_cache(maxsize=2)
def _template(name: str) -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "template"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # C++, not HTML
    )
    return environment.get_template(name)


def _layout_struct(name: str, constants: Mapping[str, int], type_name: str) -> _LayoutStruct:
    suffix = "ull" if type_name == "unsigned long long" else "u"
    return _LayoutStruct(
        name,
        tuple(_Constant(key, type_name, f"{value}{suffix}") for key, value in constants.items()),
    )


def _constants(fields: Mapping[str, int | float | bool]) -> list[_Constant]:
    return [_constant(name, value) for name, value in fields.items()]


def _constant(name: str, value: int | float | bool) -> _Constant:
    if isinstance(value, bool):
        return _Constant(name, "bool", "true" if value else "false")
    if isinstance(value, float):
        # By bits: a decimal literal could round, and infinity has no literal at all.
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        return _Constant(name, "float", f"__builtin_bit_cast(float, {bits:#010x}u)")
    return _Constant(name, "unsigned int", f"{value}u")
