"""A call's inputs from what a model has: one kernel quantizes the tokens, or copies them where the
buffer has BF16, and converts the router's output, straight into the symmetric buffer.

For PyTorch it is one operator, `deep_moe::prepare_inputs`, which writes the four views that
`deep_moe::mega_moe` reads; so a compiler keeps the two in order.

As in call_plan.py, results that follow from the tensors' forms are kept and found by these forms.
The addresses are checked in every call.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from deep_moe.described import described_as
from deep_moe.formats.block_scaled import GROUP_SIZE
from deep_moe.heuristics.prepare_inputs import (
    VALUES_PER_CHUNK,
    PrepareInputsConfig,
    whole_token_fields,
)
from deep_moe.heuristics.router import SCORINGS, Router
from deep_moe.jit.cpp_structs import CppStruct
from deep_moe.jit.kernel_args import PrepareInputsArgs
from deep_moe.jit.launch import CudaLauncher, MemoryRegion, RankLaunch, run_emulated
from deep_moe.targets import EMULATED, target_of
from deep_moe.tensor_memory import check_dense, check_memory, refuse_shared_memory

from .bounded_cache import BoundedCache
from .buffer import SymmBuffer
from .checks import (
    TOPK_IDX_DTYPES,
    TOPK_WEIGHT_DTYPES,
    check_contiguous,
    check_start,
    check_tensor,
    form,
    refuse_gradients,
    require_type,
)
from .eager import is_seen_by_nobody
from .gpu import Gpu, gpu_of
from .loaded_kernels import built_kernel, launcher_of
from .rank_buffer import used

_NOTHING = nullcontext()
_X_ALIGNMENT = 16  # bytes that a lane loads at once
_LOGIT_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class PreparationPlan:
    """What launches for tensors of the same form share. gpu, launcher: None in the emulator."""

    config: PrepareInputsConfig
    num_chunks: int
    num_slots: int
    num_ctas: int
    gpu: Gpu | None
    launcher: CudaLauncher | None


_plans: BoundedCache[tuple[Any, ...], PreparationPlan] = BoundedCache(8192)


def prepare_inputs(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    sym_buffer: SymmBuffer,
    *,
    token_mask: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    expert_load: torch.Tensor | None = None,
    token_scale: torch.Tensor | None = None,
    arch: str | None = None,
) -> None:
    """Fill the first rows of `sym_buffer`'s four views, in one launch on the current stream.

    Args:
        x: bfloat16 [tokens, hidden]; quantized to what the buffer's tokens are: "mxfp8" as
            `deep_moe.quantize_mxfp8` does; "fp8_128", where a scale is a 448th of the largest
            magnitude of its 128 values, but at least 1e-4 / 448; "fp8_token", where it is that of
            all values; "nvfp4" as `deep_moe.quantize_nvfp4_tokens` does; or "bf16", copied.
        topk_idx: int64 or int32 [tokens, topk], global expert ids, -1 for an unused slot.
        topk_weights: float32 or bfloat16 [tokens, topk].
        sym_buffer: of `get_symm_buffer_for_mega_moe`; the views of its first rows are written.
        token_mask: bool [tokens]; where it is False, all slots become -1: padding.
        expert_map: int32 or int64 [experts] or [experts, copies], where the experts that topk_idx
            names lie: places 0 to num_experts - 1 of the buffer, behind the last copy -1. Tokens
            take the copies of an expert in turn. An expert that it does not know, or that lies
            nowhere, becomes 2^63 - 1, which the call refuses.
        expert_load: int32 [num_experts]; each place's entry grows by the slots that were sent
            there.
        token_scale: with "nvfp4" and "fp8_token", float32, one number: the scale of all tokens, as
            checkpoints have it ("input_scale"), in place of each token's own. Values that are too
            large for it become the largest that there is. It has to be positive and finite, which
            nobody looks at.
        arch: a target's name; by default that of the buffer's GPU, sm_100a on a CPU, where the
            kernel runs in the emulator.

    Tokens may be 0. Later rows keep what they hold. Nothing waits for the GPU, and the launch can
    be captured in a CUDA graph. Expert ids are looked at by `mega_moe`, not here. There is no
    backward pass: x and topk_weights that require a gradient are refused where gradients are
    enabled.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
        CompileError: NVRTC refused the kernel.
    """
    given: tuple[torch.Tensor, ...] = (x, topk_idx, topk_weights)
    optional = {
        "token_mask": token_mask,
        "expert_map": expert_map,
        "expert_load": expert_load,
        "token_scale": token_scale,
    }
    if any(tensor is not None for tensor in optional.values()):
        for name, tensor in optional.items():
            if tensor is not None:
                require_type(name, tensor, torch.Tensor, "a tensor or None")
                given = (*given, tensor)
    is_direct = is_seen_by_nobody(given)
    if not is_direct:  # otherwise they are tensors
        require_type("x", x, torch.Tensor, "a tensor")
        require_type("topk_idx", topk_idx, torch.Tensor, "a tensor")
        require_type("topk_weights", topk_weights, torch.Tensor, "a tensor")
    require_type("sym_buffer", sym_buffer, SymmBuffer, "a SymmBuffer")
    if arch is not None:
        require_type("arch", arch, str, "a str or None")
    if torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad):
        refuse_gradients(x=x, topk_weights=topk_weights)
    sym_buffer.raise_if_closed()
    if expert_load is not None:
        num_experts = (sym_buffer.shape.num_experts,)
        check_tensor("expert_load", expert_load, torch.int32, num_experts, sym_buffer.device)
    # A GPU's launches are in order; the emulator runs here and now, beside another thread's call.
    in_emulator = is_direct and sym_buffer.gpu is None
    with used([sym_buffer]) if in_emulator else _NOTHING:
        (_prepare_inputs if is_direct else _prepare_inputs_op)(
            x,
            topk_idx,
            topk_weights,
            sym_buffer.x,
            sym_buffer.x_sf,
            sym_buffer.topk_idx,
            sym_buffer.topk_weights,
            arch,
            token_mask,
            expert_map,
            expert_load,
            token_scale,
        )


@described_as(prepare_inputs)
def route_and_prepare_inputs(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    sym_buffer: SymmBuffer,
    router: Router,
    *,
    correction_bias: torch.Tensor | None = None,
    token_mask: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    expert_load: torch.Tensor | None = None,
    token_scale: torch.Tensor | None = None,
    arch: str | None = None,
) -> None:
    """What `prepare_inputs` does, and what a router does before: choose each token's experts from
    its logits, in the same launch.

    A token's experts follow from its logits alone: they do not depend on the number of tokens. The
    score of a logit that is not a number is 0; with softmax, then, all scores of its token are.
    With "sqrt_softplus" it is no number either, and its expert the last to be chosen. With the fast
    ones it stays what it is, and its choice is -1e30.

    Other arguments and errors are as of `prepare_inputs`.

    Args:
        router_logits: float32 or bfloat16 [tokens, experts], at most 1024 experts. Without
            `expert_map` they are the places of the buffer's experts.
        sym_buffer: of `get_symm_buffer_for_mega_moe`; its views get the chosen experts and their
            weights too, where later work may read them.
        router: the rule.
        correction_bias: float32 [experts], added to scores where experts are chosen.
        padding_mask: in place of token_mask, bool [tokens], as vLLM has it: where it is True, all
            slots become -1.
    """
    tensors = {
        "x": x,
        "router_logits": router_logits,
        "correction_bias": correction_bias,
        "token_mask": token_mask,
        "padding_mask": padding_mask,
        "expert_map": expert_map,
        "expert_load": expert_load,
        "token_scale": token_scale,
    }
    required = ("x", "router_logits")
    for name, tensor in tensors.items():
        if tensor is not None or name in required:
            words = "a tensor" if name in required else "a tensor or None"
            require_type(name, tensor, torch.Tensor, words)
    require_type("sym_buffer", sym_buffer, SymmBuffer, "a SymmBuffer")
    require_type("router", router, Router, "a Router")
    if arch is not None:
        require_type("arch", arch, str, "a str or None")
    if torch.is_grad_enabled() and (x.requires_grad or router_logits.requires_grad):
        refuse_gradients(x=x, router_logits=router_logits)
    sym_buffer.raise_if_closed()
    if expert_load is not None:
        num_experts = (sym_buffer.shape.num_experts,)
        check_tensor("expert_load", expert_load, torch.int32, num_experts, sym_buffer.device)
    most = sym_buffer.shape.num_experts
    if expert_map is None and router_logits.shape[-1:] > (most,):
        raise ValueError(
            f"router_logits must be of at most num_experts ({most}) experts, or come with an "
            f"expert_map; got {router_logits.shape[-1]}"
        )
    is_direct = is_seen_by_nobody(tuple(t for t in tensors.values() if t is not None))
    in_emulator = is_direct and sym_buffer.gpu is None
    with used([sym_buffer]) if in_emulator else _NOTHING:
        (_route_and_prepare_inputs if is_direct else _route_and_prepare_inputs_op)(
            x,
            router_logits,
            sym_buffer.x,
            sym_buffer.x_sf,
            sym_buffer.topk_idx,
            sym_buffer.topk_weights,
            router.scoring,
            router.renormalize,
            router.num_groups,
            router.num_chosen_groups,
            float(router.scale),
            correction_bias,
            arch,
            token_mask,
            expert_map,
            expert_load,
            token_scale,
            padding_mask,
        )


def prepare_rows(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    arch: str | None = None,
) -> None:
    """What `prepare_inputs` does, into four tensors that are like a buffer's views."""
    _prepare_inputs_op(x, topk_idx, topk_weights, *rows, arch)


