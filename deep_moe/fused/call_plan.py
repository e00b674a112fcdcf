"""What a call computes from its arguments: the kernel, and the kernel's arguments.

The results are kept. A buffer's `CallCaches` have a `CallPlan` for each set of options, expected
tokens, and forms of y and other tensors. They also have the kernel's arguments for each config and
weights. Weights are recognized if they are the very tensors of an earlier call at the same
addresses, or others of the same addresses and forms. So a cached result equals a new one, and
arguments that are not allowed never find one. Kernels are kept for all buffers.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import torch

from deep_moe.activations import DEFAULT_ACTIVATION, activation_of
from deep_moe.heuristics.expected_tokens import (
    expected_tokens_per_rank as choose_expected_tokens,
)
from deep_moe.jit.cpp_structs import CppStruct
from deep_moe.jit.kernel_args import RECEIVED_UNEVENLY, TensorMap, kernel_args
from deep_moe.jit.launch import CudaLauncher
from deep_moe.targets import EMULATED, Target, target_of
from deep_moe.targets.config import MegaMoEConfig
from deep_moe.tensor_memory import Extent, OccupiedMemory, check_dense, check_memory

from .bounded_cache import BoundedCache
from .call_tensors import CallTensors, KnownMemory, addresses_of, check_form
from .checks import (
    BIAS_NAMES,
    WEIGHT_NAMES,
    Y_ALIGNMENT,
    Y_BYTES,
    Biases,
    LayerMemory,
    Pair,
    check_biases_form,
    check_expert_ids,
    check_output,
    check_own_rank,
    check_tensor,
    form,
)
from .config_chooser import ConfigChooser
from .deployment import ChosenConfigs
from .gpu import Gpu
from .loaded_kernels import is_loaded, launcher_of
from .options import CALL_TENSORS, MASKED_RANKS, CallArguments, call_key, check_values, overrides_of

if TYPE_CHECKING:
    from deep_moe.emulator.tensor_map import TensorMapSpec

    from .buffer import SymmBuffer
    from .symm_memory import DeviceMemory, HostMemory

logger = logging.getLogger(__name__)

EMULATED_NUM_SMS = 4
DEFAULT_TIMEOUT_S = 60.0
# A peer's part of a call takes this long in the emulator, not microseconds.
DEFAULT_EMULATED_TIMEOUT_S = 600.0

# Kinds of calls whose plans are kept: a server that brings up to this many tokens makes each plan
# once.
_MAX_PLANS = 8192
# Layers whose weights are known, with 2 KB of arguments for each config.
_MAX_LAYERS = 1024


class CallCaches:
    """What a buffer's calls share."""

    def __init__(self) -> None:
        self.plans: BoundedCache[tuple[Any, ...], CallPlan] = BoundedCache(_MAX_PLANS)
        self.known_tensors: BoundedCache[int, KnownTensors] = BoundedCache(_MAX_LAYERS)
        self.known_forms: BoundedCache[tuple[int, ...], KnownForms] = BoundedCache(_MAX_LAYERS)
        self.known_memory: KnownMemory = {}
        self._config_numbers: dict[MegaMoEConfig, int] = {}
        self._numbers = count()

    def number_of(self, config: MegaMoEConfig) -> int:
        """Stands for all fields of a config, and is quicker to look up."""
        return self._config_numbers.setdefault(config, next(self._numbers))

    def clear(self) -> None:
        self.plans.clear()
        self.known_tensors.clear()
        self.known_forms.clear()


# Of both layers, each with its scales.
Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class KnownForms:
    """What a layer's weights and biases at some addresses looked like when they were checked.

    args: by the number of the config; a call writes what is its own into them. occupied: weights,
    biases and all ranks' buffers, where no output may lie.
    """

    forms: tuple[Any, ...]
    args: dict[int, CppStruct]
    occupied: OccupiedMemory


class KnownTensors:
    """A layer's weights and biases as an earlier call was given them."""

    def __init__(self, weights: Weights, biases: Biases | None, forms: KnownForms) -> None:
        self._weights = tuple(weakref.ref(tensor) for tensor in weights)
        self._addresses = tuple(tensor.data_ptr() for tensor in weights)
        self._biases = [(weakref.ref(tensor), tensor.data_ptr()) for tensor in biases or ()]
        self.forms = forms

    def are(self, weights: Weights, biases: Biases | None) -> bool:
        """Whether they are these, where they were. An id may be another tensor's by now, an engine
        may have given a parameter other memory, and a freed storage has another address.

        Every call asks: a loop over the weights would take twice as long.
        """
        w1, sf1, w2, sf2 = weights
        known_w1, known_sf1, known_w2, known_sf2 = self._weights
        are_weights = (
            known_w1() is w1
            and known_sf1() is sf1
            and known_w2() is w2
            and known_sf2() is sf2
            and (w1.data_ptr(), sf1.data_ptr(), w2.data_ptr(), sf2.data_ptr()) == self._addresses
        )
        if biases is None:  # a buffer's calls all have biases, or none of them has
            return are_weights
        known = zip(biases, self._biases, strict=True)
        return are_weights and all(
            reference() is tensor and tensor.data_ptr() == address
            for tensor, (reference, address) in known
        )


