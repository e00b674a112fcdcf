"""The call: checks its arguments, picks the kernel, and runs it on a GPU or in the emulator.

For PyTorch it is one operator, `deep_moe::mega_moe`, which writes `y` and `stats`. The operator's
inputs include the four views of the buffer that the caller fills. In plain Python they are those
views; under torch.compile, which turns writes into new tensors, they may be other tensors, and are
copied into the buffer first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from deep_moe import jit
from deep_moe.heuristics.config import ARCHITECTURES, MegaMoEConfig, choose_config
from deep_moe.heuristics.shape import MoEShape
from deep_moe.jit.cache import CompiledKernel
from deep_moe.jit.kernel_args import KernelArgs, TensorMapImage
from deep_moe.jit.launch import CudaLauncher, MemoryRegion, RankLaunch, run_emulated
from deep_moe.jit.sm90_maps import sm90_tensor_maps, sm90_weight_pointers
from deep_moe.jit.sm100_maps import sm100_tensor_maps

from .arguments import check_contiguous, check_start, check_tensor, require_type
from .buffer import SymmBuffer, describe_difference
from .symm_memory import HostMemory
from .tuning_tables import find_tuning
from .weights import WEIGHT_LAYOUTS, weight_arch

RECIPE = (1, 1, 32)  # scales per token, per weight row, and per 32 values along K
ACTIVATION = "swiglu"
EMULATED_NUM_SMS = 4
DEFAULT_TIMEOUT_S = 60.0
# A peer's part of a call takes this long in the emulator, not microseconds.
DEFAULT_EMULATED_TIMEOUT_S = 600.0
# Distinct (weights, tile) pairs whose arguments are kept per buffer; a model has one per layer.
_MAX_STANDING_ARGS = 1024

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class CallOptions:
    """The arguments of a call that are not tensors, checked."""

    recipe: tuple[int, ...] = RECIPE
    activation: str = ACTIVATION
    activation_clamp: float | None = None
    fast_math: bool = True
    arch: str | None = None
    num_sms: int | None = None
    overrides: tuple[tuple[str, int], ...] = ()
    timeout_s: float | None = None
    schedule_seed: int = 0
    checked: bool | None = None

    def __post_init__(self) -> None:
        if self.recipe != RECIPE:
            raise ValueError(
                f"recipe must be {RECIPE}, one scale per 32 values along K; got {self.recipe}"
            )
        if self.activation != ACTIVATION:
            raise ValueError(f"activation must be {ACTIVATION!r}; got {self.activation!r}")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s must be a positive number; got {self.timeout_s}")
        if self.schedule_seed < 0:
            raise ValueError(f"schedule_seed must be at least 0; got {self.schedule_seed}")


@dataclass(frozen=True)
class MegaMoELaunch(RankLaunch):
    """One rank's part of a Mega MoE call."""

    config: MegaMoEConfig


