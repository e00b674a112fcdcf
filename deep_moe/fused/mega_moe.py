"""The call as users and PyTorch see it: `mega_moe`, DeepGEMM's name for its first format, and the
operator.

For PyTorch it is one operator, `deep_moe::mega_moe`, which writes `y` and the statistics; where
nothing would see the operator (eager.py), a call does at once what the operator does. Under a
compiler its inputs include the four views of the buffer that the caller fills. As a compiler turns
writes into new tensors, they may then be other tensors, and are copied into the buffer first.

call_plan.py makes the kernel and its arguments, emulated_call.py runs them where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.activations import DEFAULT_ACTIVATION, Activation, activation_of
from deep_moe.described import described_as
from deep_moe.targets import target_of
from deep_moe.weights.layers import MegaMoEWeights

from .buffer import SymmBuffer
from .call_plan import prepare_call
from .call_tensors import NO_TENSORS, CallTensors, check_types, with_statistics
from .checks import (
    NAMES_OF_LAYERS,
    RECIPE,
    Biases,
    Pair,
    check_biases_given,
    check_recipe,
    check_weights,
    refuse_gradients,
    rename_argument,
    require_type,
    transformed_pair,
)
from .eager import is_seen_by_nobody
from .emulated_call import call_emulated
from .options import (
    OPERATOR_OPTIONS,
    OPTION_TENSORS,
    CallArguments,
    CallOptions,
    from_operator,
    given_options,
    given_tensors,
    operator_tensors,
    tensors_from_operator,
    to_operator,
    with_call_options,
    without_tensors,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from deep_moe.activations import ActivationName

_NO_ARGUMENTS: CallArguments = {}


@with_call_options
def mega_moe(
    y: torch.Tensor,
    weights: MegaMoEWeights,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    *,
    activation: ActivationName | Activation = DEFAULT_ACTIVATION,
    activation_clamp: float | None = None,
    fast_math: bool = True,
    l1_bias: torch.Tensor | None = None,
    l2_bias: torch.Tensor | None = None,
    **options: Unpack[CallOptions],
) -> None:
    """One MoE layer over all ranks of the buffer's group: writes y, bfloat16 [tokens, hidden].

    The rows 0 .. tokens-1 of `sym_buffer`'s views are the input. Tokens may be 0 and may differ
    between ranks; every rank must call.

    Args:
        y: bfloat16 [tokens, hidden], written; its rows say how many tokens the call has.
        weights: what `transform_weights_for_mega_moe` returned, of the formats of the buffer.
        sym_buffer: of `get_symm_buffer_for_mega_moe`.
        cumulative_local_expert_recv_stats: int32 [local experts]; the call adds to each entry the
            number of tokens that this expert received.
        activation: a name of `deep_moe.activations.ACTIVATIONS`, or an object of
            `deep_moe.activations`, which has parameters of its own. Equal on all ranks. With one
            without a gate, as "relu2", weights have I rows in Linear1.
        activation_clamp: of a named activation, the bound of gate and up, a positive number of
            float32's range: swiglu has none by default, swiglu_oai and swiglu_step 7; others take
            none.
        fast_math: approximate exponentials.
        l1_bias: where the buffer was made with biases=True, what `transform_biases_for_mega_moe`
            returned for Linear1. The kernel adds them to its sums before the activation.
        l2_bias: likewise of Linear2. The kernel adds them before the routing weight.
        {options}

    One thread at a time calls with a buffer, and all ranks call in the same order. There is no
    backward pass: inputs that require a gradient are an error.

    A CUDA graph keeps the kernel that the call was captured with. While a graph is captured, a call
    takes a kernel that an earlier call with these arguments ran, if there is one. So call twice
    before the capture, and wait in between: the second call may choose a faster kernel.

    Nothing is launched if an argument is not allowed. MegaMoETimeoutError says which rank did not
    arrive; on a GPU, the next call or `sym_buffer.raise_if_failed()` raises it. After it, and on
    CPUs after a ValueError for arguments that differ between processes, the buffer needs
    `sym_buffer.reset()` on every rank.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
        MegaMoEError: the kernel gave up, or an earlier call did; `reset()` on every rank makes the
            object usable again. On a GPU the next call raises it.
        MegaMoETimeoutError: a wait took longer than `timeout_s`; the text names what is missing. It
            is a MegaMoEError.
        CompileError: NVRTC refused the kernel.
    """
    if not isinstance(sym_buffer, SymmBuffer):
        require_type("sym_buffer", sym_buffer, SymmBuffer, "a SymmBuffer")
    arch = options.get("arch")
    target = sym_buffer.target if arch is None else target_of(arch)
    check_weights(weights, sym_buffer.shape, target.kernel, activation)
    try:
        call_with_layers(
            "mega_moe",
            y,
            weights.l1,
            weights.l2,
            sym_buffer,
            with_statistics(cumulative_local_expert_recv_stats),
            activation,
            activation_clamp,
            fast_math,
            l1_bias,
            l2_bias,
            options,
            weights,
        )
    except (TypeError, ValueError) as error:
        rename_argument(error, NAMES_OF_LAYERS)
        raise


@described_as(mega_moe)
@with_call_options
def fp8_fp4_mega_moe(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = RECIPE,
    activation: ActivationName | Activation = DEFAULT_ACTIVATION,
    activation_clamp: float | None = None,
    fast_math: bool = True,
    *,
    l1_bias: torch.Tensor | None = None,
    l2_bias: torch.Tensor | None = None,
    **options: Unpack[CallOptions],
) -> None:
    """`mega_moe` with MXFP4 weights and MXFP8 tokens, by the arguments of DeepGEMM's function of
    this name.

    Other arguments and errors are as of `mega_moe`.

    Args:
        y: bfloat16 [tokens, hidden], written.
        l1_weights: what `transform_weights_for_mega_moe` returned: `l1, l2 = ...`.
        l2_weights: what `transform_weights_for_mega_moe` returned: `l1, l2 = ...`.
        sym_buffer: of `get_symm_buffer_for_mega_moe`, for mxfp4 weights.
        recipe: only the default, (1, 1, 32), is allowed.
        {options}
    """
    if not isinstance(sym_buffer, SymmBuffer):
        require_type("sym_buffer", sym_buffer, SymmBuffer, "a SymmBuffer")
    shape = sym_buffer.shape
    if shape.weights != "mxfp4" or shape.token_format != "mxfp8":
        raise ValueError(
            "sym_buffer must be made for mxfp4 weights and mxfp8 tokens for fp8_fp4_mega_moe, for "
            f"others call mega_moe; got one for {shape.weights} weights and {shape.token_format} "
            "tokens"
        )
    if recipe is not RECIPE:
        check_recipe(recipe)
    call_with_layers(
        "fp8_fp4_mega_moe",
        y,
        l1_weights,
        l2_weights,
        sym_buffer,
        with_statistics(cumulative_local_expert_recv_stats),
        activation,
        activation_clamp,
        fast_math,
        l1_bias,
        l2_bias,
        options,
    )


def call_with_layers(
    function: str,
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    sym_buffer: SymmBuffer,
    given: CallTensors,
    activation: ActivationName | Activation,
    activation_clamp: float | None,
    fast_math: bool,
    l1_bias: torch.Tensor | None,
    l2_bias: torch.Tensor | None,
    options: CallOptions,
    weights: MegaMoEWeights | None = None,
) -> None:
    """What the function of that name does, whose weights are of the buffer's formats. given: the
    tensors that are no options. weights: whose layers they are, if that is known."""
    of_call = given
    if OPTION_TENSORS and options:
        of_call = {**given, **given_tensors(options)}
        options = without_tensors(options)
    is_direct = False
    if weights is not None or (
        isinstance(l1_weights, tuple)
        and isinstance(l2_weights, tuple)
        and len(l1_weights) == len(l2_weights) == 2
    ):
        tensors: tuple[torch.Tensor, ...] = (y,)
        if weights is None:
            tensors = (y, *l1_weights, *l2_weights)
        if of_call:
            tensors = (*tensors, *of_call.values())
        if l1_bias is not None or l2_bias is not None:
            tensors = (*tensors, *(bias for bias in (l1_bias, l2_bias) if bias is not None))
        is_direct = is_seen_by_nobody(tensors, weights)
    if not is_direct:  # otherwise they are tensors
        l1_weights = transformed_pair("l1_weights", l1_weights)
        l2_weights = transformed_pair("l2_weights", l2_weights)
        require_type("y", y, torch.Tensor, "a tensor")
        check_types(of_call)
    shape = sym_buffer.shape
    biases = None
    if shape.biases or l1_bias is not None or l2_bias is not None:
        biases = check_biases_given(l1_bias, l2_bias, sym_buffer)
    arguments = given_options(function, options) if options else _NO_ARGUMENTS
    if (
        activation is not DEFAULT_ACTIVATION
        or activation_clamp is not None
        or fast_math is not True
    ):
        arguments = with_numerics(arguments, activation, activation_clamp, fast_math)
    if torch.is_grad_enabled() and (
        y.requires_grad or sym_buffer.topk_weights.requires_grad or sym_buffer.x.requires_grad
    ):
        sym_buffer.refuse_gradients(y)
    if OPTION_TENSORS and of_call and torch.is_grad_enabled():
        refuse_gradients(**of_call)
    if is_direct:
        _run(y, l1_weights, l2_weights, sym_buffer, of_call, arguments, biases)
        return
    sym_buffer.raise_if_closed()
    inputs = None
    # Otherwise they are the buffer's own views, and hold what was written to them.
    if torch.compiler.is_compiling() or type(y) is not torch.Tensor:
        inputs = [sym_buffer.x, sym_buffer.x_sf, sym_buffer.topk_idx, sym_buffer.topk_weights]
    handle = sym_buffer.handle
    _mega_moe_op(
        y,
        *l1_weights,
        *l2_weights,
        handle,
        inputs=inputs,
        l1_bias=l1_bias,
        l2_bias=l2_bias,
        **of_call,
        **to_operator(arguments),
    )


def with_numerics(
    arguments: CallArguments,
    activation: ActivationName | Activation = DEFAULT_ACTIVATION,
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> CallArguments:
    """`arguments` and these, of the right types."""
    given: CallArguments = {**arguments}
    if not isinstance(activation, str):
        activation_of(activation)  # which refuses other objects
    if activation != DEFAULT_ACTIVATION:
        given["activation"] = activation
    if activation_clamp is not None:
        if type(activation_clamp) is not float:
            require_type("activation_clamp", activation_clamp, (int, float), "a number or None")
        given["activation_clamp"] = float(activation_clamp)
    if fast_math is not True:
        require_type("fast_math", fast_math, bool, "a bool")
        given["fast_math"] = fast_math
    return given


# No argument stands for the buffer's memory: declaring it written would let the compiler work on a
# copy of it, which no other rank sees.
torch.library.define(
    "deep_moe::mega_moe",
    "(Tensor(a!) y, Tensor l1_weight, Tensor l1_weight_sf, Tensor l2_weight, "
    "Tensor l2_weight_sf, int buffer_handle, *, Tensor[]? inputs=None, "
    f"{operator_tensors()}, Tensor? l1_bias=None, Tensor? l2_bias=None, "
    "str? activation=None, float[]? activation_parameters=None, float? activation_clamp=None, "
    f"bool? fast_math=None, {OPERATOR_OPTIONS}) -> ()",
)
_mega_moe_op = torch.ops.deep_moe.mega_moe.default


@torch.library.impl("deep_moe::mega_moe", "CompositeExplicitAutograd")
def _mega_moe(
    y: torch.Tensor,
    l1_weight: torch.Tensor,
    l1_weight_sf: torch.Tensor,
    l2_weight: torch.Tensor,
    l2_weight_sf: torch.Tensor,
    buffer_handle: int,
    *,
    inputs: Sequence[torch.Tensor] | None = None,
    l1_bias: torch.Tensor | None = None,
    l2_bias: torch.Tensor | None = None,
    **taken: Any,
) -> None:
    buffer = SymmBuffer.of_handle(buffer_handle)
    if inputs is not None:
        _take_inputs(buffer, inputs)
    of_call = tensors_from_operator(taken) if taken else NO_TENSORS
    arguments = from_operator(taken) if taken else _NO_ARGUMENTS
    l1_weights, l2_weights = (l1_weight, l1_weight_sf), (l2_weight, l2_weight_sf)
    biases = check_biases_given(l1_bias, l2_bias, buffer)
    _run(y, l1_weights, l2_weights, buffer, of_call, arguments, biases)


@torch.library.register_fake("deep_moe::mega_moe")
def _mega_moe_fake(*_: Any, **__: Any) -> None:
    """The operator only writes to tensors that it is given."""


def _run(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    buffer: SymmBuffer,
    tensors: CallTensors,
    arguments: CallArguments,
    biases: Biases | None,
) -> None:
    try:
        buffer.turn.pop()
    except IndexError:
        buffer.refuse_second_user()
    try:
        gpu = buffer.gpu
        if gpu is None:
            call_emulated(y, l1_weights, l2_weights, buffer, tensors, arguments, biases)
            return
        plan, args = prepare_call(y, l1_weights, l2_weights, buffer, tensors, arguments, biases)
        assert plan.launcher is not None
        plan.launcher.launch(args, plan.config.num_sms, gpu.current_stream())
    finally:
        buffer.turn.append(None)


def _take_inputs(buffer: SymmBuffer, inputs: Sequence[torch.Tensor]) -> None:
    """Copy inputs that are not the buffer's own views into them."""
    views = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
    for own, given in zip(views, inputs, strict=True):
        if own.data_ptr() != given.data_ptr():
            own.copy_(given)