class CallMemory(LayerMemory, Protocol):
    """What the standing part of a kernel's arguments is made from and kept with."""

    @property
    def caches(self) -> CallCaches: ...
    @property
    def memory(self) -> HostMemory | DeviceMemory: ...
    @property
    def rank(self) -> int: ...
    @property
    def gpu(self) -> Gpu | None: ...
    @property
    def occupied(self) -> OccupiedMemory: ...


@dataclass(frozen=True)
class CallPlan:
    """What calls share that have the same options, expect as many tokens, and have y and other
    tensors of the same form.

    config_number: of the caches that keep the arguments. tensor_bytes: of `CallTensors`.
    is_checked: whether expert ids are looked at. launcher: the kernel on a GPU, None in the
    emulator.
    """

    config: MegaMoEConfig
    config_number: int = field(compare=False, kw_only=True)
    num_tokens: int
    is_checked: bool
    wait_timeout_ns: int
    launcher: CudaLauncher | None
    tensor_bytes: Mapping[str, int] = field(default_factory=dict, compare=False)


def prepare_call(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    buffer: SymmBuffer,
    tensors: CallTensors,
    options: CallArguments,
    biases: Biases | None = None,
) -> tuple[CallPlan, CppStruct]:
    """Check one rank's arguments and turn them into the kernel's, which are good until the next
    call with the buffer."""
    status = buffer.memory.status
    if status.code != 0 or buffer.failure is not None:
        buffer.raise_if_unusable()
    recorder = buffer.recorder
    try:
        y_address, y_shape = y.data_ptr(), y.shape
    except RuntimeError:  # a sparse tensor has no address
        check_dense("y", y)
        raise
    expected = options.get("expected_tokens_per_rank")
    received = status.received
    is_uneven = received >= RECEIVED_UNEVENLY
    if expected is None:
        num_tokens = y_shape[0] if y_shape else 0  # such a y is refused below
        num_received_tokens = received & (RECEIVED_UNEVENLY - 1)
        expected = choose_expected_tokens(buffer.shape, num_tokens, num_received_tokens)
    key = (
        expected,
        is_uneven,
        call_key(options) if options else None,
        recorder is None,
        y_address % Y_ALIGNMENT,
        *(y_shape, y.is_contiguous(), y.dtype, y.device),
        (*tensors, *map(form, tensors.values())) if tensors else None,
    )
    plan = buffer.caches.plans.get(key)
    if plan is None:
        plan = _make_plan(key, y, buffer, tensors, options, expected, is_uneven)
    args, occupied = args_of_weights(plan, buffer, l1_weights, l2_weights, biases)
    y_bytes = plan.num_tokens * buffer.y_row_bytes
    # As check_memory, for a contiguous tensor.
    if y.untyped_storage().nbytes() < y_bytes + Y_BYTES * y.storage_offset():
        check_memory("y", y)
    bounds = occupied.bounds
    i = bisect_right(bounds, y_address)  # as occupied.refuse, which takes longer
    if i & 1 or (i < len(bounds) and bounds[i] < y_address + y_bytes):
        occupied.refuse("y", y_address, y_bytes)
    if tensors:
        y_end, known = y_address + y_bytes, buffer.caches.known_memory
        found = addresses_of(tensors, plan.tensor_bytes, y_address, y_end, known, occupied)
        for name in CALL_TENSORS:
            setattr(args, name, found.get(name, 0))
        args.has_tensors = True
    elif args.has_tensors:  # an earlier call's
        for name in CALL_TENSORS:
            setattr(args, name, 0)
        args.has_tensors = False
    if plan.is_checked:
        check_expert_ids(buffer, plan.num_tokens)
        if plan.config.masks_ranks:
            check_own_rank(MASKED_RANKS, tensors[MASKED_RANKS], buffer.rank)

    args.y = y_address
    args.wait_timeout_ns = plan.wait_timeout_ns
    args.num_tokens = plan.num_tokens
    if recorder is not None:
        args.trace = recorder.attach(plan.config).data_ptr()
        args.trace_capacity = recorder.capacity
    return plan, args


def is_checked(options: CallArguments, buffer: SymmBuffer) -> bool:
    """Whether a call looks at what it reads, and the emulator for races."""
    checked = options.get("checked")
    return buffer.is_emulated if checked is None else checked