torch.library.define(
    "deep_moe::prepare_inputs",
    "(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor(a!) input_x, Tensor(b!) input_x_sf, "
    "Tensor(c!) input_topk_idx, Tensor(d!) input_topk_weights, str? arch=None, "
    "Tensor? token_mask=None, Tensor? expert_map=None, Tensor(e!)? expert_load=None, "
    "Tensor? token_scale=None) -> ()",
)
_prepare_inputs_op = torch.ops.deep_moe.prepare_inputs.default


def _prepare_inputs(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    input_x: torch.Tensor,
    input_x_sf: torch.Tensor,
    input_topk_idx: torch.Tensor,
    input_topk_weights: torch.Tensor,
    arch: str | None = None,
    token_mask: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    expert_load: torch.Tensor | None = None,
    token_scale: torch.Tensor | None = None,
) -> None:
    try:
        x_address = x.data_ptr()
    except RuntimeError:  # a sparse tensor has no address
        check_dense("x", x)
        raise
    key = (
        x_address % _X_ALIGNMENT,
        form(x),
        form(topk_idx),
        form(topk_weights),
        form(input_x),
        form(input_x_sf),
        form(input_topk_idx),
        arch,
        None if token_mask is None else form(token_mask),
        None if expert_map is None else form(expert_map),
        None if expert_load is None else form(expert_load),
        None if token_scale is None else form(token_scale),
    )
    plan = _plans.get(key)
    if plan is None:
        check_inputs(x, topk_idx, topk_weights, input_x, input_topk_idx)
        check_routing(token_mask, expert_map, expert_load, x.shape[0], input_x.device)
        check_token_scale(token_scale, input_x, input_x_sf)
        config = _config(
            topk_idx.dtype,
            topk_weights.dtype,
            token_mask,
            expert_map,
            expert_load,
            (input_x, input_x_sf),
            arch,
            has_token_scale=token_scale is not None,
        )
        plan = _plans.put(key, _make_plan(config, x, topk_idx.numel(), input_x.device))
    # The kernel reads and writes in no particular order.
    buffer_address = input_x.untyped_storage().data_ptr()
    tensors = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights}
    optional = {
        "token_mask": token_mask,
        "expert_map": expert_map,
        "expert_load": expert_load,
        "token_scale": token_scale,
    }
    if any(tensor is not None for tensor in optional.values()):
        tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    _check_places(tensors, buffer_address, expert_load)
    if plan.num_chunks == 0:
        return
    args = PrepareInputsArgs(
        x_address,
        topk_idx.data_ptr(),
        topk_weights.data_ptr(),
        input_x.data_ptr(),
        input_x_sf.data_ptr(),
        input_topk_idx.data_ptr(),
        input_topk_weights.data_ptr(),
        0 if token_scale is None else token_scale.data_ptr(),
        0 if token_mask is None else token_mask.data_ptr(),
        0 if expert_map is None else expert_map.data_ptr(),
        0 if expert_load is None else expert_load.data_ptr(),
        plan.num_chunks,
        plan.num_slots,
        input_topk_idx.shape[1],
        0 if expert_map is None else expert_map.shape[0],
        0 if expert_load is None else expert_load.shape[0],
    )
    rows = input_x, input_x_sf, input_topk_idx, input_topk_weights
    _launch(plan, args, tensors, rows, x.shape[0], expert_load)


