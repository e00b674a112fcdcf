"""The buffer, the weights and the call."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

import deep_moe
import deep_moe.fused.input_preparation  # defines the operator
from deep_moe.activations import Activation, Situ
from deep_moe.described import described_as
from deep_moe.formats.sizes import K_BLOCK
from deep_moe.fused.call_tensors import with_statistics
from deep_moe.fused.checks import check_contiguous, check_recipe, check_tensor, require_type
from deep_moe.fused.mega_moe import call_with_layers
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.segments import ceil_div
from deep_moe.heuristics.shape import require_int
from deep_moe.targets import choose_config, target_of_device
from deep_moe.tensor_memory import check_dense, check_memory
from deep_moe.weights.layers import LayerTensors, MegaMoEWeights

from .operands import packed_weights
from .utils import align

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.activations import ActivationName
    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName

MmaType = Literal["fp8xfp4", "fp8xfp8", "bf16xbf16"]
MMA_TYPE: MmaType
FP8_TYPE: MmaType
BF16_TYPE: MmaType
MMA_TYPE, FP8_TYPE, BF16_TYPE = "fp8xfp4", "fp8xfp8", "bf16xbf16"
# Of weights, by mma_type.
WEIGHTS: dict[MmaType, WeightsName] = {MMA_TYPE: "mxfp4", FP8_TYPE: "fp8", BF16_TYPE: "bf16"}
DeepGemmActivation = Literal["swiglu", "situ"]
ACTIVATION: DeepGemmActivation = "swiglu"
ACTIVATIONS = get_args(DeepGemmActivation)
RECIPE = (1, 1, 32)
FLOAT_RECIPE = (128, 128, 128)  # with float32 scales of tokens
TOKEN_ALIGNMENT = 384  # the least number that every size of an m-block there divides

Pair = tuple[torch.Tensor, torch.Tensor]

_num_sms: int | None = None


@described_as(deep_moe.get_symm_buffer_for_mega_moe)
class SymmBuffer:
    """One rank's inputs and work space, as DeepGEMM's class of this name.

    Other arguments and errors are as of `deep_moe.get_symm_buffer_for_mega_moe`.

    Args:
        group: a process group, or None for one rank.
        num_shared_experts: only 0.
        mma_type: "fp8xfp4", "fp8xfp8" or "bf16xbf16", for calls of `fp8_fp4_mega_moe`,
            `fp8_mega_moe` or `bf16_mega_moe`.
        activation: "swiglu" or "situ"; the buffer is the same.
        base: only None.
        token_format: "fp8_128" with "fp8xfp8" on Hopper, where x_sf is float32.

    Attributes:
        x: float8_e4m3fn [max tokens, hidden].
        x_sf: int32 [max tokens, hidden/128]. With mma_type "bf16xbf16" x is bfloat16, and x_sf is
            empty.
        topk_idx: int64 [max tokens, topk].
        topk_weights: float32 [max tokens, topk].
        buffer: int8, all of the memory.
        handle: its buffer_ptrs say where every rank's lies.
        own: the `deep_moe.SymmBuffer` that does the work; it has `reset()`, and
            `deep_moe.prepare_inputs` takes it.

    group and the sizes are what it was made with, but num_max_tokens_per_rank is rounded up to a
    multiple of `get_token_alignment_for_mega_moe()`.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        num_shared_experts: int = 0,
        mma_type: MmaType = MMA_TYPE,
        activation: DeepGemmActivation = ACTIVATION,
        base: SymmBuffer | None = None,
        *,
        token_format: TokenFormatName | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if num_shared_experts != 0:
            raise ValueError(
                "num_shared_experts must be 0: these functions do not take shared experts; "
                "deep_moe.get_symm_buffer_for_mega_moe(num_shared_experts=...) and its calls do; "
                f"got {num_shared_experts}"
            )
        weights = _weights_of(mma_type)
        require_int("num_max_tokens_per_rank", num_max_tokens_per_rank, "at least 1")
        _check_activation(activation)
        if base is not None:
            raise ValueError("base must be None: every buffer has memory of its own")
        self.own: deep_moe.SymmBuffer = deep_moe.get_symm_buffer_for_mega_moe(
            group,
            num_experts,
            align(num_max_tokens_per_rank, get_token_alignment_for_mega_moe()),
            num_topk,
            hidden,
            intermediate_hidden,
            weights=weights,
            token_format=token_format,
            device=device,
        )
        self.group = group
        self.num_experts = num_experts
        self.num_max_tokens_per_rank = self.own.shape.num_max_tokens_per_rank
        self.num_topk = num_topk
        self.hidden = hidden
        self.intermediate_hidden = intermediate_hidden
        self.num_shared_experts = num_shared_experts
        self.mma_type = mma_type
        self.activation = activation
        memory = self.own.memory
        self.buffer: torch.Tensor | None = memory.tensor[: self.own.nbytes].view(torch.int8)
        self.handle: Any = SimpleNamespace(buffer_ptrs=list(memory.addresses))
        self.x: torch.Tensor | None = self.own.x
        self.x_sf: torch.Tensor | None = self.own.x_sf
        self.topk_idx: torch.Tensor | None = self.own.topk_idx
        self.topk_weights: torch.Tensor | None = self.own.topk_weights

    def destroy(self) -> None:
        """Give the memory back. The buffer cannot be used after this."""
        self.own.close()
        self.buffer = self.handle = self.group = None
        self.x = self.x_sf = self.topk_idx = self.topk_weights = None

    def __getattr__(self, name: str) -> Any:
        if name.removeprefix("shared_") in ("l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf"):
            raise AttributeError(
                f"SymmBuffer has no {name}: the kernel's pool is laid out otherwise"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


@described_as(SymmBuffer)
def get_symm_buffer_for_mega_moe(
    group: ProcessGroup | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    num_shared_experts: int = 0,
    use_fp8_dispatch: bool | None = None,
    mma_type: MmaType = MMA_TYPE,
    activation: DeepGemmActivation = ACTIVATION,
    *,
    device: torch.device | str | int | None = None,
) -> SymmBuffer:
    """A `SymmBuffer`. Every rank of `group` must call this.

    Other arguments are as of `SymmBuffer`.

    Args:
        use_fp8_dispatch: True is the same as the default of mma_type; deprecated, as it is there.
            False goes with mma_type "bf16xbf16" only. In versions without num_shared_experts it is
            the seventh argument, so a bool there is taken for it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    if isinstance(num_shared_experts, bool):
        use_fp8_dispatch, num_shared_experts = num_shared_experts, 0
    if use_fp8_dispatch is not None:
        travel_as_fp8 = mma_type != BF16_TYPE
        if bool(use_fp8_dispatch) != travel_as_fp8:
            raise ValueError(
                f"use_fp8_dispatch must be {travel_as_fp8} or None: with mma_type {mma_type!r} "
                f"tokens travel as {'FP8' if travel_as_fp8 else 'BF16'}; got {use_fp8_dispatch}"
            )
        warnings.warn(
            "use_fp8_dispatch is deprecated, mma_type says it", DeprecationWarning, stacklevel=2
        )
    return SymmBuffer(
        group,
        num_experts,
        num_max_tokens_per_rank,
        num_topk,
        hidden,
        intermediate_hidden,
        num_shared_experts,
        mma_type,
        activation,
        device=device,
    )


def transform_weights_for_mega_moe(
    l1_weights: Pair | torch.Tensor,
    l2_weights: Pair | torch.Tensor,
    activation: DeepGemmActivation = ACTIVATION,
    mma_type: MmaType = MMA_TYPE,
    *,
    arch: str | None = None,
    requantize: bool = False,
) -> MegaMoEWeights:
    """(l1, l2) for `fp8_fp4_mega_moe` or, with mma_type "fp8xfp8", `fp8_mega_moe`, or, of tensors
    without scales, `bf16_mega_moe`, as new tensors, in deep_moe's layout.

    Args:
        l1_weights: packed E2M1 [E, 2*I, H/2], gate rows before up rows, and scales;
        l2_weights: packed E2M1 [E, H, I/2] and scales. Packed: int8, uint8 or float4_e2m1fn_x2.
            Scales: one per 32 values, int32 with four in each, of any strides, float8_e8m0fnu,
            uint8, or float32 powers of two. With "fp8xfp8" float8_e4m3fn [E, 2*I, H] and [E, H, I],
            and such scales, or one for each 128 x 128 values. bfloat16 [E, 2*I, H] and [E, H, I]
            are tensors, not pairs, and need no mma_type; what is returned for them are pairs, too,
            each with an empty tensor.
        activation: "swiglu" or "situ"; the weights are the same.
        mma_type: "fp8xfp4", "fp8xfp8" or "bf16xbf16": the format of the weights.
        arch: the target, by default that of the device.
        requantize: as in `deep_moe.transform_weights_for_mega_moe`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    _check_activation(activation)
    if isinstance(l1_weights, torch.Tensor) and isinstance(l2_weights, torch.Tensor):
        mma_type = BF16_TYPE if mma_type == MMA_TYPE else mma_type  # the default there too
    weights = _weights_of(mma_type)
    if mma_type == MMA_TYPE:
        l1: LayerTensors | torch.Tensor = packed_weights("l1_weights", l1_weights)
        l2: LayerTensors | torch.Tensor = packed_weights("l2_weights", l2_weights)
    else:
        l1, l2 = l1_weights, l2_weights
    return deep_moe.transform_weights_for_mega_moe(
        l1, l2, arch, weights=weights, requantize=requantize
    )


@described_as(deep_moe.mega_moe)
def fp8_fp4_mega_moe(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    sym_buffer: SymmBuffer,
    shared_l1_weights: Pair | None = None,
    shared_l2_weights: Pair | None = None,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = RECIPE,
    activation: DeepGemmActivation = ACTIVATION,
    activation_clamp: float | None = None,
    fast_math: bool = True,
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
    *,
    arch: str | None = None,
) -> None:
    """`deep_moe.fp8_fp4_mega_moe`, for a `SymmBuffer` of this module: writes y, bfloat16
    [tokens, hidden].

    Other arguments and errors are as of `deep_moe.mega_moe`.

    Args:
        y: bfloat16 [tokens, hidden], written.
        l1_weights: what `transform_weights_for_mega_moe` of this module returned.
        l2_weights: what `transform_weights_for_mega_moe` of this module returned.
        sym_buffer: a `SymmBuffer` of this module with mma_type "fp8xfp4".
        shared_l1_weights: None only. The order of what follows sym_buffer has changed from version
            to version there; name it.
        shared_l2_weights: None only. The order of what follows sym_buffer has changed from version
            to version there; name it.
        cumulative_local_expert_recv_stats: int32 [local experts]; the call adds to each entry the
            number of tokens that this expert received.
        recipe: only (1, 1, 32): a scale for every 32 values.
        activation: "swiglu" or "situ".
        activation_clamp: with "swiglu" only.
        situ_beta: with "situ" only, by default 4 and 25.
        situ_linear_beta: with "situ" only, by default 4 and 25.
        arch: on a CPU, the target to emulate.
    """
    _check_buffer(sym_buffer)
    _refuse_shared(shared_l1_weights, shared_l2_weights)
    deep_moe.fp8_fp4_mega_moe(
        y,
        l1_weights,
        l2_weights,
        sym_buffer.own,
        cumulative_local_expert_recv_stats,
        recipe,
        _activation(activation, situ_beta, situ_linear_beta),
        activation_clamp,
        fast_math,
        arch=arch,
        num_sms=_num_sms,
    )


@described_as(fp8_fp4_mega_moe)
def fp8_mega_moe(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = RECIPE,
    activation: DeepGemmActivation = ACTIVATION,
    activation_clamp: float | None = None,
    fast_math: bool = True,
    num_tokens_bound: int | None = None,
    *,
    arch: str | None = None,
) -> None:
    """`deep_moe.mega_moe` for a `SymmBuffer` of this module with mma_type "fp8xfp8": writes y,
    bfloat16 [tokens, hidden].

    Other arguments and errors are as of `fp8_fp4_mega_moe`.

    Args:
        l1_weights: what `transform_weights_for_mega_moe` of this module returned for that mma_type.
        l2_weights: what `transform_weights_for_mega_moe` of this module returned for that mma_type.
        sym_buffer: a `SymmBuffer` of this module with mma_type "fp8xfp8".
        recipe: (1, 1, 32), tokens with a UE8M0 scale for every 32 values; for a buffer of
            `get_symm_buffer_for_sm90_mega_moe` also (128, 128, 128), which is the same as leaving
            it out: they have a float32 scale for every 128.
        num_tokens_bound: no rank has more tokens in this call; for the choice of a tile.
    """
    _check_buffer(sym_buffer, FP8_TYPE)
    has_floats = sym_buffer.own.shape.token_format == "fp8_128"
    if has_floats and tuple(recipe) == FLOAT_RECIPE:
        recipe = RECIPE
    check_recipe(recipe)
    call_with_layers(
        "fp8_mega_moe",
        y,
        l1_weights,
        l2_weights,
        sym_buffer.own,
        with_statistics(cumulative_local_expert_recv_stats),
        activation,
        activation_clamp,
        fast_math,
        None,
        None,
        {"expected_tokens_per_rank": num_tokens_bound, "arch": arch, "num_sms": _num_sms},
    )


@described_as(fp8_fp4_mega_moe)
def bf16_mega_moe(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    sym_buffer: SymmBuffer,
    shared_l1_weights: torch.Tensor | None = None,
    shared_l2_weights: torch.Tensor | None = None,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    activation: DeepGemmActivation = ACTIVATION,
    activation_clamp: float | None = None,
    fast_math: bool = True,
    *,
    arch: str | None = None,
) -> None:
    """`deep_moe.mega_moe` for a `SymmBuffer` of this module with mma_type "bf16xbf16": writes y,
    bfloat16 [tokens, hidden].

    Other arguments and errors are as of `fp8_fp4_mega_moe`.

    Args:
        l1_weights: what `transform_weights_for_mega_moe` of this module made of bfloat16 tensors.
        l2_weights: what `transform_weights_for_mega_moe` of this module made of bfloat16 tensors.
        sym_buffer: a `SymmBuffer` of this module with mma_type "bf16xbf16".
        shared_l1_weights: None only.
        shared_l2_weights: None only.
    """
    _check_buffer(sym_buffer, BF16_TYPE)
    _refuse_shared(shared_l1_weights, shared_l2_weights)
    call_with_layers(
        "bf16_mega_moe",
        y,
        l1_weights,
        l2_weights,
        sym_buffer.own,
        with_statistics(cumulative_local_expert_recv_stats),
        _activation(activation, None, None),
        activation_clamp,
        fast_math,
        None,
        None,
        {"arch": arch, "num_sms": _num_sms},
    )


def mega_moe_pre_dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    buf_x: torch.Tensor,
    buf_x_sf: torch.Tensor,
    buf_topk_idx: torch.Tensor,
    buf_topk_weights: torch.Tensor,
    num_tokens: int,
    group_size: int = 32,
    use_fp4_acts: bool = False,
) -> None:
    """`deep_moe.prepare_inputs` of the first num_tokens rows into a buffer's four views; the rows
    behind them name no expert, with weights of 0.

    Args:
        x: bfloat16 [tokens, hidden].
        topk_idx: int64 or int32 [tokens, topk].
        topk_weights: float32 or bfloat16 [tokens, topk].
        buf_x: the buffer's x.
        buf_x_sf: the buffer's x_sf.
        buf_topk_idx: the buffer's topk_idx.
        buf_topk_weights: the buffer's topk_weights.
        num_tokens: how many rows of x are tokens.
        group_size: values that share a scale: only 32.
        use_fp4_acts: only False: tokens travel as FP8.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    if group_size != RECIPE[2]:
        raise ValueError(
            f"group_size must be {RECIPE[2]}, values that share a scale; got {group_size}"
        )
    if use_fp4_acts:
        raise ValueError("use_fp4_acts must be False: tokens travel as FP8; got True")
    require_type("buf_x_sf", buf_x_sf, torch.Tensor, "a tensor")
    if buf_x_sf.dtype == torch.float32:
        raise TypeError(
            "buf_x_sf must be int32; a buffer with float32 scales is for mega_moe_pre_dispatch_sm90"
        )
    views = (buf_x, buf_x_sf, buf_topk_idx, buf_topk_weights)
    fill_from_model(x, topk_idx, topk_weights, views, num_tokens)


def fill_from_model(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    views: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    num_tokens: int,
) -> None:
    """`deep_moe.prepare_inputs` of the first num_tokens rows into a buffer's views of x, x_sf,
    topk_idx and topk_weights; the rows behind them name no expert, with weights of 0."""
    given = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights}
    names = ("buf_x", "buf_x_sf", "buf_topk_idx", "buf_topk_weights")
    for name, tensor in {**given, **dict(zip(names, views, strict=True))}.items():
        require_type(name, tensor, torch.Tensor, "a tensor")
        check_dense(name, tensor)
        if tensor.ndim != 2:
            raise ValueError(f"{name} must be 2-dimensional; got shape {tuple(tensor.shape)}")
    for name, tensor in given.items():  # of the views `_check_views` asks
        check_memory(name, tensor)
    require_int("num_tokens", num_tokens, f"0 to the {x.shape[0]} rows of x")
    if not 0 <= num_tokens <= x.shape[0]:
        raise ValueError(f"num_tokens must be 0 to the {x.shape[0]} rows of x; got {num_tokens}")
    _check_views(*views)
    torch.ops.deep_moe.prepare_inputs(
        x[:num_tokens], topk_idx[:num_tokens], topk_weights[:num_tokens], *views
    )
    _, _, buf_topk_idx, buf_topk_weights = views
    buf_topk_idx[num_tokens:].fill_(-1)
    buf_topk_weights[num_tokens:].zero_()


def _check_views(
    buf_x: torch.Tensor,
    buf_x_sf: torch.Tensor,
    buf_topk_idx: torch.Tensor,
    buf_topk_weights: torch.Tensor,
) -> None:
    """Raise unless 2-dimensional tensors are as a buffer's views are."""
    num_rows, hidden = buf_x.shape
    device = buf_x.device
    is_bf16 = buf_x.dtype == torch.bfloat16
    check_tensor("buf_x", buf_x, (torch.float8_e4m3fn, torch.bfloat16), buf_x.shape, device)
    scales = (num_rows, 0 if is_bf16 else ceil_div(hidden, K_BLOCK))
    check_tensor("buf_x_sf", buf_x_sf, (torch.int32, torch.float32), scales, device)
    slots = (num_rows, buf_topk_idx.shape[1])
    check_tensor("buf_topk_idx", buf_topk_idx, torch.int64, slots, device)
    check_tensor("buf_topk_weights", buf_topk_weights, torch.float32, slots, device)
    check_contiguous("buf_topk_idx", buf_topk_idx)
    check_contiguous("buf_topk_weights", buf_topk_weights)
    for name, rows in (("buf_x", buf_x), ("buf_x_sf", buf_x_sf)):
        if rows.shape[1] and rows.stride(1) != 1:
            raise ValueError(f"{name} must have contiguous rows; got strides {rows.stride()}")


def get_token_alignment_for_mega_moe() -> int:
    """What a buffer's num_max_tokens_per_rank is rounded up to. Callers size their own tensors by
    it; the kernels here need no rounding."""
    return TOKEN_ALIGNMENT


def get_block_m_for_mega_moe(
    num_ranks: int,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_tokens: int,
    num_topk: int,
    mma_type: MmaType = MMA_TYPE,
) -> int:
    """Rows of an m-block of the kernel for `num_tokens` tokens per rank, on the current GPU or, if
    there is none, what a CPU emulates: the heuristics' choice, which overrides and tuning tables
    can change.

    Args:
        num_ranks: ranks of the group.
        num_experts: experts of all ranks.
        num_max_tokens_per_rank: most tokens of one call.
        num_tokens: tokens of a rank in this call.
        num_topk: slots of a token.
        mma_type: as of `get_symm_buffer_for_mega_moe`.
    """
    # The widths have no say in the number of rows.
    shape = MoEShape(
        num_ranks,
        num_experts,
        num_topk,
        K_BLOCK,
        K_BLOCK,
        num_max_tokens_per_rank,
        weights=_weights_of(mma_type),
    )
    target = target_of_device(torch.device(_default_device()))
    return choose_config(shape, num_tokens, arch=target.name).block_m


def set_num_sms(num_sms: int) -> None:
    """CTAs of every later call in this process, at most the GPU's SMs; a call checks it.

    Args:
        num_sms: a positive int.
    """
    global _num_sms
    if isinstance(num_sms, bool) or not isinstance(num_sms, int) or num_sms < 1:
        raise ValueError(f"num_sms must be a positive int; got {num_sms!r}")
    _num_sms = num_sms


def get_num_sms() -> int:
    """What `set_num_sms` was given, by default the SMs of the current GPU, or of one that a CPU
    stands for."""
    if _num_sms is not None:
        return _num_sms
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return target_of_device(torch.device("cpu")).default_num_sms


def use_deterministic_algorithms(enabled: bool) -> None:
    """Nothing to choose: every sum has one order, whatever ranks and warps do when.

    Args:
        enabled: either; nothing depends on it.
    """


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _weights_of(mma_type: str) -> WeightsName:
    if not isinstance(mma_type, str) or mma_type not in WEIGHTS:
        raise ValueError(
            "mma_type must be 'fp8xfp4' or 'fp8xfp8', FP8 tokens and MXFP4 or FP8 weights, or "
            f"'bf16xbf16'; got {mma_type!r}"
        )
    return WEIGHTS[mma_type]


def _refuse_shared(shared_l1_weights: object, shared_l2_weights: object) -> None:
    for name, value in (
        ("shared_l1_weights", shared_l1_weights),
        ("shared_l2_weights", shared_l2_weights),
    ):
        if value is not None:
            raise ValueError(
                f"{name} must be None: these functions do not take shared experts, deep_moe's own "
                f"call does; got {_kind(value)}. Name the arguments after sym_buffer, if this was "
                "another"
            )