def _make_plan(
    key: tuple[Any, ...],
    y: torch.Tensor,
    buffer: SymmBuffer,
    tensors: CallTensors,
    options: CallArguments,
    expected: int,
    is_uneven: bool,
) -> CallPlan:
    """The plan to be found by `key`; within a capture, perhaps an earlier one instead.

    Reads nothing of the tensors but what the key is made of.
    """
    check_values(options)
    target = _target(options, buffer)
    check_output(y, buffer)
    most = buffer.shape.num_max_tokens_per_rank
    if not 0 <= expected <= most:
        raise ValueError(
            f"expected_tokens_per_rank must be 0 to num_max_tokens_per_rank ({most}); "
            f"got {expected}"
        )
    for name, tensor in tensors.items():
        check_form(name, tensor, CALL_TENSORS[name], buffer, y.shape[0])
    choose = _chooser_on(target, buffer, options, masks_ranks=MASKED_RANKS in tensors)
    config = _choose_config(choose, expected, is_uneven)
    gpu = buffer.gpu
    if gpu is not None and config.num_sms > gpu.num_sms:
        # Its CTAs wait for each other, so all must be resident.
        raise ValueError(
            f"num_sms must be at most {gpu.num_sms}, the SMs of {gpu.name}; got {config.num_sms}"
        )
    if gpu is not None and not is_loaded(config, gpu):
        earlier = _earlier_plan(key, buffer)
        # Loading takes long, may wait for all that runs on the GPU, and in a capture, drivers
        # before CUDA 12.3 refuse it. Not kept: after the capture, the kernel that fits is loaded.
        if earlier is not None and gpu.is_capturing():
            return earlier
    logger.debug(
        "calls with %s and about %d tokens per rank: block_m %d, num_stages %d, %d CTAs, for %s",
        buffer,
        expected,
        config.block_m,
        config.num_stages,
        config.num_sms,
        config.arch,
    )
    plan = CallPlan(
        config=config,
        config_number=buffer.caches.number_of(config),
        num_tokens=y.shape[0],
        tensor_bytes={name: tensor.nbytes for name, tensor in tensors.items()},
        is_checked=is_checked(options, buffer),
        wait_timeout_ns=max(1, round(1e9 * _timeout_s(options, buffer))),
        launcher=None if gpu is None else launcher_of(config, gpu),
    )
    return buffer.caches.plans.put(key, plan)


def _earlier_plan(key: tuple[Any, ...], buffer: SymmBuffer) -> CallPlan | None:
    """The newest plan of the same call that expects other tokens, or them more or less evenly."""
    _, _, *call = key
    for (_, _, *other_call), plan in reversed(buffer.caches.plans.items()):
        if other_call == call:
            return plan
    return None


def config_chooser(
    buffer: SymmBuffer, options: CallArguments, *, masks_ranks: bool = False
) -> ConfigChooser:
    """What chooses the configs of a buffer's calls with these options; it can be pickled. Raises
    ValueError for options that no call may have. masks_ranks: they are given `masked_ranks`."""
    check_values(options)
    return _chooser_on(_target(options, buffer), buffer, options, masks_ranks=masks_ranks)


def _chooser_on(
    target: Target, buffer: SymmBuffer, options: CallArguments, *, masks_ranks: bool
) -> ConfigChooser:
    gpu = buffer.gpu
    num_sms = options.get("num_sms")
    if num_sms is None:
        num_sms = EMULATED_NUM_SMS if gpu is None else gpu.num_sms
    return ConfigChooser(
        shape=buffer.shape,
        arch=target.name,
        num_sms=num_sms,
        activation=activation_of(
            options.get("activation", DEFAULT_ACTIVATION), options.get("activation_clamp")
        ),
        fast_math=options.get("fast_math", True),
        accumulate=bool(options.get("accumulate")),
        overrides=tuple(overrides_of(options).items()),
        trace=buffer.recorder is not None,
        gpu=None if gpu is None else gpu.name,
        masks_ranks=masks_ranks,
    )


# Of all calls of one kind, where they were chosen ahead.
_chosen: BoundedCache[ConfigChooser, ChosenConfigs] = BoundedCache(64)


def choose_all(choose: ConfigChooser) -> ChosenConfigs:
    """The configs of all calls of one kind; calls take them from here then."""
    found = _chosen.get(choose)
    if found is not None:
        return found
    return _chosen.put(
        choose, ChosenConfigs(choose, choose.shape.num_max_tokens_per_rank, choose.key)
    )


def _choose_config(choose: ConfigChooser, expected_tokens: int, is_uneven: bool) -> MegaMoEConfig:
    chosen = _chosen.get(choose)
    if chosen is not None:
        return chosen(expected_tokens, is_uneven)
    return _choose_one(choose, expected_tokens, is_uneven)