def _check_places(
    tensors: dict[str, torch.Tensor], buffer_address: int, expert_load: torch.Tensor | None
) -> None:
    """Raise if one lies in the buffer, or reaches beyond its memory, or shares what is written."""
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() == buffer_address:
            raise ValueError(f"{name} must not lie in the buffer that is written; got a view of it")
        # As check_memory, for a contiguous tensor.
        if storage.nbytes() < tensor.nbytes + tensor.storage_offset() * tensor.element_size():
            check_memory(name, tensor)
    if expert_load is not None:
        refuse_shared_memory(
            {"expert_load": expert_load}, {n: t for n, t in tensors.items() if t is not expert_load}
        )


def _launch(
    plan: PreparationPlan,
    args: CppStruct,
    tensors: dict[str, torch.Tensor],
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    num_tokens: int,
    expert_load: torch.Tensor | None,
) -> None:
    """rows: of the buffer. The emulator refuses to write to any but the first `num_tokens`."""
    if plan.gpu is not None:
        assert plan.launcher is not None
        plan.launcher.launch(args, plan.num_ctas, plan.gpu.current_stream())
        return
    names = ("sym_buffer.x", "sym_buffer.x_sf", "sym_buffer.topk_idx", "sym_buffer.topk_weights")
    memory = [
        MemoryRegion.of_tensor(name, tensor, is_writable=tensor is expert_load)
        for name, tensor in tensors.items()
    ]
    memory += [
        MemoryRegion.of_tensor(name, view[:num_tokens], is_writable=True)
        for name, view in zip(names, rows, strict=True)
        if view.numel()
    ]
    config = plan.config
    kernel = built_kernel(config, for_emulator=True)
    launch = RankLaunch(0, kernel, plan.num_ctas, config.num_threads, 0, args, tuple(memory))
    run_emulated([launch], seed=0, checks=True, clock="virtual")