def fp8_fp4_mega_moe(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = RECIPE,
    activation: str = ACTIVATION,
    activation_clamp: float | None = None,
    fast_math: bool = True,
    *,
    arch: str | None = None,
    num_sms: int | None = None,
    overrides: Mapping[str, int] | None = None,
    timeout_s: float | None = None,
    schedule_seed: int = 0,
    checked: bool | None = None,
) -> None:
    """One MoE layer over all ranks of the buffer's group: writes y, bfloat16 [tokens, hidden].

    The rows 0 .. tokens-1 of `sym_buffer`'s views are the input. Tokens may be 0 and may differ
    between ranks; every rank must call.

    l1_weights, l2_weights: what `transform_weights_for_mega_moe` returned.
    cumulative_local_expert_recv_stats: int32 [local experts]; each gets the number of tokens that
        this call sent to it added.
    recipe, activation: only the defaults are allowed.
    activation_clamp: positive bound of gate and up, or None. fast_math: approximate exponentials.
    arch: "sm_100a" and so on; by default that of the buffer's GPU, sm_100a on a CPU.
    num_sms: CTAs, equal on all ranks; by default all SMs of the GPU, 4 on a CPU. Even on SM100.
    overrides: config fields to set instead of the heuristics' choice, by name. Else, a GPU's
        tuning tables come before the heuristics' formula (docs/tuning.md).
    timeout_s: limit of each wait inside the kernel, for example for a rank that comes late. By
        default 60 on GPUs and 600 in the emulator.
    schedule_seed: on a CPU, picks the order in which the emulator interleaves warps.
    checked: look at the expert ids, which on a GPU means to wait for them, and, on a CPU, for races
        in the kernel and writes beside the buffer. By default only on CPUs. Unchecked, an expert id
        out of range is taken as -1.

    Nothing is launched if an argument is not allowed. MegaMoETimeoutError says which rank did not
    arrive; on a GPU, the next call or `sym_buffer.raise_if_failed()` raises it. After it, and on
    CPUs after a ValueError for arguments that differ between processes, the buffer needs
    `sym_buffer.reset()` on every rank.
    """
    w1, sf1 = _pair("l1_weights", l1_weights)
    w2, sf2 = _pair("l2_weights", l2_weights)
    require_type("y", y, torch.Tensor, "a tensor")
    require_type("sym_buffer", sym_buffer, SymmBuffer, "a SymmBuffer")
    stats = cumulative_local_expert_recv_stats
    if stats is not None:
        require_type("cumulative_local_expert_recv_stats", stats, torch.Tensor, "a tensor or None")
    require_type("recipe", recipe, (tuple, list), "a tuple of 3 ints")
    require_type("activation", activation, str, "a str")
    if activation_clamp is not None:
        require_type("activation_clamp", activation_clamp, (int, float), "a number or None")
    require_type("fast_math", fast_math, bool, "a bool")
    require_type("schedule_seed", schedule_seed, int, "an int")
    sym_buffer.raise_if_closed()
    names, values = _split_overrides(overrides)
    torch.ops.deep_moe.mega_moe(
        y,
        sym_buffer.x,
        sym_buffer.x_sf,
        sym_buffer.topk_idx,
        sym_buffer.topk_weights,
        w1,
        sf1,
        w2,
        sf2,
        stats,
        sym_buffer.handle,
        list(recipe),
        activation,
        activation_clamp,
        fast_math,
        arch,
        num_sms,
        names,
        values,
        timeout_s,
        schedule_seed,
        checked,
    )


# No argument stands for the buffer's memory: declaring it written would let the compiler work on a
# copy of it, which no other rank sees.
torch.library.define(
    "deep_moe::mega_moe",
    "(Tensor(a!) y, Tensor x, Tensor x_sf, Tensor topk_idx, Tensor topk_weights, "
    "Tensor l1_weight, Tensor l1_weight_sf, Tensor l2_weight, Tensor l2_weight_sf, "
    "Tensor(b!)? stats, int buffer_handle, int[] recipe, str activation, float? activation_clamp, "
    "bool fast_math, str? arch, int? num_sms, str[] override_names, int[] override_values, "
    "float? timeout_s, int schedule_seed, bool? checked) -> ()",
)


@torch.library.impl("deep_moe::mega_moe", "CompositeExplicitAutograd")
def _mega_moe(
    y: torch.Tensor,
    x: torch.Tensor,
    x_sf: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    l1_weight: torch.Tensor,
    l1_weight_sf: torch.Tensor,
    l2_weight: torch.Tensor,
    l2_weight_sf: torch.Tensor,
    stats: torch.Tensor | None,
    buffer_handle: int,
    recipe: list[int],
    activation: str,
    activation_clamp: float | None,
    fast_math: bool,
    arch: str | None,
    num_sms: int | None,
    override_names: list[str],
    override_values: list[int],
    timeout_s: float | None,
    schedule_seed: int,
    checked: bool | None,
) -> None:
    buffer = SymmBuffer.of_handle(buffer_handle)
    _take_inputs(buffer, x, x_sf, topk_idx, topk_weights)
    options = CallOptions(
        recipe=tuple(recipe),
        activation=activation,
        activation_clamp=activation_clamp,
        fast_math=fast_math,
        arch=arch,
        num_sms=num_sms,
        overrides=tuple(zip(override_names, override_values, strict=True)),
        timeout_s=timeout_s,
        schedule_seed=schedule_seed,
        checked=checked,
    )
    l1, l2 = (l1_weight, l1_weight_sf), (l2_weight, l2_weight_sf)
    if buffer.is_emulated:
        _call_emulated(y, l1, l2, buffer, stats, options)
    else:
        _call_cuda(y, l1, l2, buffer, stats, options)


@torch.library.register_fake("deep_moe::mega_moe")
def _mega_moe_fake(*_: Any) -> None:
    """The operator only writes to tensors that it is given."""