@lru_cache(maxsize=4096)
def _choose_one(choose: ConfigChooser, expected_tokens: int, is_uneven: bool) -> MegaMoEConfig:
    return choose(expected_tokens, is_uneven)


def _target(options: CallArguments, buffer: SymmBuffer) -> Target:
    """What the call runs on; a GPU is one only."""
    own = EMULATED if buffer.gpu is None else buffer.gpu.target
    name = options.get("arch")
    target = own if name is None else target_of(name)
    if target is not own and buffer.gpu is not None:
        raise ValueError(
            f"arch must be {own.name}, that of {buffer.device}, or None; got {target.name!r}"
        )
    return target


def _timeout_s(options: CallArguments, buffer: SymmBuffer) -> float:
    default = DEFAULT_EMULATED_TIMEOUT_S if buffer.is_emulated else DEFAULT_TIMEOUT_S
    return options.get("timeout_s") or default


def args_of_weights(
    plan: CallPlan, buffer: CallMemory, l1_weights: Pair, l2_weights: Pair, biases: Biases | None
) -> tuple[CppStruct, OccupiedMemory]:
    """The arguments with all that does not change from call to call, made once for all that this
    depends on, after a check of the weights; and where no output of the call may lie."""
    weights = (*l1_weights, *l2_weights)
    known = buffer.caches.known_tensors.get(id(weights[0]))
    if known is not None and known.are(weights, biases):
        args = known.forms.args.get(plan.config_number)
        if args is not None:
            return args, known.forms.occupied
    forms = _known_forms(buffer, weights, biases)
    args = forms.args.get(plan.config_number)
    if args is None:  # otherwise tensors that were checked before, behind other objects
        args = forms.args[plan.config_number] = _make_args(plan.config, buffer, weights, biases)
    known = KnownTensors(weights, biases, forms)
    buffer.caches.known_tensors.put(id(weights[0]), known)
    return args, forms.occupied


def _known_forms(buffer: CallMemory, weights: Weights, biases: Biases | None) -> KnownForms:
    """Of these addresses and forms, with no arguments for new ones."""
    tensors = dict(zip(WEIGHT_NAMES, weights, strict=True))
    if biases is not None:
        tensors.update(zip(BIAS_NAMES, biases, strict=True))
    for name, tensor in tensors.items():
        check_dense(name, tensor)
        check_memory(name, tensor)
    addresses = tuple(tensor.data_ptr() for tensor in tensors.values())
    # Compared, not looked up: few addresses are used with two forms.
    forms = tuple(form(tensor) for tensor in tensors.values())
    known = buffer.caches.known_forms.get(addresses)
    if known is None or known.forms != forms:
        read = [Extent.of_tensor(name, tensor) for name, tensor in tensors.items()]
        occupied = OccupiedMemory([*buffer.occupied.extents, *read])
        known = buffer.caches.known_forms.put(addresses, KnownForms(forms, {}, occupied))
    return known


def _make_args(
    config: MegaMoEConfig,
    buffer: CallMemory,
    weights: Sequence[torch.Tensor],
    biases: Biases | None,
) -> CppStruct:
    """weights: of both layers, each with its scales."""
    target_weights = config.target_weights
    expected = target_weights.tensors(buffer.shape.with_gate(config.has_gate).padded)
    for tensor, (name, (dtype, shape)) in zip(weights, expected.items(), strict=True):
        check_tensor(name, tensor, dtype, shape, buffer.device)
    w1, sf1, w2, sf2 = weights
    args = kernel_args(config.target.kernel)()
    addresses = buffer.memory.addresses
    own_address = addresses[buffer.rank]
    operands = target_weights.operands(config, own_address, (w1, sf1), (w2, sf2))
    for name, address in operands.addresses.items():
        setattr(args, name, address)
    gpu = buffer.gpu

    def encoded(spec: TensorMapSpec) -> CppStruct:
        image = spec.encode_emulated() if gpu is None else gpu.encode_tensor_map(spec)
        return TensorMap.from_buffer_copy(image)

    for name, spec in operands.tensor_maps.items():
        member = getattr(args, name)
        if isinstance(member, ctypes.Array):
            columns, num_rows = spec.box
            for i in range(len(member)):
                box = (columns, num_rows * (i + 1) // len(member))
                member[i] = encoded(replace(spec, box=box))
        else:
            setattr(args, name, encoded(spec))
    for rank, address in enumerate(addresses):
        args.rank_buffers[rank] = address
    if biases is not None:
        check_biases_form(biases, buffer)
        args.l1_biases, args.l2_biases = (bias.data_ptr() for bias in biases)
    args.status = buffer.memory.status_address
    args.rank_idx = buffer.rank
    return args