torch.library.impl("deep_moe::prepare_inputs", "CompositeExplicitAutograd", _prepare_inputs)


@torch.library.register_fake("deep_moe::prepare_inputs")
def _prepare_inputs_fake(*_: object) -> None:
    """The operator only writes to tensors that it is given."""


torch.library.define(
    "deep_moe::route_and_prepare_inputs",
    "(Tensor x, Tensor router_logits, Tensor(a!) input_x, Tensor(b!) input_x_sf, "
    "Tensor(c!) input_topk_idx, Tensor(d!) input_topk_weights, str scoring, bool renormalize, "
    "int num_groups, int num_chosen_groups, float scale, Tensor? correction_bias=None, "
    "str? arch=None, Tensor? token_mask=None, Tensor? expert_map=None, "
    "Tensor(e!)? expert_load=None, Tensor? token_scale=None, Tensor? padding_mask=None) -> ()",
)
_route_and_prepare_inputs_op = torch.ops.deep_moe.route_and_prepare_inputs.default


def _route_and_prepare_inputs(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    input_x: torch.Tensor,
    input_x_sf: torch.Tensor,
    input_topk_idx: torch.Tensor,
    input_topk_weights: torch.Tensor,
    scoring: str,
    renormalize: bool,
    num_groups: int,
    num_chosen_groups: int,
    scale: float,
    correction_bias: torch.Tensor | None = None,
    arch: str | None = None,
    token_mask: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    expert_load: torch.Tensor | None = None,
    token_scale: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
) -> None:
    optional = {
        "correction_bias": correction_bias,
        "token_mask": token_mask,
        "padding_mask": padding_mask,
        "expert_map": expert_map,
        "expert_load": expert_load,
        "token_scale": token_scale,
    }
    tensors = {"x": x, "router_logits": router_logits}
    tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    for name, tensor in tensors.items():
        check_dense(name, tensor)
    rule = (scoring, renormalize, num_groups, num_chosen_groups)
    rows = input_x, input_x_sf, input_topk_idx, input_topk_weights
    key = (
        "routed",
        x.data_ptr() % _X_ALIGNMENT,
        router_logits.data_ptr() % _X_ALIGNMENT,
        rule,
        arch,
        *map(form, rows[:3]),
        *((name, form(tensor)) for name, tensor in tensors.items()),
    )
    plan = _plans.get(key)
    if plan is None:
        router = Router(*rule)  # type: ignore[arg-type]
        check_tokens(x, input_x)
        check_logits(router_logits, correction_bias, router, x.shape[0], input_topk_idx)
        check_routing(token_mask, expert_map, expert_load, x.shape[0], input_x.device)
        if padding_mask is not None:
            if token_mask is not None:
                raise ValueError("padding_mask must be None beside a token_mask; got a tensor")
            check_mask("padding_mask", padding_mask, x.shape[0], input_x.device)
        check_token_scale(token_scale, input_x, input_x_sf)
        config = _config(
            torch.int64,
            torch.float32,
            padding_mask if token_mask is None else token_mask,
            expert_map,
            expert_load,
            (input_x, input_x_sf),
            arch,
            has_token_scale=token_scale is not None,
            router_fields=_router_fields(router, router_logits, correction_bias)
            | {"masks_padding": padding_mask is not None},
        )
        num_slots = x.shape[0] * input_topk_idx.shape[1]
        plan = _plans.put(key, _make_plan(config, x, num_slots, input_x.device))
    _check_places(tensors, input_x.untyped_storage().data_ptr(), expert_load)
    if plan.num_chunks == 0:
        return
    args = PrepareInputsArgs(
        x=x.data_ptr(),
        input_x=input_x.data_ptr(),
        input_x_sf=input_x_sf.data_ptr(),
        input_topk_idx=input_topk_idx.data_ptr(),
        input_topk_weights=input_topk_weights.data_ptr(),
        **{
            "token_mask" if name == "padding_mask" else name: tensor.data_ptr()
            for name, tensor in tensors.items()
            if name != "x"
        },
        num_chunks=plan.num_chunks,
        num_slots=plan.num_slots,
        num_topk=input_topk_idx.shape[1],
        num_mapped_experts=0 if expert_map is None else expert_map.shape[0],
        num_experts=0 if expert_load is None else expert_load.shape[0],
        router_scale=scale,
        num_chunk_ctas=plan.num_ctas - plan.config.num_router_ctas(x.shape[0]),
    )
    _launch(plan, args, tensors, rows, x.shape[0], expert_load)


torch.library.impl(
    "deep_moe::route_and_prepare_inputs", "CompositeExplicitAutograd", _route_and_prepare_inputs
)


@torch.library.register_fake("deep_moe::route_and_prepare_inputs")
def _route_and_prepare_inputs_fake(*_: object) -> None:
    """The operator only writes to tensors that it is given."""


def _router_fields(
    router: Router, router_logits: torch.Tensor, correction_bias: torch.Tensor | None
) -> dict[str, Any]:
    """The config's fields for a rule."""
    return {
        "num_router_experts": router_logits.shape[1],
        "has_bf16_logits": router_logits.dtype == torch.bfloat16,
        "router_scoring": SCORINGS.index(router.scoring),
        "has_correction_bias": correction_bias is not None,
        "num_expert_groups": router.num_groups,
        "num_chosen_groups": router.num_chosen_groups,
        "renormalizes": router.renormalize,
    }


def check_logits(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    router: Router,
    num_tokens: int,
    input_topk_idx: torch.Tensor,
) -> None:
    """Raise if the form of the first two is not allowed, or the rule is none for it."""
    device = input_topk_idx.device
    if router_logits.ndim != 2:
        raise ValueError(
            "router_logits must be 2-dimensional [tokens, experts]; got shape "
            f"{tuple(router_logits.shape)}"
        )
    num_experts = router_logits.shape[1]
    check_tensor("router_logits", router_logits, _LOGIT_DTYPES, (num_tokens, num_experts), device)
    check_contiguous("router_logits", router_logits)
    check_start("router_logits", router_logits, _X_ALIGNMENT)
    router.check_sizes(num_experts, input_topk_idx.shape[1])
    if correction_bias is not None:
        check_tensor("correction_bias", correction_bias, torch.float32, (num_experts,), device)
        check_contiguous("correction_bias", correction_bias)


def check_inputs(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    input_x: torch.Tensor,
    input_topk_idx: torch.Tensor,
) -> None:
    """Raise if the form of the first three does not fit a buffer with the other two."""
    check_tokens(x, input_x)
    device = input_x.device
    slots = (x.shape[0], input_topk_idx.shape[1])
    check_tensor("topk_idx", topk_idx, TOPK_IDX_DTYPES, slots, device)
    check_tensor("topk_weights", topk_weights, TOPK_WEIGHT_DTYPES, slots, device)
    check_contiguous("topk_idx", topk_idx)
    check_contiguous("topk_weights", topk_weights)


def check_tokens(x: torch.Tensor, input_x: torch.Tensor) -> None:
    """Raise if the form of x does not fit a buffer's tokens."""
    if x.ndim != 2:
        raise ValueError(f"x must be 2-dimensional [tokens, hidden]; got shape {tuple(x.shape)}")
    num_tokens = x.shape[0]
    max_tokens, num_elements = input_x.shape
    hidden = num_elements * _values_per_element(input_x)
    check_tensor("x", x, torch.bfloat16, (num_tokens, hidden), input_x.device)
    if num_tokens > max_tokens:
        raise ValueError(
            f"x must have at most num_max_tokens_per_rank ({max_tokens}) tokens; got {num_tokens}"
        )
    check_contiguous("x", x)
    check_start("x", x, _X_ALIGNMENT)


def check_routing(
    token_mask: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    expert_load: torch.Tensor | None,
    num_tokens: int,
    device: torch.device,
) -> None:
    """Raise if the form of one that is there is not allowed."""
    if token_mask is not None:
        check_mask("token_mask", token_mask, num_tokens, device)
    if expert_map is not None:
        if expert_map.ndim not in (1, 2) or expert_map.numel() == 0:
            raise ValueError(
                "expert_map must be [experts] or [experts, copies] and not empty; got shape "
                f"{tuple(expert_map.shape)}"
            )
        check_tensor("expert_map", expert_map, TOPK_IDX_DTYPES, tuple(expert_map.shape), device)
        check_contiguous("expert_map", expert_map)
    if expert_load is not None:
        if expert_load.ndim != 1:
            raise ValueError(
                f"expert_load must be [num_experts]; got shape {tuple(expert_load.shape)}"
            )
        check_tensor("expert_load", expert_load, torch.int32, tuple(expert_load.shape), device)
        check_contiguous("expert_load", expert_load)


def check_mask(name: str, mask: torch.Tensor, num_tokens: int, device: torch.device) -> None:
    """Raise if its form is not allowed."""
    check_tensor(name, mask, torch.bool, (num_tokens,), device)
    check_contiguous(name, mask)


def check_token_scale(
    token_scale: torch.Tensor | None, input_x: torch.Tensor, input_x_sf: torch.Tensor
) -> None:
    """Raise if it is there and its form or the buffer's tokens do not allow it."""
    if token_scale is None:
        return
    if not row_fields(input_x, input_x_sf).get("num_token_chunks"):
        raise ValueError(
            "token_scale must be None for a buffer whose tokens have no float32 scale of their "
            "own; got a tensor"
        )
    allowed = () if token_scale.ndim == 0 else (1,)
    check_tensor("token_scale", token_scale, torch.float32, allowed, input_x.device)


