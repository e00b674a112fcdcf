"""The symmetric buffer of one rank, and its creation across a group."""

from __future__ import annotations

import itertools
import logging
import weakref
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist

from deep_moe.described import described_as
from deep_moe.devices import named_device
from deep_moe.heuristics.shape import DEFAULT_POOL_TOKENS, MoEShape
from deep_moe.heuristics.symm_buffer_layout import symm_buffer_layout
from deep_moe.targets import EMULATED, Target, target_of, target_of_device
from deep_moe.weights import DEFAULT_WEIGHTS

from .call_plan import CallCaches
from .checks import Y_BYTES, refuse_gradients
from .gpu import gpu_of
from .peers import exists, gather_objects
from .rank_buffer import ClosedBufferError, RankBuffer
from .symm_memory import (
    DeviceMemory,
    HostMemory,
    private_host_memories,
    shared_host_memory,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.heuristics.segments import Layout
    from deep_moe.tokens import TokenFormatName
    from deep_moe.trial.trace import Recorder
    from deep_moe.weights import WeightsName

logger = logging.getLogger(__name__)

# What a buffer has until it is closed.
_GIVEN_BACK = ("x", "x_sf", "topk_idx", "topk_weights", "memory")

# Open buffers by handle, so that an operator, whose arguments are tensors and numbers, finds its
# buffer. Numbers are never used twice.
_open_buffers: weakref.WeakValueDictionary[int, SymmBuffer] = weakref.WeakValueDictionary()
_next_handle = itertools.count(1)


class SymmBuffer(RankBuffer):
    """One rank's inputs and work space.

    Attributes:
        x: float8_e4m3fn [max tokens, hidden]; with token_format "bf16" bfloat16; with "nvfp4" uint8
            [max tokens, hidden/2]. Rows may be longer than hidden.
        x_sf: int32 [max tokens, hidden/128], rounded up; the bytes behind the last scale must be
            zero. With "fp8_128" float32 [max tokens, hidden/128]; with "fp8_token" float32 [max
            tokens, 1]; with "nvfp4" int32 [max tokens, 1 + hidden/64], rounded up; with "bf16"
            int32 [max tokens, 0].
        topk_idx: int64 [max tokens, topk].
        topk_weights: float32 [max tokens, topk].
        nbytes: size of the whole buffer.

    The caller fills the first four, which are views of the buffer, before a call.

    One thread at a time uses a buffer: a call of a second thread is an error.

    After a call that raised MegaMoEError, further calls are errors until `reset()` on every rank.
    The inputs survive.
    """

    def __init__(
        self,
        shape: MoEShape,
        memory: HostMemory | DeviceMemory,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__("sym_buffer", symm_buffer_layout(shape), memory, group)
        self.shape = shape
        self.handle = next(_next_handle)
        _open_buffers[self.handle] = self
        padded_x = self._view("input_x", shape.tokens.dtype)
        self.x = padded_x[:, : shape.tokens.num_elements(shape.hidden)]
        if shape.tokens.has_scales:
            dtype = shape.tokens.scale_torch_dtype
            assert dtype is not None
            padded_sf = self._view("input_x_sf", dtype)
            self.x_sf = padded_sf[:, : shape.tokens.num_row_words(shape.hidden)]
        else:
            no_scales = (shape.num_max_tokens_per_rank, 0)
            self.x_sf = torch.empty(no_scales, dtype=torch.int32, device=self.x.device)
        if shape.padded is not shape:
            # What no caller writes: values that are multiplied by zero must be numbers, and scales
            # behind the last group must not be a token's largest.
            padded_x.view(torch.uint8)[:, shape.tokens.num_bytes(shape.hidden) :] = 0
            if shape.tokens.has_scales:
                padded_sf[:, self.x_sf.shape[1] - 1 :] = 0
        self.topk_idx = self._view("input_topk_idx", torch.int64)
        self.topk_weights = self._view("input_topk_weights", torch.float32)
        self.y_row_bytes = Y_BYTES * shape.hidden
        self.caches = CallCaches()
        # While calls are recorded: see deep_moe/trial/trace/.
        self.recorder: Recorder | None = None

    def __repr__(self) -> str:
        shape = self.shape
        shared = f"{shape.num_shared_experts} shared, " if shape.num_shared_experts else ""
        return (
            f"SymmBuffer(rank {self.rank} of {shape.num_ranks} on {self.device}, "
            f"{shape.num_experts} experts, {shared}top-{shape.num_topk}, hidden {shape.hidden}, "
            f"intermediate {shape.intermediate_hidden}, {shape.weights} weights, "
            f"{shape.token_format} tokens"
            f"{' with biases' if shape.biases else ''}, "
            f"up to {shape.num_max_tokens_per_rank} tokens, {self.nbytes / 2**20:.1f} MiB, "
            f"{self.state})"
        )

    if not TYPE_CHECKING:  # so that mypy still knows which attributes there are

        def __getattr__(self, name: str) -> NoReturn:
            """What a closed buffer no longer has."""
            if name in _GIVEN_BACK:
                raise self.closed_error()
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def num_ranks(self) -> int:
        return self.shape.num_ranks

    @cached_property
    def target(self) -> Target:
        """What calls run on, where they say nothing."""
        return EMULATED if self.gpu is None else self.gpu.target

    @classmethod
    def of_handle(cls, handle: int) -> SymmBuffer:
        """The open buffer with this handle."""
        buffer = _open_buffers.get(handle)
        if buffer is None:
            raise ClosedBufferError(f"sym_buffer must be an open buffer; handle {handle} is closed")
        return buffer

    def refuse_gradients(self, y: torch.Tensor) -> None:
        """Raise if a gradient is asked for of y or of what was written to the views. These are made
        anew then, so that later calls do not meet the old history."""
        try:
            refuse_gradients(
                y=y, **{"sym_buffer.topk_weights": self.topk_weights, "sym_buffer.x": self.x}
            )
        except ValueError:
            self.x, self.topk_weights = self.x.detach(), self.topk_weights.detach()
            raise

    def _give_back(self) -> None:
        _open_buffers.pop(self.handle, None)
        self.caches.clear()
        for name in _GIVEN_BACK:
            delattr(self, name)

    def _view(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        segment = self.layout[name]
        raw = self.memory.tensor[segment.offset : segment.end]
        return raw.view(dtype).view(segment.shape[0], -1)


def get_symm_buffer_for_mega_moe(
    group: ProcessGroup | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    *,
    weights: WeightsName = DEFAULT_WEIGHTS,
    num_shared_experts: int = 0,
    num_pool_tokens: int | None = DEFAULT_POOL_TOKENS,
    biases: bool = False,
    token_format: TokenFormatName | None = None,
    device: torch.device | str | int | None = None,
) -> SymmBuffer:
    """Make the buffer for calls with weights of one format. Every rank of `group` must call this.

    Args:
        group: a torch.distributed process group, or None for a single rank.
        num_experts: of all ranks together, at most 1024, and at most 512 of each.
        num_max_tokens_per_rank: most tokens of one call.
        num_topk: experts that a token names, at most 32.
        hidden: values of a token, a multiple of 32. y is of this size, and so are `x` and `x_sf`,
            which are views of longer rows unless hidden is a multiple of 128.
        intermediate_hidden: rows of gate, and of up: a multiple of 32.
        weights: their format, one of those of `transform_weights_for_mega_moe`.
        num_shared_experts: experts of the same sizes, 0 to 4, that every token goes to beside its
            slots, with weight 1. Every rank holds all of them, behind its routed ones in the same
            tensors; `num_experts` is without them.
        num_pool_tokens: rows of the pool that received tokens go through, a multiple of 384. A call
            that brings more rows reuses them, and no token is lost. None: as many rows as a call
            may bring, in a larger buffer (`buffer_size`).
        biases: whether both linear layers have biases, which each call is then given.
        token_format: format of the tokens, which decides the types of `x` and `x_sf`. "mxfp8", the
            default with mxfp4 and fp8 weights: E4M3 with a UE8M0 scale per 32 values, four in an
            int32. "bf16", the default with other weights, also with mxfp4 ones: no scales. Where
            hidden is a multiple of 128, with fp8 weights: "fp8_token", E4M3 with a float32 scale
            per token, and on sm_90a "fp8_128", E4M3 with a float32 scale per 128 values. On SM100,
            for which a CPU stands, the default with mxfp8 weights is "mxfp8", the only one there,
            and with nvfp4 weights "nvfp4".
        device: where the calls run. A CPU runs them in the emulator, with memory that the processes
            of the group share. By default the current GPU for a group with NCCL and, if there is a
            GPU, for None; otherwise the CPU.

    On GPUs, groups that overlap need their buffers in order, the largest group's first: PyTorch
    (seen with 2.11, pytorch/pytorch#196082) counts a process's exchanges of memory, not a group's,
    and waits for ever where the counts of a group's ranks differ.

    Raises:
        TypeError: an argument has the wrong type. All ranks raise.
        ValueError: an argument is not allowed, or differs between ranks, or ranks cannot reach each
            other's memory. All ranks raise.
        MemoryError: the machine has too little memory for these sizes.
    """
    arguments: dict[str, Any] = {
        "num_experts": num_experts,
        "num_max_tokens_per_rank": num_max_tokens_per_rank,
        "num_topk": num_topk,
        "hidden": hidden,
        "intermediate_hidden": intermediate_hidden,
        "num_pool_tokens": num_pool_tokens,
        "weights": weights,
        "biases": biases,
        "num_shared_experts": num_shared_experts,
        "token_format": token_format,
    }
    num_ranks = ranks_of(group)
    device = device_for(group, device)
    if group is not None:
        require_equal({**arguments, "device": device.type}, group)
    arguments["token_format"] = tokens_on(device, weights, token_format)
    shape = MoEShape(num_ranks=num_ranks, **arguments)
    gpu = gpu_of(device)
    if gpu is not None:
        gpu.target.weights_of(weights, shape.token_format)  # or an error
    layout = symm_buffer_layout(shape)
    return SymmBuffer(shape, memory_for(layout, group, device), group)


def tokens_on(
    device: torch.device, weights: WeightsName, token_format: TokenFormatName | None
) -> TokenFormatName:
    """The format of the tokens as the caller gave it, by default that of the device's target."""
    if token_format is not None:
        return token_format
    return target_of_device(device).default_tokens(weights)


def memory_for(
    layout: Layout, group: ProcessGroup | None, device: torch.device
) -> HostMemory | DeviceMemory:
    """Symmetric memory with a zeroed control part. Every rank of `group` must call this."""
    if device.type == "cuda":
        memory = DeviceMemory(group, layout.num_bytes, layout.mark("control_bytes"), device)
        if group is not None:
            gather_objects(None, group)  # no rank may write to a buffer that is not zeroed yet
        return memory
    if group is None:
        return private_host_memories(1, layout.num_bytes)[0]
    return shared_host_memory(group, layout.num_bytes)


@described_as(get_symm_buffer_for_mega_moe)
def buffer_size(
    num_ranks: int,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    *,
    weights: WeightsName = DEFAULT_WEIGHTS,
    num_shared_experts: int = 0,
    num_pool_tokens: int | None = DEFAULT_POOL_TOKENS,
    biases: bool = False,
    token_format: TokenFormatName | None = None,
    arch: str | None = None,
) -> int:
    """Bytes of the buffer that `get_symm_buffer_for_mega_moe` makes on each of `num_ranks` ranks
    from the same arguments. Nothing is allocated. `deep-moe config` shows what is in it.

    Other arguments are as of `get_symm_buffer_for_mega_moe`.

    Args:
        num_ranks: ranks of the group.
        arch: the ranks' target, which decides the default of `token_format` with mxfp8 and nvfp4
            weights. With these, `arch` or `token_format` must be given.

    Examples:
        deepseek-v4-pro on 8 ranks with up to 8192 tokens each, in GiB, and with a row of the pool
        for each token that may come:

        >>> round(buffer_size(8, 384, 8192, 6, 7168, 3072) / 2**30, 2)
        0.97
        >>> round(buffer_size(8, 384, 8192, 6, 7168, 3072, num_pool_tokens=None) / 2**30, 2)
        5.52

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    if token_format is None and arch is not None:
        token_format = target_of(arch).default_tokens(weights)
    shape = MoEShape(
        num_ranks=num_ranks,
        num_experts=num_experts,
        num_topk=num_topk,
        hidden=hidden,
        intermediate_hidden=intermediate_hidden,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        num_pool_tokens=num_pool_tokens,
        weights=weights,
        biases=biases,
        num_shared_experts=num_shared_experts,
        token_format=cast("TokenFormatName", token_format),
    )
    return symm_buffer_layout(shape).num_bytes


def require_equal(arguments: dict[str, Any], group: ProcessGroup) -> None:
    """Raise ValueError on every rank if an argument is not the same on all."""
    difference = describe_difference(dict(enumerate(gather_objects(arguments, group))))
    if difference is not None:
        raise ValueError(difference)


def describe_difference(arguments_of: dict[int, dict[str, Any]]) -> str | None:
    """Words for the first argument that differs between ranks, or None.

    >>> describe_difference({0: {"hidden": 128}, 1: {"hidden": 256}, 2: {"hidden": 128}})
    'hidden must be the same on every rank; got 128 on ranks 0, 2 and 256 on rank 1'
    """
    first, *_ = arguments_of.values()
    for name in first:
        ranks_with: dict[str, list[int]] = {}
        for rank, arguments in arguments_of.items():
            ranks_with.setdefault(repr(arguments.get(name)), []).append(rank)
        if len(ranks_with) > 1:
            got = " and ".join(
                f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
                for value, ranks in ranks_with.items()
            )
            return f"{name} must be the same on every rank; got {got}"
    return None


def ranks_of(group: object) -> int:
    """How many ranks a group has, or an error that says what a group is."""
    if group is None:
        return 1
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "group must be a torch.distributed process group that this process belongs to, or "
            f"None; got {group!r}"
        )
    # A destroyed group is still an object. An engine that starts again in one process has another,
    # often of the same name.
    if not exists(group):
        raise ValueError(
            f"group must be a process group that exists; {group.group_name!r} was destroyed: make "
            "buffers anew, with a group that was made since"
        )
    return dist.get_world_size(group)


@cache
def _say_once(reason: str) -> None:
    logger.warning(
        "calls run in the emulator on this CPU, which computes the same and takes thousands of "
        'times as long: device is not given, and %s; device="cpu" says that this is meant',
        reason,
    )


def _say_that_calls_are_emulated(group: ProcessGroup | None) -> None:
    if group is not None:
        _say_once(f"the backend of group is {dist.get_backend(group)}, not nccl")
    elif torch.version.cuda is None:
        _say_once(f"this PyTorch ({torch.__version__}) is built without CUDA")
    else:
        _say_once("PyTorch finds no CUDA device that can be used")


def device_for(group: ProcessGroup | None, device: torch.device | str | int | None) -> torch.device:
    """Where a buffer for `group` lives; `device` as the caller gave it."""
    if device is None:
        if group is None:
            uses_gpu = torch.cuda.is_available()
        else:
            uses_gpu = "nccl" in str(dist.get_backend(group))
        device = "cuda" if uses_gpu else "cpu"
        if not uses_gpu:
            _say_that_calls_are_emulated(group)
    chosen = named_device(device)
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or a CUDA device; got {chosen}")
    if chosen.type == "cuda":
        num_devices = torch.cuda.device_count()
        if num_devices <= (chosen.index or 0):
            raise ValueError(
                f"device must be a CPU or one of the {num_devices} CUDA devices of this machine; "
                f"got {chosen}"
            )
        if chosen.index is None:
            chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen
