"""The call: checks its arguments, picks the kernel, and runs it on a GPU or in the emulator.

For PyTorch it is one operator, `deep_moe::mega_moe`, which writes `y` and `stats`; where nothing
would see the operator (eager.py), a call does at once what the operator does. Under a compiler its
inputs include the four views of the buffer that the caller fills. As a compiler turns writes
into new tensors, they may then be other tensors, and are copied into the buffer first.

What a call works out from its arguments is kept in the buffer, and found again by all that it was
worked out from: a `CallPlan` by the options, the tokens that the call expects and the form of y and
of the statistics, the standing part of the kernel's arguments by the tile and the weights'
addresses and forms. So what is found is what would be made anew, and arguments that are not allowed
never find anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from deep_moe import jit
from deep_moe.heuristics.config import ARCHITECTURES, MegaMoEConfig, choose_config
from deep_moe.heuristics.expected_tokens import (
    expected_tokens_per_rank as choose_expected_tokens,
)
from deep_moe.heuristics.shape import MoEShape
from deep_moe.jit.cache import CompiledKernel
from deep_moe.jit.kernel_args import RECEIVED_UNEVENLY, KernelArgs, TensorMapImage
from deep_moe.jit.launch import CudaLauncher, MemoryRegion, RankLaunch, run_emulated
from deep_moe.jit.sm90_maps import sm90_tensor_maps, sm90_weight_pointers
from deep_moe.jit.sm100_maps import sm100_tensor_maps

from .arguments import check_contiguous, check_start, check_tensor, form, require_type
from .bounded_cache import BoundedCache
from .buffer import SymmBuffer, describe_difference
from .eager import is_seen_by_nobody
from .gpu import Gpu
from .symm_memory import HostMemory
from .tuning_tables import find_tuning
from .weights import WEIGHT_LAYOUTS, weight_arch

RECIPE = (1, 1, 32)  # scales per token, per weight row, and per 32 values along K
ACTIVATION = "swiglu"
EMULATED_NUM_SMS = 4
DEFAULT_TIMEOUT_S = 60.0
# A peer's part of a call takes this long in the emulator, not microseconds.
DEFAULT_EMULATED_TIMEOUT_S = 600.0
_Y_ALIGNMENT = 16  # bytes, of bulk copies

Pair = tuple[torch.Tensor, torch.Tensor]


class CallOptions(NamedTuple):
    """The arguments of a call that are not tensors; of the right types, but not checked further."""

    activation_clamp: float | None = None
    fast_math: bool = True
    arch: str | None = None
    num_sms: int | None = None
    expected_tokens_per_rank: int | None = None
    timeout_s: float | None = None
    schedule_seed: int = 0
    checked: bool | None = None
    overrides: tuple[tuple[str, int], ...] = ()
    recipe: tuple[int, ...] = RECIPE
    activation: str = ACTIVATION

    def check(self) -> None:
        """Raise if one has a value that no call allows."""
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


_USUAL = CallOptions()


@dataclass(frozen=True)
class CallPlan:
    """What calls share that have the same options, expect as many tokens, and have y and statistics
    of the same form.

    tile: what the standing part of the arguments depends on, beside the weights. is_checked:
    whether expert ids are looked at. launcher: the kernel on a GPU, None in the emulator.
    """

    config: MegaMoEConfig
    tile: tuple[str, int, int, int, int, int]
    num_tokens: int
    is_checked: bool
    wait_timeout_ns: int
    launcher: CudaLauncher | None


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
    expected_tokens_per_rank: int | None = None,
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
    expected_tokens_per_rank: the mean over all ranks in this call, if the caller knows it; it
        decides how fast the call is, not what it computes. By default the rank's own number, or
        more if its experts received more in the last call that the host knows of
        (docs/tuning.md).
    overrides: config fields to set instead of the heuristics' choice, by name. Else, a GPU's
        tuning tables come before the heuristics' formula (docs/tuning.md).
    timeout_s: limit of the kernel's waits for other ranks, for example for one that comes late;
        waits that depend on others have up to four times as long. By default 60 on GPUs and 600 in
        the emulator.
    schedule_seed: on a CPU, picks the order in which the emulator interleaves warps.
    checked: look at the expert ids, which on a GPU means to wait for them, and, on a CPU, for races
        in the kernel and writes beside the buffer. By default only on CPUs. Unchecked, an expert id
        out of range is taken as -1.

    A CUDA graph keeps the kernel that the call was captured with. A captured call compiles and
    loads none if one is loaded that earlier calls with these arguments ran, even where another
    would now be faster. So call before the capture: twice, with a wait in between, where the second
    call may learn from the first.

    Nothing is launched if an argument is not allowed. MegaMoETimeoutError says which rank did not
    arrive; on a GPU, the next call or `sym_buffer.raise_if_failed()` raises it. After it, and on
    CPUs after a ValueError for arguments that differ between processes, the buffer needs
    `sym_buffer.reset()` on every rank.
    """
    w1, sf1 = _pair("l1_weights", l1_weights)
    w2, sf2 = _pair("l2_weights", l2_weights)
    stats = cumulative_local_expert_recv_stats
    if not (isinstance(y, torch.Tensor) and isinstance(sym_buffer, SymmBuffer)):
        require_type("y", y, torch.Tensor, "a tensor")
        require_type("sym_buffer", sym_buffer, SymmBuffer, "a SymmBuffer")
    if stats is not None:
        require_type("cumulative_local_expert_recv_stats", stats, torch.Tensor, "a tensor or None")
    if activation_clamp is not None:
        require_type("activation_clamp", activation_clamp, (int, float), "a number or None")
    # Only what is not as usual: every argument makes an operator's call longer.
    others: dict[str, Any] = {}
    if not (isinstance(recipe, tuple) and recipe == RECIPE):
        require_type("recipe", recipe, (tuple, list), "a tuple of 3 ints")
        others["recipe"] = list(recipe)
    if activation != ACTIVATION:
        require_type("activation", activation, str, "a str")
        others["activation"] = activation
    if fast_math is not True:
        require_type("fast_math", fast_math, bool, "a bool")
        others["fast_math"] = fast_math
    if arch is not None:
        others["arch"] = arch
    if num_sms is not None:
        others["num_sms"] = num_sms
    if expected_tokens_per_rank is not None:
        others["expected_tokens_per_rank"] = expected_tokens_per_rank
    if overrides is not None:
        check_overrides(overrides)
    if overrides:
        others["override_names"] = list(overrides)
        others["override_values"] = list(overrides.values())
    if timeout_s is not None:
        others["timeout_s"] = timeout_s
    if schedule_seed != 0 or type(schedule_seed) is not int:
        require_type("schedule_seed", schedule_seed, int, "an int")
        others["schedule_seed"] = schedule_seed
    if checked is not None:
        others["checked"] = checked
    # The operator checks the types of the others, and seldom used ones need not be quick.
    tensors = (y, w1, sf1, w2, sf2) if stats is None else (y, w1, sf1, w2, sf2, stats)
    if not others and is_seen_by_nobody(tensors):
        options = _USUAL if activation_clamp is None else CallOptions(float(activation_clamp))
        _run(y, (w1, sf1), (w2, sf2), sym_buffer, stats, options)
        return
    sym_buffer.raise_if_closed()
    # Otherwise they are the buffer's own views, and hold what was written to them.
    if torch.compiler.is_compiling() or type(y) is not torch.Tensor:
        others["inputs"] = [
            sym_buffer.x,
            sym_buffer.x_sf,
            sym_buffer.topk_idx,
            sym_buffer.topk_weights,
        ]
    _mega_moe_op(y, stats, w1, sf1, w2, sf2, sym_buffer.handle, activation_clamp, **others)