def _check_buffer(sym_buffer: object, mma_type: MmaType = MMA_TYPE) -> None:
    if not isinstance(sym_buffer, SymmBuffer):
        raise TypeError(
            "sym_buffer must be of deep_moe.compat.deep_gemm.get_symm_buffer_for_mega_moe; "
            f"got {type(sym_buffer).__name__}"
        )
    if sym_buffer.mma_type != mma_type:
        raise ValueError(
            f"sym_buffer must be made with mma_type {mma_type!r}; got one with "
            f"{sym_buffer.mma_type!r}"
        )


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be {' or '.join(map(repr, ACTIVATIONS))}; deep_moe.fp8_fp4_mega_moe "
            f"takes others; got {activation!r}"
        )


def _activation(
    name: DeepGemmActivation, situ_beta: float | None, situ_linear_beta: float | None
) -> ActivationName | Activation:
    """As `deep_moe.fp8_fp4_mega_moe` takes it."""
    _check_activation(name)
    given = {"situ_beta": situ_beta, "situ_linear_beta": situ_linear_beta}
    parameters = {
        argument.removeprefix("situ_"): value
        for argument, value in given.items()
        if value is not None
    }
    if name != Situ.name:
        for parameter, value in parameters.items():
            raise ValueError(
                f"situ_{parameter} must be None with activation {name!r}: it belongs to "
                f"{Situ.name!r}; got {value}"
            )
    return Situ(**parameters) if parameters else name


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}"
    is_numbers = isinstance(value, Sequence) and all(isinstance(item, int) for item in value)
    return repr(value) if is_numbers else type(value).__name__
