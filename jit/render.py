"""Renders the translation unit of a kernel from its config."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from deep_moe.heuristics.low_latency import LowLatencyConfig
from deep_moe.heuristics.prepare_inputs import PrepareInputsConfig
from deep_moe.heuristics.throughput import ThroughputConfig
from deep_moe.heuristics.training import TrainingConfig
from deep_moe.targets import MegaMoEConfig
from deep_moe.tokens import token_format

from .cpp_structs import CppStruct, layout_checks
from .kernel_args import (
    ARGS_OF_STEP,
    LowLatencyArgs,
    PrepareInputsArgs,
    SplitTraceCta,
    ThroughputArgs,
    TraceAnchor,
    TraceCta,
    TraceRecord,
    WaitStatus,
    kernel_args,
)

if TYPE_CHECKING:
    import jinja2

    from deep_moe.activations import Activation
    from deep_moe.heuristics.segments import Layout

# By whether there are some: the header in deep_moe/biases, and its struct.
_BIAS_POLICIES = {False: ("none", "NoBiases"), True: ("per_expert", "PerExpertBiases")}

# As the header library names them, which the translation unit includes first.
_CPP_TYPES = {
    "u8": "uint8_t",
    "bf16": "uint16_t",
    "u32": "uint32_t",
    "i32": "int32_t",
    "f32": "float",
    "u64": "uint64_t",
    "i64": "int64_t",
}


@dataclass(frozen=True)
class _Constant:
    name: str
    type: str
    value: str


@dataclass(frozen=True)
class _LayoutStruct:
    name: str
    constants: tuple[_Constant, ...]
    element_types: Mapping[str, str]  # C++ type by name


class KernelConfig(Protocol):
    """What each kernel's config says of it. kernel_name: its extern "C" entry. is_cooperative:
    whether its CTAs wait for each other, so that all must be resident. activation: what is compiled
    in, if any is. smem_bytes: dynamic shared memory of a CTA."""

    @property
    def arch(self) -> str: ...
    @property
    def kernel_name(self) -> str: ...
    @property
    def is_cooperative(self) -> bool: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def smem_bytes(self) -> int: ...
    @property
    def activation(self) -> Activation | None: ...
    def kernel_fields(self) -> dict[str, int | float | bool]: ...
    def __hash__(self) -> int: ...


@singledispatch
def render_kernel(config: KernelConfig) -> str:
    """CUDA C++ source of the kernel for `config`."""
    raise TypeError(f"config must be that of a kernel; got {type(config).__name__}")


@render_kernel.register
def _mega_moe(config: MegaMoEConfig) -> str:
    target, weights = config.target, config.target_weights
    bias_header, bias_policy = _BIAS_POLICIES[config.biases]
    token_headers, token_source = _token_source(config)
    layouts = [
        _layout_struct("Symm", config.symm_buffer_layout, "unsigned long long"),
        _layout_struct("Smem", config.smem_layout, "unsigned int"),
    ]
    if config.tmem_layout is not None:
        layouts.append(_layout_struct("Tmem", config.tmem_layout, "unsigned int"))
    return _template("mega_moe.cu.j2").render(
        arch=config.arch,
        foreign_headers=target.foreign_headers,
        header=target.header,
        policy_headers=[
            f"deep_moe/weights/{weights.weights}/{target.kernel}.cuh",
            f"deep_moe/biases/{bias_header}.cuh",
            *token_headers,
        ],
        types={
            "Weights": f"deep_moe::{target.kernel}::{weights.policy}",
            "Biases": f"deep_moe::{bias_policy}",
            "Tokens": token_source,
        },
        namespace=target.kernel,
        kernel=config.kernel_name,
        has_clusters=config.cluster_size > 1,
        constants=_constants(config.kernel_fields()),
        layouts=layouts,
        activation=config.activation,
        activation_constants=_constants(config.activation.parameters),
        layout_checks=list(
            layout_checks(
                kernel_args(target.kernel), WaitStatus, TraceRecord, TraceAnchor, TraceCta
            )
        ),
    )


def _token_source(config: MegaMoEConfig) -> tuple[tuple[str, ...], str]:
    """Where tokens come from: headers, and the type."""
    if config.local_tokens is None:
        return ("deep_moe/token_sources/routed.cuh",), "deep_moe::RoutedTokens"
    scales = token_format(config.local_tokens)
    headers = (
        f"deep_moe/tokens/{scales.name}/local_scales.cuh",
        "deep_moe/token_sources/local.cuh",
    )
    return headers, f"deep_moe::LocalTokens<deep_moe::{scales.local_scales}>"


@render_kernel.register
def _prepare_inputs(config: PrepareInputsConfig) -> str:
    return _template("prepare_inputs.cu.j2").render(
        arch=config.arch,
        kernel=config.kernel_name,
        constants=_constants(config.kernel_fields()),
        layout_checks=list(layout_checks(PrepareInputsArgs)),
    )


@render_kernel.register
def _low_latency(config: LowLatencyConfig) -> str:
    structs = (LowLatencyArgs, SplitTraceCta, WaitStatus)
    return _render_split(config, f"low_latency_{config.step}", structs)


@render_kernel.register
def _throughput(config: ThroughputConfig) -> str:
    return _render_split(config, f"throughput_{config.step}", (ThroughputArgs, WaitStatus))


def _render_split(
    config: LowLatencyConfig | ThroughputConfig,
    function: str,
    structs: tuple[type[CppStruct], ...],
) -> str:
    """function: of the header library, in the header of its name. structs: the arguments first."""
    return _template("split.cu.j2").render(
        arch=config.arch,
        function=function,
        args=structs[0].__name__,
        constants=_constants(config.kernel_fields()),
        layouts=[
            _layout_struct("Symm", config.buffer_layout, "unsigned long long"),
            _layout_struct("Smem", config.smem_layout, "unsigned int"),
        ],
        layout_checks=list(layout_checks(*structs)),
    )


@render_kernel.register
def _training(config: TrainingConfig) -> str:
    args, activation = ARGS_OF_STEP[config.step], config.activation
    types, activation_constants = {}, []
    if activation is not None:
        accurate = "false"  # these kernels wait for memory, not for exponentials
        types["Activation"] = f"deep_moe::{activation.struct}<ActivationParameters, {accurate}>"
        activation_constants = _constants(activation.parameters)
    return _template("training.cu.j2").render(
        arch=config.arch,
        step=config.step,
        kernel=config.kernel_name,
        args=args.__name__,
        has_clusters=config.kernel_fields().get("cluster_size", 1) > 1,
        constants=_constants(config.kernel_fields()),
        types=types,
        activation=activation,
        activation_constants=activation_constants,
        layout_checks=list(layout_checks(args, *_structs_in(args))),
    )


def _structs_in(args: type[CppStruct]) -> list[type[CppStruct]]:
    """Those of its members, each once."""
    kinds = dict.fromkeys(field[1] for field in args._fields_)
    return [kind for kind in kinds if issubclass(kind, CppStruct)]


@lru_cache(maxsize=4)
def _template(name: str) -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "template"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # C++, not HTML
    )
    return environment.get_template(name)


def _layout_struct(name: str, layout: Layout, offset_type: str) -> _LayoutStruct:
    """Offsets and strides are of `offset_type`, dimensions are unsigned int."""
    suffix = "ull" if offset_type == "unsigned long long" else "u"
    places = (
        _Constant(key, offset_type, f"{value}{suffix}") for key, value in layout.constants().items()
    )
    dimensions = (_constant(key, value) for key, value in layout.dimensions().items())
    element_types = {key: _CPP_TYPES[dtype] for key, dtype in layout.element_types().items()}
    return _LayoutStruct(name, (*places, *dimensions), element_types)


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