# No argument stands for the buffer's memory: declaring it written would let the compiler work on a
# copy of it, which no other rank sees.
torch.library.define(
    "deep_moe::mega_moe",
    "(Tensor(a!) y, Tensor(b!)? stats, Tensor l1_weight, Tensor l1_weight_sf, Tensor l2_weight, "
    "Tensor l2_weight_sf, int buffer_handle, float? activation_clamp=None, *, bool fast_math=True, "
    "str? arch=None, int? num_sms=None, int? expected_tokens_per_rank=None, "
    "str[]? override_names=None, int[]? override_values=None, "
    "float? timeout_s=None, int schedule_seed=0, bool? checked=None, int[] recipe=[1, 1, 32], "
    "str activation='swiglu', Tensor[]? inputs=None) -> ()",
)
_mega_moe_op = torch.ops.deep_moe.mega_moe.default


@torch.library.impl("deep_moe::mega_moe", "CompositeExplicitAutograd")
def _mega_moe(
    y: torch.Tensor,
    stats: torch.Tensor | None,
    l1_weight: torch.Tensor,
    l1_weight_sf: torch.Tensor,
    l2_weight: torch.Tensor,
    l2_weight_sf: torch.Tensor,
    buffer_handle: int,
    activation_clamp: float | None = None,
    *,
    inputs: Sequence[torch.Tensor] | None = None,
    **others: Any,
) -> None:
    buffer = SymmBuffer.of_handle(buffer_handle)
    if inputs is not None:
        _take_inputs(buffer, inputs)
    options = _options(activation_clamp, **others) if others else CallOptions(activation_clamp)
    l1, l2 = (l1_weight, l1_weight_sf), (l2_weight, l2_weight_sf)
    _run(y, l1, l2, buffer, stats, options)


@torch.library.register_fake("deep_moe::mega_moe")
def _mega_moe_fake(*_: Any, **__: Any) -> None:
    """The operator only writes to tensors that it is given."""


def _run(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    buffer: SymmBuffer,
    stats: torch.Tensor | None,
    options: CallOptions,
) -> None:
    gpu = buffer.gpu
    if gpu is None:
        _call_emulated(y, l1_weights, l2_weights, buffer, stats, options)
        return
    plan, args = prepare_call(y, l1_weights, l2_weights, buffer, stats, options)
    assert plan.launcher is not None
    plan.launcher.launch(args, plan.config.num_sms, gpu.current_stream())


def _options(
    activation_clamp: float | None,
    *,
    override_names: Sequence[str] | None = None,
    override_values: Sequence[int] | None = None,
    recipe: Sequence[int] = RECIPE,
    **others: Any,
) -> CallOptions:
    """From arguments of the operator."""
    overrides = zip(override_names or (), override_values or (), strict=True)
    return CallOptions(activation_clamp, overrides=tuple(overrides), recipe=tuple(recipe), **others)


def prepare_call(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    buffer: SymmBuffer,
    stats: torch.Tensor | None,
    options: CallOptions,
) -> tuple[CallPlan, KernelArgs]:
    """Check one rank's arguments and turn them into the kernel's."""
    buffer.raise_if_unusable()
    recorder = buffer.recorder
    y_address = y.data_ptr()
    expected = options.expected_tokens_per_rank
    received = buffer.memory.status.received
    is_uneven = received >= RECEIVED_UNEVENLY
    if expected is None:
        num_tokens = y.shape[0] if y.ndim else 0  # such a y is refused below
        num_received_tokens = received & (RECEIVED_UNEVENLY - 1)
        expected = choose_expected_tokens(buffer.shape, num_tokens, num_received_tokens)
    key = (
        expected,
        is_uneven,
        options,
        recorder is None,
        y_address % _Y_ALIGNMENT,
        *(y.shape, y.stride(), y.dtype, y.device),
        None if stats is None else form(stats),
    )
    plan = buffer.plans.get(key)
    if plan is None:
        plan = _make_plan(key, y, buffer, stats, options, expected, is_uneven)
    standing = _standing_args(plan, buffer, l1_weights, l2_weights)
    if plan.is_checked:
        _check_expert_ids(buffer, plan.num_tokens)

    args = KernelArgs.from_buffer_copy(standing)
    args.y = y_address
    args.cumulative_local_expert_recv_stats = 0 if stats is None else stats.data_ptr()
    args.wait_timeout_ns = plan.wait_timeout_ns
    args.num_tokens = plan.num_tokens
    if recorder is not None:
        args.trace = recorder.attach(plan.config).data_ptr()
        args.trace_capacity = recorder.capacity
    return plan, args


def prepare_launch(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    buffer: SymmBuffer,
    stats: torch.Tensor | None,
    options: CallOptions,
) -> MegaMoELaunch:
    """`prepare_call` for the emulator, which wants to know the kernel's memory."""
    plan, args = prepare_call(y, l1_weights, l2_weights, buffer, stats, options)
    config = plan.config
    return MegaMoELaunch(
        buffer.rank,
        _kernel(config),
        config.num_sms,
        config.num_threads,
        config.smem_bytes,
        args,
        _memory_regions(y, l1_weights, l2_weights, buffer, stats),
        config,
        smem_layout=config.smem_layout,
        warp_roles=config.warp_roles,
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
    buffer.raise_if_closed()
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


def _take_inputs(buffer: SymmBuffer, inputs: Sequence[torch.Tensor]) -> None:
    """Copy inputs that are not the buffer's own views into them."""
    views = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
    for own, given in zip(views, inputs, strict=True):
        if own.data_ptr() != given.data_ptr():
            own.copy_(given)


def _make_plan(
    key: tuple[Any, ...],
    y: torch.Tensor,
    buffer: SymmBuffer,
    stats: torch.Tensor | None,
    options: CallOptions,
    expected: int,
    is_uneven: bool,
) -> CallPlan:
    """The plan to be found by `key`; within a capture, perhaps an earlier one instead.

    Reads nothing of the tensors but what the key is made of.
    """
    options.check()
    arch = _arch(options, buffer)
    _check_output(y, buffer)
    most = buffer.shape.num_max_tokens_per_rank
    if not 0 <= expected <= most:
        raise ValueError(
            f"expected_tokens_per_rank must be 0 to num_max_tokens_per_rank ({most}); "
            f"got {expected}"
        )
    if stats is not None:
        name = "cumulative_local_expert_recv_stats"
        num_experts = buffer.shape.num_experts_per_rank
        check_tensor(name, stats, torch.int32, (num_experts,), buffer.device)
        check_contiguous(name, stats)
    config = _choose_config(
        buffer.shape,
        expected,
        is_uneven,
        arch,
        _default_num_sms(buffer) if options.num_sms is None else options.num_sms,
        options.activation_clamp,
        options.fast_math,
        options.overrides,
        buffer.recorder is not None,
        None if buffer.gpu is None else buffer.gpu.name,
    )
    gpu = buffer.gpu
    if gpu is not None and _launchers.get((config, gpu)) is None:
        earlier = _earlier_plan(key, buffer)
        # Loading takes long, may wait for all that runs on the GPU, and in a capture, drivers
        # before CUDA 12.3 refuse it. Not kept: after the capture, the kernel that fits is loaded.
        if earlier is not None and gpu.is_capturing():
            return earlier
    plan = CallPlan(
        config=config,
        tile=(
            config.arch,
            config.block_m,
            config.block_m_step,
            config.block_n,
            config.block_k,
            config.store_block_m,
        ),
        num_tokens=y.shape[0],
        is_checked=is_checked(options, buffer),
        wait_timeout_ns=round(1e9 * _timeout_s(options, buffer)),
        launcher=None if gpu is None else _cuda_launcher(config, gpu),
    )
    return buffer.plans.put(key, plan)


def _earlier_plan(key: tuple[Any, ...], buffer: SymmBuffer) -> CallPlan | None:
    """The newest plan of the same call that expects other tokens, or them more or less evenly."""
    _, _, *call = key
    for (_, _, *other_call), plan in reversed(buffer.plans.items()):
        if other_call == call:
            return plan
    return None


@lru_cache(maxsize=4096)
def _choose_config(
    shape: MoEShape,
    expected_tokens: int,
    is_uneven: bool,
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
        expected_tokens,
        is_uneven=is_uneven,
        arch=arch,
        num_sms=num_sms,
        activation_clamp=activation_clamp,
        fast_math=fast_math,
        trace=trace,
        overrides=dict(overrides),
        tuning=None if gpu is None else find_tuning(gpu),
    )


@lru_cache(maxsize=256)
def _kernel(config: MegaMoEConfig) -> CompiledKernel:
    return jit.build(config)


# The loaded kernels, one per kernel and device: a module belongs to the device's context.
_launchers: BoundedCache[tuple[MegaMoEConfig, Gpu], CudaLauncher] = BoundedCache(256)


def _cuda_launcher(config: MegaMoEConfig, gpu: Gpu) -> CudaLauncher:
    launcher = _launchers.get((config, gpu))
    if launcher is not None:
        return launcher
    launcher = gpu.load(
        _kernel(config),
        num_threads=config.num_threads,
        smem_bytes=config.smem_bytes,
        is_cooperative=True,  # CTAs wait for each other
    )
    return _launchers.put((config, gpu), launcher)


def _arch(options: CallOptions, buffer: SymmBuffer) -> str:
    """The architecture that the call runs on; a GPU has one only."""
    own = weight_arch(buffer.device) if buffer.gpu is None else buffer.gpu.arch
    arch = own if options.arch is None else options.arch
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}; got {arch!r}")
    if arch != own and not buffer.is_emulated:
        raise ValueError(f"arch must be {own}, that of {buffer.device}, or None; got {arch!r}")
    return arch


def _default_num_sms(buffer: SymmBuffer) -> int:
    return EMULATED_NUM_SMS if buffer.gpu is None else buffer.gpu.num_sms


def _timeout_s(options: CallOptions, buffer: SymmBuffer) -> float:
    if options.timeout_s is not None:
        return options.timeout_s
    return DEFAULT_EMULATED_TIMEOUT_S if buffer.is_emulated else DEFAULT_TIMEOUT_S