def _values_per_element(input_x: torch.Tensor) -> int:
    return 2 if input_x.dtype == torch.uint8 else 1


def row_fields(input_x: torch.Tensor, input_x_sf: torch.Tensor) -> dict[str, Any]:
    """The config's fields that say where rows begin, if not one behind the other, or if it has to
    be known which values a token's scale is for."""
    hidden, row_length = input_x.shape[1], input_x.stride(0)
    if input_x.dtype == torch.uint8:
        return {
            **whole_token_fields(2 * hidden),
            "num_buffer_row_chunks": 2 * row_length // VALUES_PER_CHUNK,
            "num_buffer_row_scales": 4 * input_x_sf.stride(0),
            "packs_e2m1": True,
        }
    if input_x_sf.dtype == torch.float32:  # hidden is a multiple of 128
        return whole_token_fields(hidden) if input_x_sf.shape[1] == 1 else {}
    has_scales = input_x_sf.shape[1] > 0
    row_scales = 4 * input_x_sf.stride(0) if has_scales else 0
    if row_length == hidden and row_scales == (hidden // GROUP_SIZE if has_scales else 0):
        return {}
    return {
        "num_row_chunks": hidden // VALUES_PER_CHUNK,
        "num_buffer_row_chunks": row_length // VALUES_PER_CHUNK,
        "num_buffer_row_scales": row_scales,
    }


def usual_configs(
    buffer: SymmBuffer, arch: str, *, has_token_scale: bool
) -> list[PrepareInputsConfig]:
    """The kernels for a buffer without a mask, a map and counters, whatever the router's dtypes."""
    rows = buffer.x, buffer.x_sf
    return [
        _config(ids, weights, None, None, None, rows, arch, has_token_scale=has_token_scale)
        for ids in TOPK_IDX_DTYPES
        for weights in TOPK_WEIGHT_DTYPES
    ]


def _config(
    topk_idx: torch.dtype,
    topk_weights: torch.dtype,
    token_mask: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    expert_load: torch.Tensor | None,
    rows: tuple[torch.Tensor, torch.Tensor],
    arch: str | None,
    *,
    has_token_scale: bool = False,
    router_fields: dict[str, Any] | None = None,
) -> PrepareInputsConfig:
    """rows: a buffer's tokens and their scales. router_fields: where experts are chosen, too."""
    input_x, input_x_sf = rows
    device = input_x.device
    gpu = gpu_of(device)
    own = EMULATED.name if gpu is None else gpu.target.name
    config = PrepareInputsConfig(
        quantizes=input_x.dtype != torch.bfloat16,
        has_float_scales=input_x_sf.dtype == torch.float32,
        has_int32_topk_idx=topk_idx == torch.int32,
        has_bf16_topk_weights=topk_weights == torch.bfloat16,
        has_token_mask=token_mask is not None,
        num_expert_copies=0 if expert_map is None else expert_map[0].numel(),
        has_int64_expert_map=expert_map is not None and expert_map.dtype == torch.int64,
        has_expert_load=expert_load is not None,
        has_token_scale=has_token_scale,
        arch=own if arch is None else arch,
        **row_fields(input_x, input_x_sf),
        **(router_fields or {}),
    )
    if config.arch != own and gpu is not None:
        raise ValueError(f"arch must be {own}, that of {device}, or None; got {arch!r}")
    if config.packs_e2m1 and not target_of(config.arch).packs_e2m1:
        raise ValueError(
            f"arch must be one that rounds to E2M1, as the buffer's tokens are; got {config.arch!r}"
        )
    return config


def _make_plan(
    config: PrepareInputsConfig, x: torch.Tensor, num_slots: int, device: torch.device
) -> PreparationPlan:
    gpu = gpu_of(device)
    num_chunks = config.num_chunks(x.numel())
    return PreparationPlan(
        config=config,
        num_chunks=num_chunks,
        num_slots=num_slots,
        num_ctas=config.num_ctas(num_chunks) + config.num_router_ctas(x.shape[0]),
        gpu=gpu,
        launcher=None if gpu is None else launcher_of(config, gpu),
    )
