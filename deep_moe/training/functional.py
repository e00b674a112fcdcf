"""`moe`: the differentiable layer as a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deep_moe.activations import Activation
from deep_moe.formats.block_scaled import GROUP_SIZE
from deep_moe.fused.checks import require_type
from deep_moe.heuristics.products import K_GROUP
from deep_moe.heuristics.training import MAX_EXPERTS, MAX_TOPK, VALUES_PER_CHUNK
from deep_moe.targets import target_of
from deep_moe.tensor_memory import check_dense, check_memory

from .experts import FP8_DATA_GRADIENTS, FP8_PRECISIONS, Precision
from .gathered_weights import GatheredWeight, is_gatherable_or_gathered, memory_of
from .operators import encode_activation, gated_activation_of, moe_op

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.activations import ActivationName
    from deep_moe.fused.buffer import SymmBuffer
    from deep_moe.split.throughput import AllToAll

Forward = Literal["training", "serving"]
_DTYPES = (torch.bfloat16, torch.float64)
_TOPK_IDX_DTYPES = (torch.int64, torch.int32)
_BIAS_DTYPES = (torch.bfloat16, torch.float32)


def moe(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor | None,
    w2: torch.Tensor,
    *,
    b1: torch.Tensor | None = None,
    b3: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    group: ProcessGroup | AllToAll | None = None,
    precision: Precision = "bf16",
    recompute: bool = False,
    activation: ActivationName | Activation = "swiglu",
    activation_clamp: float | None = None,
    max_recv_slots: int | None = None,
    keep_received: bool = False,
    quantize_kept: bool = False,
    fuse_wgrad_accumulation: bool = False,
    arch: str | None = None,
    forward: Forward = "training",
    sym_buffer: SymmBuffer | None = None,
) -> torch.Tensor:
    """A mixture-of-experts layer, differentiable in x, topk_weights, weights and biases.

    A token's output is the sum over its slots of topk_weight * (h @ w2 + b2) with
    h = activation(x @ w1 + b1, x @ w3 + b3), where weights and biases are those of the slot's
    expert.

    Args:
        x: bfloat16 [tokens, hidden]. Tokens may be 0 and differ from rank to rank.
        topk_idx: int64 or int32 [tokens, topk], topk 1 to 32: expert ids of all ranks. A slot of
            -1, or of any other number that is no expert, is unused: it adds nothing, and its
            gradient is zero.
        topk_weights: float32 [tokens, topk].
        w1: bfloat16 [experts, hidden, intermediate], gate. With w3 None, w1 has gate and then up,
            [experts, hidden, 2 * intermediate]: fewer and larger products.
        w3: bfloat16 [experts, hidden, intermediate], up; or None.
        w2: bfloat16 [experts, intermediate, hidden], down.
        b1: float32 or bfloat16 [experts, intermediate]. All three biases or none.
        b3: float32 or bfloat16 [experts, intermediate].
        b2: float32 or bfloat16 [experts, hidden].
        group: ranks that share the experts: rank r has the r-th of equal parts. Every rank makes
            the same calls, forward and backward, also without tokens. None: this rank has all
            experts. For ranks of one NVLink domain an `AllToAll` of the layer's sizes, with an
            expert_alignment that is a multiple of 8 and hidden one of 128: its max_recv_rows bounds
            a call, and no host waits. Layers of a model may share it. Otherwise a process group of
            PyTorch.
        precision: what is rounded before it is multiplied. Gradients pass through the roundings as
            if they were not there.

            - "bf16": nothing but values in bfloat16.
            - "mxfp8": in the forward pass tokens, weights and the activation's output become E4M3
              with a UE8M0 scale per 32 values along the sums.
            - "fp8": in the forward pass these become E4M3 with a float32 scale per 128 values, and
              for weights per 128 x 128. The tensor cores multiply the E4M3 values. GPUs: SM90 only.
            - "fp8_dgrad": as "fp8", and the products of the backward pass that give gradients of
              activations multiply E4M3, too.
            - "fp8_wgrad": as "fp8_dgrad", and the products that give gradients of weights multiply
              E4M3, too, with a scale per 128 rows of an expert x 128 columns.

            Weights are rounded in every forward pass. Passes within `frozen_weights` share rounded
            weights.
        recompute: keep only x and the routing for the backward pass, and compute Linear1 again. By
            default Linear1's output is kept, too.
        activation: as in `fp8_fp4_mega_moe`.
        activation_clamp: as in `fp8_fp4_mega_moe`.
        max_recv_slots: with a process group, most slots that a rank may receive in a call, those of
            its own tokens included; None for no bound. If a rank would get more, every rank gets a
            RuntimeError that names that rank. The bound of an `AllToAll` is its max_recv_rows.
        keep_received: with a group, keep the received tokens for the backward pass, in place of
            sending them again.
        quantize_kept: keep Linear1's output as E4M3 with a float32 scale per 128 values, in little
            more than half the memory. The layer's output is the same; gradients see the rounding.
            For bfloat16 layers whose intermediate size is a multiple of 128, without recompute.
        fuse_wgrad_accumulation: the backward pass adds gradients of w1, w3 and w2 itself: to a
            weight's `main_grad`, if it has that attribute (as Megatron-core's parameters have), or
            else to its `.grad`. With "fp8_wgrad" the products add while they store, so no gradient
            is written and read again. PyTorch gets no gradient then. Where there is no `main_grad`
            and no `.grad`, the gradient is returned to PyTorch. `main_grad` is float32 or of the
            weight's type. Weights are leaves, as parameters are, or their transposed views.
        arch: on a CPU, None for the layer's steps in PyTorch, or a target's name, whose kernels
            then run in the emulator; on a GPU its own target or None. Products that do not multiply
            E4M3 are PyTorch's everywhere.
        forward: "training"; or "serving": the forward pass is `mega_moe` over `sym_buffer`, so its
            output has the bits of serving. Every forward pass rounds the weights to the buffer's
            format; no rounded copy is kept. The backward pass is that of "training" with recompute,
            with unrounded tokens and weights.
        sym_buffer: with forward "serving", a buffer of `get_symm_buffer_for_mega_moe` for the
            layer's sizes, without shared experts. Its ranks are those of `group`. Layers of a model
            may share one, and an engine in the same process may, too.

    Sizes are multiples of 8, with "mxfp8" of 32, with "fp8..." of 128. All tensors are contiguous
    and on one device; a rank has at most 1024 experts. Weights may also be transposed views,
    `.transpose(1, 2)` of contiguous [experts, out, in], as checkpoints and other trainers have
    them; they are not copied.

    On one rank and over an `AllToAll` no host waits for a GPU, and CUDA graphs capture both passes.
    With a process group the host waits once in a forward pass, for the numbers of slots to send.
    With any group, or with fuse_wgrad_accumulation, `torch.compile` breaks its graph at the layer.

    To check gradients, pass float64 in place of bfloat16 and float32, with precision "bf16": this
    runs in PyTorch alone. Equal inputs give equal bits, gradients included.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
        RuntimeError: over a process group, a rank would receive more than max_recv_slots. Nothing
            was sent. Or, in a backward pass with fuse_wgrad_accumulation, somebody asks PyTorch for
            a weight's gradient, or for gradients of gradients.
        MegaMoEError: over an `AllToAll`, a rank would receive more than its max_recv_rows, or a
            kernel gave up.
    """
    _check(x, topk_idx, topk_weights, w1, w3, w2, (b1, b3, b2), precision, arch)
    weights = (w1, w3, w2)
    if any(isinstance(w, GatheredWeight) for w in weights) and precision not in FP8_DATA_GRADIENTS:
        raise ValueError(
            "precision must be 'fp8_dgrad' or 'fp8_wgrad' where quantize_gathered has gathered "
            f"E4M3; got {precision!r}"
        )
    require_type("recompute", recompute, bool, "a bool")
    require_type("keep_received", keep_received, bool, "a bool")
    require_type("quantize_kept", quantize_kept, bool, "a bool")
    require_type("fuse_wgrad_accumulation", fuse_wgrad_accumulation, bool, "a bool")
    if forward not in get_args(Forward):
        raise ValueError(f"forward must be 'training' or 'serving'; got {forward!r}")
    kind = gated_activation_of(activation, activation_clamp)
    parameters = (w1, w3, w2, b1, b3, b2)
    options = (encode_activation(kind), precision, arch)
    if forward == "serving":
        refused = {"precision": (precision, "bf16"), "keep_received": (keep_received, False)}
        refused["quantize_kept"] = (quantize_kept, False)
        refused["fuse_wgrad_accumulation"] = (fuse_wgrad_accumulation, False)
        for name, (given, allowed) in refused.items():
            if given != allowed:
                raise ValueError(
                    f"{name} must be {allowed!r} with forward='serving'; got {given!r}"
                )
        return _serving_moe(
            sym_buffer, group, max_recv_slots, options, x, topk_idx, topk_weights, parameters
        )
    if sym_buffer is not None:
        raise ValueError(f"sym_buffer must be None with forward='training'; got {sym_buffer!r}")
    if quantize_kept:
        _check_quantize_kept(x, w2, recompute)
    if precision in FP8_DATA_GRADIENTS and not torch.is_grad_enabled():
        # Nobody asks for what it has besides.
        options = (options[0], "fp8", options[2])
    if group is None and (max_recv_slots is not None or keep_received):
        raise ValueError("max_recv_slots and keep_received go with a group; got no group")
    # What an operator is given are plain tensors, which it may not change.
    has_own_types = any(map(is_gatherable_or_gathered, weights))
    if group is not None or fuse_wgrad_accumulation or has_own_types:
        from .expert_parallel import Options, expert_parallel_moe

        kept = Options(*options, recompute, keep_received, quantize_kept, fuse_wgrad_accumulation)
        inputs = (x, topk_idx, topk_weights, parameters)
        return expert_parallel_moe(group, max_recv_slots, kept, *inputs)
    kept_options = (recompute, quantize_kept)
    out: torch.Tensor = moe_op(x, topk_idx, topk_weights, *parameters, *options, *kept_options)[0]
    return out


def _serving_moe(
    sym_buffer: SymmBuffer | None,
    group: ProcessGroup | AllToAll | None,
    max_recv_slots: int | None,
    options: tuple[str, Precision, str | None],
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    parameters: tuple[torch.Tensor | None, ...],
) -> torch.Tensor:
    from .expert_parallel import Options, exchange_over
    from .groups import num_ranks_of
    from .serving import check_serving, serving_moe

    w1, _, w2, b1, _, _ = parameters
    assert w1 is not None
    assert w2 is not None
    if group is None and max_recv_slots is not None:
        raise ValueError(f"max_recv_slots goes with a group; got {max_recv_slots} and no group")
    exchange = exchange_over(group, max_recv_slots)
    buffer = check_serving(
        sym_buffer, num_ranks_of(group), x, topk_idx, w1, w2, biases=b1 is not None
    )
    given = Options(
        *options,
        recompute=True,
        keep_received=False,
        quantize_kept=False,
        fuse_wgrad_accumulation=False,
    )
    return serving_moe(buffer, exchange, given, x, topk_idx, topk_weights, parameters)


def _check(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor | None,
    w2: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    precision: str,
    arch: str | None,
) -> None:
    """Types, shapes and layouts. Nothing here looks at a value."""
    if precision not in get_args(Precision):
        raise ValueError(
            "precision must be 'bf16', 'mxfp8', 'fp8', 'fp8_dgrad' or 'fp8_wgrad'; "
            f"got {precision!r}"
        )
    _require_tensor("x", x)
    _require("x", x, _DTYPES if precision == "bf16" else (torch.bfloat16,), x.device)
    if x.ndim != 2:
        raise ValueError(f"x must be [tokens, hidden]; got shape {tuple(x.shape)}")
    device, is_double = x.device, x.dtype == torch.float64
    _require_tensor("topk_idx", topk_idx)
    _require_tensor("w1", w1)
    if topk_idx.ndim != 2 or topk_idx.shape[0] != x.shape[0]:
        raise ValueError(
            f"topk_idx must be [{x.shape[0]} tokens, topk]; got shape {tuple(topk_idx.shape)}"
        )
    if not 1 <= topk_idx.shape[1] <= MAX_TOPK:
        raise ValueError(f"topk_idx must have 1 to {MAX_TOPK} columns; got {topk_idx.shape[1]}")
    _require("topk_idx", topk_idx, _TOPK_IDX_DTYPES, device)
    weight_dtype = torch.float64 if is_double else torch.float32
    _require("topk_weights", topk_weights, (weight_dtype,), device, topk_idx.shape)
    if w1.ndim != 3:
        raise ValueError(f"w1 must be [experts, hidden, intermediate]; got {tuple(w1.shape)}")
    num_experts, hidden, width = w1.shape[0], x.shape[1], w1.shape[2]
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"w1 must have 1 to {MAX_EXPERTS} experts; got {num_experts}")
    intermediate = width
    if w3 is None:
        if width % 2:
            raise ValueError(f"w1 without w3 must hold gate and up side by side; got {width}")
        intermediate = width // 2
    else:
        _require_matrices("w3", w3, x.dtype, device, (num_experts, hidden, width))
    _require_matrices("w1", w1, x.dtype, device, (num_experts, hidden, width))
    _require_matrices("w2", w2, x.dtype, device, (num_experts, intermediate, hidden))
    multiple = GROUP_SIZE if precision == "mxfp8" else VALUES_PER_CHUNK
    if precision in FP8_PRECISIONS:
        multiple = K_GROUP
    if not is_double:
        for name, size in (("hidden", hidden), ("intermediate", intermediate)):
            if size % multiple or size == 0:
                raise ValueError(
                    f"{name} must be a multiple of {multiple} with precision {precision!r}; "
                    f"got {size}"
                )
    if any(bias is not None for bias in biases):
        sizes = {"b1": intermediate, "b3": intermediate, "b2": hidden}
        bias_dtypes = (torch.float64,) if is_double else _BIAS_DTYPES
        for bias, (name, size) in zip(biases, sizes.items(), strict=True):
            if bias is None:
                raise ValueError(f"{name} must be a tensor where another bias is; got None")
            _require(name, bias, bias_dtypes, device, (num_experts, size))
    if arch is not None:
        target_of(arch)


def _check_quantize_kept(x: torch.Tensor, w2: torch.Tensor, recompute: bool) -> None:
    if recompute:
        raise ValueError(
            "quantize_kept must be False with recompute, which keeps nothing to quantize; got True"
        )
    if x.dtype != torch.bfloat16:
        raise TypeError(f"x must be torch.bfloat16 with quantize_kept; got {x.dtype}")
    if w2.shape[1] % K_GROUP:
        raise ValueError(
            f"intermediate must be a multiple of {K_GROUP} with quantize_kept; got {w2.shape[1]}"
        )


def _require_tensor(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(value).__name__}")
    if torch.compiler.is_compiling():  # whose own tensors wrap others
        return
    if is_traceable_wrapper_subclass(value) and not is_gatherable_or_gathered(value):
        raise TypeError(
            f"{name} must be a plain tensor, as a module that FSDP2 gathers has it in its forward "
            f"pass; got {type(value).__name__}, which wraps others"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise TypeError(
            f"{name} must be a plain tensor: deep_moe.moe has no transforms of torch.func, such as "
            "grad, vmap and jvp; got a tensor within one"
        )


def _require_matrices(
    name: str,
    weights: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, int, int],
) -> None:
    """One expert's matrix behind the other's, each by rows or by columns."""
    _require_tensor(name, weights)
    check_dense(name, weights)
    if weights.ndim != 3 or weights.is_contiguous():
        _require(name, weights, (dtype,), device, shape)
        return
    by_columns = weights.transpose(1, 2)
    if not by_columns.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, or {name}.transpose(1, 2) must be; "
            f"got strides {weights.stride()}"
        )
    if tuple(weights.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}; got {tuple(weights.shape)}")
    _require(name, by_columns, (dtype,), device)


def _require(
    name: str,
    tensor: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    shape: Sequence[int] | None = None,
) -> None:
    """One of these types, this shape, contiguous, there, in a storage that holds it."""
    _require_tensor(name, tensor)
    check_dense(name, tensor)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}; got {tensor.dtype}")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}; got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, as x is; got {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous; got strides {tensor.stride()}")
    for part in memory_of(tensor):
        check_memory(name, part)