def prepare_launch(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    buffer: SymmBuffer,
    stats: torch.Tensor | None,
    options: CallOptions,
) -> MegaMoELaunch:
    """Check one rank's arguments and turn them into the kernel's."""
    buffer.raise_if_unusable()
    shape = buffer.shape
    arch = _arch(options, buffer)
    _check_output(y, buffer)
    _check_weights(l1_weights, l2_weights, buffer, arch)
    if stats is not None:
        check_tensor(
            "cumulative_local_expert_recv_stats",
            stats,
            torch.int32,
            (shape.num_experts_per_rank,),
            buffer.device,
        )
        check_contiguous("cumulative_local_expert_recv_stats", stats)
    num_tokens = y.shape[0]
    config = _choose_config(
        shape,
        num_tokens,
        arch,
        _default_num_sms(buffer, arch) if options.num_sms is None else options.num_sms,
        options.activation_clamp,
        options.fast_math,
        options.overrides,
        buffer.recorder is not None,
        None if buffer.is_emulated else _gpu_name(buffer.device.index),
    )
    if is_checked(options, buffer):
        _check_expert_ids(buffer, num_tokens)

    args = KernelArgs.from_buffer_copy(_standing_args(config, buffer, l1_weights, l2_weights))
    args.y = y.data_ptr()
    args.cumulative_local_expert_recv_stats = 0 if stats is None else stats.data_ptr()
    args.wait_timeout_ns = round(1e9 * _timeout_s(options, buffer))
    args.num_tokens = num_tokens
    if buffer.recorder is not None:
        args.trace = buffer.recorder.attach(config).data_ptr()
        args.trace_capacity = buffer.recorder.capacity
    memory = _memory_regions(y, l1_weights, l2_weights, buffer, stats)
    return MegaMoELaunch(
        buffer.rank,
        _kernel(config),
        config.num_sms,
        config.num_threads,
        config.smem_bytes,
        args,
        memory,
        config,
    )


def is_checked(options: CallOptions, buffer: SymmBuffer) -> bool:
    return buffer.is_emulated if options.checked is None else options.checked


def finish_emulated(buffer: SymmBuffer, options: CallOptions) -> None:
    """Raise what the kernel reported, or that something wrote beside the buffer."""
    memory = buffer.memory
    assert isinstance(memory, HostMemory)
    buffer.raise_if_failed()
    if is_checked(options, buffer):
        offset = memory.blocks[memory.rank].damaged_guard()
        if offset is not None:
            buffer.mark_failed("a write beside the buffer")
            raise RuntimeError(
                f"rank {buffer.rank}: something wrote beside the symmetric buffer, at byte "
                f"{offset} of {buffer.nbytes}"
            )


def _call_emulated(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    buffer: SymmBuffer,
    stats: torch.Tensor | None,
    options: CallOptions,
) -> None:
    memory = buffer.memory
    assert isinstance(memory, HostMemory)
    if buffer.num_ranks > 1 and not memory.is_shared:
        raise ValueError(
            "sym_buffer must be called through its EmulatedRanks: its other ranks live in this "
            "process too"
        )
    launch = prepare_launch(y, l1_weights, l2_weights, buffer, stats, options)
    buffer.num_calls += 1
    checked = is_checked(options, buffer)
    if memory.is_shared:
        _agree(launch, memory, buffer)
    try:
        run_emulated(
            [launch],
            seed=options.schedule_seed,
            checks=checked,
            clock="real" if memory.is_shared else "virtual",
        )
    except BaseException:
        buffer.mark_failed("the emulator stopped")
        raise
    if memory.is_shared:
        _raise_if_different(memory, buffer)
    finish_emulated(buffer, options)


def _call_cuda(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    buffer: SymmBuffer,
    stats: torch.Tensor | None,
    options: CallOptions,
) -> None:
    launch = prepare_launch(y, l1_weights, l2_weights, buffer, stats, options)
    with torch.cuda.device(buffer.device):
        launcher = _cuda_launcher(launch.kernel.key, launch.config, buffer.device.index)
        launcher.launch(launch.args, launch.num_ctas, torch.cuda.current_stream().cuda_stream)


def _agree(launch: MegaMoELaunch, memory: HostMemory, buffer: SymmBuffer) -> None:
    """Compare what must be equal on all ranks with the ranks that have come before. Ranks that come
    later compare for themselves, and stop this one if they must."""
    config = launch.config
    call = {
        "num_sms": config.num_sms,
        "arch": config.arch,
        "fast_math": config.fast_math,
        "activation_clamp": repr(config.activation_clamp),
    }
    memory.blocks[memory.rank].publish_call(buffer.num_calls, call)
    _raise_if_different(memory, buffer)


def _raise_if_different(memory: HostMemory, buffer: SymmBuffer) -> None:
    published = {
        rank: block.published_call(buffer.num_calls) for rank, block in enumerate(memory.blocks)
    }
    difference = describe_difference(
        {rank: call for rank, call in published.items() if call is not None}
    )
    if difference is not None:
        memory.refuse_call(buffer.num_calls)
        buffer.mark_failed(difference)
        raise ValueError(difference)


def _take_inputs(
    buffer: SymmBuffer,
    x: torch.Tensor,
    x_sf: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
) -> None:
    """Copy inputs that are not the buffer's own views into them."""
    for own, given in (
        (buffer.x, x),
        (buffer.x_sf, x_sf),
        (buffer.topk_idx, topk_idx),
        (buffer.topk_weights, topk_weights),
    ):
        if own.data_ptr() != given.data_ptr():
            own.copy_(given)


@lru_cache(maxsize=4096)
def _choose_config(
    shape: MoEShape,
    num_tokens: int,
    arch: str,
    num_sms: int,
    activation_clamp: float | None,
    fast_math: bool,
    overrides: tuple[tuple[str, int], ...],
    trace: bool,
    gpu: str | None,
) -> MegaMoEConfig:
    return choose_config(
        shape,
        num_tokens,
        arch=arch,
        num_sms=num_sms,
        activation_clamp=activation_clamp,
        fast_math=fast_math,
        trace=trace,
        overrides=dict(overrides),
        tuning=None if gpu is None else find_tuning(gpu),
    )


@cache
def _gpu_name(device_index: int) -> str:
    return torch.cuda.get_device_name(device_index)


@lru_cache(maxsize=256)
def _kernel(config: MegaMoEConfig) -> CompiledKernel:
    return jit.build(config)


@lru_cache(maxsize=256)
def _cuda_launcher(key: str, config: MegaMoEConfig, device_index: int) -> CudaLauncher:
    """One per kernel and device: a module belongs to the device's context."""
    return CudaLauncher(
        _kernel(config),
        num_threads=config.num_threads,
        smem_bytes=config.smem_bytes,
        is_cooperative=True,  # for the kernel's grid barriers
    )


def _arch(options: CallOptions, buffer: SymmBuffer) -> str:
    """The architecture that the call runs on; a GPU has one only."""
    own = weight_arch(buffer.device)
    arch = own if options.arch is None else options.arch
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}; got {arch!r}")
    if arch != own and not buffer.is_emulated:
        raise ValueError(f"arch must be {own}, that of {buffer.device}, or None; got {arch!r}")
    return arch


def _default_num_sms(buffer: SymmBuffer, arch: str) -> int:
    if buffer.is_emulated:
        return EMULATED_NUM_SMS
    num_sms = torch.cuda.get_device_properties(buffer.device).multi_processor_count
    cluster_size = ARCHITECTURES[arch].cluster_size
    return num_sms // cluster_size * cluster_size


def _timeout_s(options: CallOptions, buffer: SymmBuffer) -> float:
    if options.timeout_s is not None:
        return options.timeout_s
    return DEFAULT_EMULATED_TIMEOUT_S if buffer.is_emulated else DEFAULT_TIMEOUT_S


def _standing_args(
    config: MegaMoEConfig, buffer: SymmBuffer, l1_weights: Pair, l2_weights: Pair
) -> KernelArgs:
    """The arguments that do not change from call to call, made once for all they depend on: the
    tile, and the weights' addresses and strides."""
    tensors = (*l1_weights, *l2_weights)
    key = (
        config.arch,
        config.block_m,
        config.store_block_m,
        *((tensor.data_ptr(), tensor.stride()) for tensor in tensors),
    )
    known = buffer.standing_args
    if key not in known:
        args = KernelArgs()
        addresses = buffer.memory.addresses
        own_address = addresses[buffer.rank]
        if config.arch == "sm_90a":
            specs = sm90_tensor_maps(config, own_address)
            for name, address in sm90_weight_pointers(l1_weights, l2_weights).items():
                setattr(args, name, address)
        else:
            specs = sm100_tensor_maps(config, own_address, l1_weights, l2_weights)
        for name, spec in specs.items():
            image = spec.encode_emulated() if buffer.is_emulated else spec.encode_cuda()
            setattr(args, name, TensorMapImage.from_buffer_copy(image))
        for rank, address in enumerate(addresses):
            args.rank_buffers[rank] = address
        args.status = buffer.memory.status_address
        args.rank_idx = buffer.rank
        if len(known) >= _MAX_STANDING_ARGS:
            known.pop(next(iter(known)))
        known[key] = args
    return known[key]