def _standing_args(
    plan: CallPlan, buffer: SymmBuffer, l1_weights: Pair, l2_weights: Pair
) -> KernelArgs:
    """The arguments that do not change from call to call, made once for all that they depend on,
    after a check of the weights. Another tensor at the same address and of the same form, after the
    first was freed, has the same arguments.

    What is returned is not to be written to.
    """
    w1, sf1 = l1_weights
    w2, sf2 = l2_weights
    key = (plan.tile, w1.data_ptr(), sf1.data_ptr(), w2.data_ptr(), sf2.data_ptr())
    # Compared, not looked up: hashes of these take longer. Few addresses are used with two forms.
    forms = (
        *(w1.shape, w1.stride(), w1.dtype, w1.device),
        *(sf1.shape, sf1.stride(), sf1.dtype, sf1.device),
        *(w2.shape, w2.stride(), w2.dtype, w2.device),
        *(sf2.shape, sf2.stride(), sf2.dtype, sf2.device),
    )
    kept = buffer.standing_args.get(key)
    if kept is not None and kept[0] == forms:
        return kept[1]
    args = _make_standing_args(plan.config, buffer, (w1, sf1, w2, sf2))
    buffer.standing_args.put(key, (forms, args))
    return args


def _make_standing_args(
    config: MegaMoEConfig, buffer: SymmBuffer, weights: Sequence[torch.Tensor]
) -> KernelArgs:
    """weights: of both layers, each with its scales."""
    expected = WEIGHT_LAYOUTS[config.arch].tensors(buffer.shape)
    for tensor, (name, (dtype, shape)) in zip(weights, expected.items(), strict=True):
        check_tensor(name, tensor, dtype, shape, buffer.device)
    w1, sf1, w2, sf2 = weights
    args = KernelArgs()
    addresses = buffer.memory.addresses
    own_address = addresses[buffer.rank]
    if config.arch == "sm_90a":
        specs = sm90_tensor_maps(config, own_address)
        for name, address in sm90_weight_pointers((w1, sf1), (w2, sf2)).items():
            setattr(args, name, address)
    else:
        specs = sm100_tensor_maps(config, own_address, (w1, sf1), (w2, sf2))
    for name, spec in specs.items():
        gpu = buffer.gpu
        image = spec.encode_emulated() if gpu is None else gpu.encode_tensor_map(spec)
        setattr(args, name, TensorMapImage.from_buffer_copy(image))
    for rank, address in enumerate(addresses):
        args.rank_buffers[rank] = address
    args.status = buffer.memory.status_address
    args.rank_idx = buffer.rank
    return args


def _memory_regions(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    buffer: SymmBuffer,
    stats: torch.Tensor | None,
) -> tuple[MemoryRegion, ...]:
    """What the kernel may touch."""
    memory = buffer.memory
    of_tensor = MemoryRegion.of_tensor
    regions = [
        MemoryRegion(
            f"symmetric buffer of rank {rank}", address, buffer.nbytes, True, buffer.layout
        )
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
    if isinstance(value, tuple) and len(value) == 2:
        weight, sf = value
        if isinstance(weight, torch.Tensor) and isinstance(sf, torch.Tensor):
            return weight, sf
    allowed = "a pair (weight, scales) of tensors"
    require_type(name, value, (tuple, list), allowed)
    if len(value) != 2:
        raise ValueError(f"{name} must be {allowed}; got {len(value)} values")
    for i in range(2):
        require_type(f"{name}[{i}]", value[i], torch.Tensor, "a tensor")
    return value[0], value[1]


def check_overrides(overrides: Mapping[str, int]) -> None:
    """Raise if it is not a dict of ints by name; which names and values are allowed, the config
    says."""
    require_type("overrides", overrides, dict, "a dict of config fields")
    for name, value in overrides.items():
        require_type("overrides", name, str, "named by str")
        require_type(f"overrides[{name!r}]", value, int, "an int")


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
    check_start("y", y, _Y_ALIGNMENT)


def _check_expert_ids(buffer: SymmBuffer, num_tokens: int) -> None:
    ids = buffer.topk_idx[:num_tokens]
    wrong = ((ids < -1) | (ids >= buffer.shape.num_experts)).nonzero()
    if wrong.numel():
        token, slot = wrong[0].tolist()
        raise ValueError(
            f"topk_idx must hold expert ids 0 to {buffer.shape.num_experts - 1}, or -1 for an "
            f"unused slot; got {int(ids[token, slot])} for token {token}, slot {slot}"
        )