def _memory_regions(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    buffer: SymmBuffer,
    stats: torch.Tensor | None,
) -> tuple[MemoryRegion, ...]:
    """What the kernel may touch; only the emulator asks."""
    if not buffer.is_emulated:
        return ()
    memory = buffer.memory
    of_tensor = MemoryRegion.of_tensor
    regions = [
        MemoryRegion(f"symmetric buffer of rank {rank}", address, buffer.nbytes, True)
        for rank, address in enumerate(memory.addresses)
    ]
    regions.append(MemoryRegion("wait status", memory.status_address, 64, True))
    regions.append(of_tensor("y", y, is_writable=True))
    regions += [
        of_tensor("l1_weights[0]", l1_weights[0], is_writable=False),
        of_tensor("l1_weights[1]", l1_weights[1], is_writable=False),
        of_tensor("l2_weights[0]", l2_weights[0], is_writable=False),
        of_tensor("l2_weights[1]", l2_weights[1], is_writable=False),
    ]
    if buffer.recorder is not None and buffer.recorder.memory is not None:
        regions.append(of_tensor("trace", buffer.recorder.memory, is_writable=True))
    if stats is not None:
        regions.append(of_tensor("cumulative_local_expert_recv_stats", stats, is_writable=True))
    return tuple(region for region in regions if region.num_bytes)


def _pair(name: str, value: Any) -> Pair:
    allowed = "a pair (weight, scales) of tensors"
    require_type(name, value, (tuple, list), allowed)
    if len(value) != 2:
        raise ValueError(f"{name} must be {allowed}; got {len(value)} values")
    for i in range(2):
        require_type(f"{name}[{i}]", value[i], torch.Tensor, "a tensor")
    return value[0], value[1]


def _split_overrides(overrides: Mapping[str, int] | None) -> tuple[list[str], list[int]]:
    if overrides is None:
        return [], []
    require_type("overrides", overrides, dict, "a dict of config fields")
    for name, value in overrides.items():
        require_type("overrides", name, str, "named by str")
        require_type(f"overrides[{name!r}]", value, int, "an int")
    return list(overrides), list(overrides.values())


def _check_output(y: torch.Tensor, buffer: SymmBuffer) -> None:
    shape = buffer.shape
    if y.ndim != 2:
        raise ValueError(f"y must be 2-dimensional [tokens, hidden]; got shape {tuple(y.shape)}")
    check_tensor("y", y, torch.bfloat16, (y.shape[0], shape.hidden), buffer.device)
    if y.shape[0] > shape.num_max_tokens_per_rank:
        raise ValueError(
            "y must have at most num_max_tokens_per_rank "
            f"({shape.num_max_tokens_per_rank}) tokens; got {y.shape[0]}"
        )
    check_contiguous("y", y)
    check_start("y", y, 16)


def _check_weights(l1_weights: Pair, l2_weights: Pair, buffer: SymmBuffer, arch: str) -> None:
    tensors = (*l1_weights, *l2_weights)
    expected = WEIGHT_LAYOUTS[arch].tensors(buffer.shape)
    for tensor, (name, (dtype, shape)) in zip(tensors, expected.items(), strict=True):
        check_tensor(name, tensor, dtype, shape, buffer.device)


def _check_expert_ids(buffer: SymmBuffer, num_tokens: int) -> None:
    ids = buffer.topk_idx[:num_tokens]
    wrong = ((ids < -1) | (ids >= buffer.shape.num_experts)).nonzero()
    if wrong.numel():
        token, slot = wrong[0].tolist()
        raise ValueError(
            f"topk_idx must hold expert ids 0 to {buffer.shape.num_experts - 1}, or -1 for an "
            f"unused slot; got {int(ids[token, slot])} for token {token}, slot {slot}"
        )
