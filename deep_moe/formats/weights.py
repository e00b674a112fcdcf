"""Expert weights, from the layout of checkpoints to the layout that a kernel loads.

A layer's weights are a pair (packed E2M1 int8 [E, N, K/2], UE8M0 scales int32 [E, N, K/128]) with E
the local experts. For SM100 the rows of gate and up alternate in runs of 8, so that a tile of the
accumulator holds matching pairs, and scales lie MN-major with the rows of each 128 in the order
that one `tcgen05.cp` spreads over tensor memory. For SM90 see sm90_weights.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from deep_moe.formats import sm90_weights
from deep_moe.heuristics.shape import MoEShape
from deep_moe.targets import TargetWeights, target_of, target_of_device

GATE_UP_RUN = 8  # consecutive rows of gate, then of up
SF_BLOCK = 128  # rows whose scales are permuted among themselves

_NAN_BYTE = 255  # of UE8M0
_ALIGNMENT = 16  # bytes, of tensors that kernels load


class LayerWeights(NamedTuple):
    """Weights of one linear layer of all local experts, with their scales. What the tensors hold
    after the transformation depends on the architecture."""

    weight: torch.Tensor
    sf: torch.Tensor


class MegaMoEWeights(NamedTuple):
    """Both linear layers of the local experts, l1 and l2, each a pair (weight, sf)."""

    l1: LayerWeights
    l2: LayerWeights

    def expert(self, expert_idx: int) -> MegaMoEWeights:
        """One local expert's weights, tensors [1, ...] in the same memory."""
        num_experts = self.l1.weight.shape[0]
        if not 0 <= expert_idx < num_experts:
            raise IndexError(f"expert_idx must be 0 to {num_experts - 1}; got {expert_idx}")
        one = slice(expert_idx, expert_idx + 1)
        return MegaMoEWeights(*(LayerWeights(weight[one], sf[one]) for weight, sf in self))


Pair = tuple[torch.Tensor, torch.Tensor]


def transform_weights_for_mega_moe(
    l1_weights: Pair,
    l2_weights: Pair,
    arch: str | None = None,
    *,
    out: tuple[Pair, Pair] | None = None,
) -> MegaMoEWeights:
    """Lay out weights for the kernel, once, after loading. The sources may then be freed.

    l1_weights: (int8 [E, 2*I, H/2], int32 [E, 2*I, H/128]), rows gate 0..I-1, then up 0..I-1.
    l2_weights: (int8 [E, H, I/2], int32 [E, H, I/128]).
    arch: the target; by default that of the tensors' device, sm_100a for tensors on the CPU.
    out: where to put them, for the same E, of `empty_weights_for_mega_moe`; by default new tensors.
        After an error its contents are undefined.

    Returns `out`. Every weight keeps its exact value. ValueError names expert and row of a scale
    that is NaN and, for sm_90a, of a row whose scales differ by more than 2^26.

    Expert by expert, so that a layer and its transformed copy never exist at the same time:

    >>> from deep_moe import quantize_mxfp4
    >>> weights = empty_weights_for_mega_moe(4, hidden=256, intermediate_hidden=128)
    >>> for i in range(4):
    ...     l1 = quantize_mxfp4(torch.randn(1, 2 * 128, 256))
    ...     l2 = quantize_mxfp4(torch.randn(1, 256, 128))
    ...     _ = transform_weights_for_mega_moe(l1, l2, out=weights.expert(i))
    """
    l1 = weight_pair("l1_weights", l1_weights)
    l2 = weight_pair("l2_weights", l2_weights)
    num_experts, hidden, intermediate = _check_weights(l1, l2)
    device = l1.weight.device
    on_target = _target_weights(arch, device)
    shape = _shape_of(num_experts, hidden, intermediate)
    if out is None:
        out = _empty_weights(on_target, shape, device)
    else:
        out = MegaMoEWeights(weight_pair("out[0]", out[0]), weight_pair("out[1]", out[1]))
        _check_out(out, (l1, l2), on_target, shape)
    _check_no_nan("l1_weights", l1.sf)
    _check_no_nan("l2_weights", l2.sf)
    on_target.transform(l1, l2, out)
    return out


def empty_weights_for_mega_moe(
    num_experts: int,
    hidden: int,
    intermediate_hidden: int,
    *,
    arch: str | None = None,
    device: torch.device | str = "cpu",
) -> MegaMoEWeights:
    """Uninitialized tensors of the form that `transform_weights_for_mega_moe` gives `num_experts`
    local experts, for its `out`.

    hidden, intermediate_hidden: H and I, multiples of 128. arch: the target; by default that of
    `device`.
    """
    shape = _shape_of(num_experts, hidden, intermediate_hidden)
    device = torch.device(device)
    return _empty_weights(_target_weights(arch, device), shape, device)


def inverse_transform_weights(
    l1_weights: Pair, l2_weights: Pair, arch: str | None = None
) -> MegaMoEWeights:
    """Give back what `transform_weights_for_mega_moe` was given, as new tensors. For sm_90a, groups
    of zeros may have got another scale.

    l1_weights, l2_weights: transformed for `arch`, by default the target of their device.

    Raises TypeError or ValueError if they have not the form that it makes.
    """
    l1 = weight_pair("l1_weights", l1_weights)
    l2 = weight_pair("l2_weights", l2_weights)
    return _target_weights(arch, l1.weight.device).inverse(l1, l2)


def weight_pair(name: str, value: object) -> LayerWeights:
    """`value` as weights with their scales, or a TypeError that says what it should be."""
    allowed = "a pair (packed E2M1 int8, UE8M0 scales int32), as deep_moe.quantize_mxfp4 gives it"
    if not isinstance(value, (tuple, list)):
        got = type(value).__name__
        if isinstance(value, torch.Tensor):
            got = f"one tensor of {value.dtype}"
        raise TypeError(f"{name} must be {allowed}; got {got}")
    if len(value) != 2 or not all(isinstance(tensor, torch.Tensor) for tensor in value):
        got = ", ".join(type(tensor).__name__ for tensor in value)
        raise TypeError(f"{name} must be {allowed}; got ({got})")
    return LayerWeights(*value)


def interleave_gate_up(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """[E, 2*I, ...] with gate rows before up rows, to runs of 8 in turn, in contiguous `out`."""
    num_runs = rows.shape[1] // (2 * GATE_UP_RUN)
    runs = rows.unflatten(1, (2, num_runs, GATE_UP_RUN)).transpose(1, 2)
    out.unflatten(1, (num_runs, 2, GATE_UP_RUN)).copy_(runs)
    return out


def separate_gate_up(rows: torch.Tensor) -> torch.Tensor:
    """The inverse of `interleave_gate_up`. A copy."""
    num_runs = rows.shape[1] // (2 * GATE_UP_RUN)
    runs = rows.unflatten(1, (num_runs, 2, GATE_UP_RUN)).transpose(1, 2)
    return _copy(runs).reshape(rows.shape)


def permute_sf_rows(sf: torch.Tensor) -> torch.Tensor:
    """Scales [E, N, W] to MN-major [E, W, N], where row r of each 128 goes to (r%32)*4 + r/32."""
    blocks = sf.transpose(1, 2).unflatten(2, (sf.shape[1] // SF_BLOCK, 4, 32))
    return _copy(blocks.transpose(-1, -2)).flatten(2)


def restore_sf_rows(sf: torch.Tensor) -> torch.Tensor:
    """The inverse of `permute_sf_rows`. A copy."""
    blocks = sf.unflatten(2, (sf.shape[2] // SF_BLOCK, 32, 4)).transpose(-1, -2)
    return _copy(blocks.flatten(2).transpose(1, 2))


def sm100_transform(l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
    """Interleave and permute, as above."""
    interleave_gate_up(l1.weight, out.l1.weight)
    l1_sf = torch.empty(l1.sf.shape, dtype=l1.sf.dtype, device=l1.sf.device)
    out.l1.sf.copy_(permute_sf_rows(interleave_gate_up(l1.sf, l1_sf)))
    out.l2.weight.copy_(l2.weight)
    out.l2.sf.copy_(permute_sf_rows(l2.sf))


def sm100_inverse(l1: LayerWeights, l2: LayerWeights) -> MegaMoEWeights:
    num_experts, num_l1_rows, num_bytes = _sizes("l1_weights[0]", l1.weight, "[E, 2*I, H/2]")
    shape = _shape_of(num_experts, 2 * num_bytes, num_l1_rows // 2)
    _check_form({"l1_weights": l1, "l2_weights": l2}, sm100_tensors(shape))
    return MegaMoEWeights(
        LayerWeights(separate_gate_up(l1.weight), separate_gate_up(restore_sf_rows(l1.sf))),
        LayerWeights(_copy(l2.weight), restore_sf_rows(l2.sf)),
    )


def sm100_tensors(shape: MoEShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    num_experts, hidden = shape.num_experts_per_rank, shape.hidden
    intermediate = shape.intermediate_hidden
    return {
        "l1_weights[0]": (torch.int8, (num_experts, 2 * intermediate, hidden // 2)),
        "l1_weights[1]": (torch.int32, (num_experts, hidden // 128, 2 * intermediate)),
        "l2_weights[0]": (torch.int8, (num_experts, hidden, intermediate // 2)),
        "l2_weights[1]": (torch.int32, (num_experts, intermediate // 128, hidden)),
    }


def sm90_transform(l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
    sm90_weights.shuffle_layer(*l1, out.l1, name="l1_weights", is_l1=True)
    sm90_weights.shuffle_layer(*l2, out.l2, name="l2_weights", is_l1=False)


def sm90_inverse(l1: LayerWeights, l2: LayerWeights) -> MegaMoEWeights:
    axes = "[E, n-blocks, k-blocks, bytes]"
    num_experts, num_n_blocks, num_k_blocks, _ = _sizes("l1_weights[0]", l1.weight, axes)
    num_l1_rows = num_n_blocks * sm90_weights.BLOCK_N
    hidden = num_k_blocks * sm90_weights.BLOCK_K
    shape = _shape_of(num_experts, hidden, num_l1_rows // 2)
    _check_form({"l1_weights": l1, "l2_weights": l2}, sm90_tensors(shape))
    return MegaMoEWeights(
        LayerWeights(*sm90_weights.unshuffle_layer(*l1, num_rows=num_l1_rows, is_l1=True)),
        LayerWeights(*sm90_weights.unshuffle_layer(*l2, num_rows=hidden, is_l1=False)),
    )


def sm90_tensors(shape: MoEShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    num_experts = shape.num_experts_per_rank
    block_n, block_k = sm90_weights.BLOCK_N, sm90_weights.BLOCK_K
    num_l1_n_blocks = 2 * shape.intermediate_hidden // block_n
    num_l2_n_blocks = -(-shape.hidden // block_n)
    l1 = (num_experts, num_l1_n_blocks, shape.hidden // block_k, sm90_weights.BLOCK_BYTES)
    l2 = (num_experts, num_l2_n_blocks, shape.intermediate_hidden // block_k, l1[-1])
    return {
        "l1_weights[0]": (torch.int8, l1),
        "l1_weights[1]": (torch.float32, (num_experts, num_l1_n_blocks, block_n)),
        "l2_weights[0]": (torch.int8, l2),
        "l2_weights[1]": (torch.float32, (num_experts, num_l2_n_blocks, block_n)),
    }


def _target_weights(arch: str | None, device: torch.device) -> TargetWeights:
    target = target_of_device(device) if arch is None else target_of(arch)
    return target.weights_of()


def _shape_of(num_experts: int, hidden: int, intermediate_hidden: int) -> MoEShape:
    """A shape whose one rank has these weights."""
    return MoEShape(
        num_ranks=1,
        num_experts=num_experts,
        num_topk=1,
        hidden=hidden,
        intermediate_hidden=intermediate_hidden,
        num_max_tokens_per_rank=1,
    )


def _empty_weights(
    on_target: TargetWeights, shape: MoEShape, device: torch.device
) -> MegaMoEWeights:
    w1, sf1, w2, sf2 = (
        torch.empty(size, dtype=dtype, device=device)
        for dtype, size in on_target.tensors(shape).values()
    )
    return MegaMoEWeights(LayerWeights(w1, sf1), LayerWeights(w2, sf2))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _check_weights(l1: LayerWeights, l2: LayerWeights) -> tuple[int, int, int]:
    """(experts, hidden, intermediate) of weights in the layout of checkpoints, or an error that
    names the tensor."""
    num_experts, num_l1_rows, hidden = _check_layer("l1_weights", l1, "[E, 2*I, H/2]")
    if num_l1_rows % 256:
        raise ValueError(
            "l1_weights[0] must have 2*I rows with I a multiple of 128; "
            f"got shape {tuple(l1.weight.shape)}"
        )
    _check_layer("l2_weights", l2, "[E, H, I/2]")
    expected = (num_experts, hidden, num_l1_rows // 4)
    if tuple(l2.weight.shape) != expected:
        raise ValueError(
            f"l2_weights[0] must have shape [E, H, I/2] = {expected} to go with l1_weights; "
            f"got {tuple(l2.weight.shape)}"
        )
    for name, tensor in (
        ("l1_weights[1]", l1.sf),
        ("l2_weights[0]", l2.weight),
        ("l2_weights[1]", l2.sf),
    ):
        if tensor.device != l1.weight.device:
            raise ValueError(
                f"{name} must be on {l1.weight.device} like l1_weights[0]; got {tensor.device}"
            )
    return num_experts, hidden, num_l1_rows // 2


def _check_out(
    out: MegaMoEWeights, sources: tuple[Pair, Pair], on_target: TargetWeights, shape: MoEShape
) -> None:
    """Raise unless `out` is what `on_target` makes, in memory of its own."""
    _check_form({"out[0]": out.l1, "out[1]": out.l2}, on_target.tensors(shape))
    source_tensors = [tensor for pair in sources for tensor in pair]
    device = source_tensors[0].device
    for i, tensor in enumerate((*out.l1, *out.l2)):
        name = f"out[{i // 2}][{i % 2}]"
        if tensor.device != device:
            raise ValueError(
                f"{name} must be on {device}, as l1_weights[0] is; got {tensor.device}"
            )
        if tensor.data_ptr() % _ALIGNMENT:
            raise ValueError(
                f"{name} must start at a multiple of {_ALIGNMENT} bytes; got {tensor.data_ptr():#x}"
            )
        if any(_overlap(tensor, source) for source in source_tensors):
            raise ValueError(f"{name} must not lie in the memory of what is transformed")


def _check_form(
    pairs: Mapping[str, LayerWeights], expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    """Raise unless tensors are contiguous and of these dtypes and shapes, in this order."""
    tensors = [(f"{name}[{i}]", pair[i]) for name, pair in pairs.items() for i in range(2)]
    for (name, tensor), (dtype, size) in zip(tensors, expected.values(), strict=True):
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}; got {tensor.dtype}")
        if tuple(tensor.shape) != size or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, of shape {size}; got shape {tuple(tensor.shape)} with "
                f"strides {tensor.stride()}"
            )


def _sizes(name: str, tensor: torch.Tensor, axes: str) -> tuple[int, ...]:
    """The tensor's shape, or an error if it has not these axes."""
    if tensor.dim() != axes.count(",") + 1:
        raise ValueError(f"{name} must have shape {axes}; got {tuple(tensor.shape)}")
    return tuple(tensor.shape)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, the first contiguous, may share memory."""
    begin, end = a.data_ptr(), a.data_ptr() + a.nbytes
    length = sum((size - 1) * stride for size, stride in zip(b.shape, b.stride(), strict=True)) + 1
    return b.data_ptr() < end and begin < b.data_ptr() + length * b.element_size()


def _check_no_nan(name: str, sf: torch.Tensor) -> None:
    """Raise if a scale [E, N, W] is NaN. Expert by expert, to need little memory; one wait for a
    GPU."""
    highest = [own.contiguous().view(torch.uint8).amax(dim=-1) for own in sf]
    is_nan = torch.stack(highest) == _NAN_BYTE
    if bool(is_nan.any()):
        expert_idx, row = is_nan.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: expert {expert_idx}, row {row} must have scales that are numbers; got NaN "
            f"(UE8M0 byte {_NAN_BYTE})"
        )


def _check_layer(name: str, layer: LayerWeights, axes: str) -> tuple[int, int, int]:
    """(experts, rows, values per row) of a layer, or an error that names the tensor."""
    weight, sf = layer
    if weight.dtype != torch.int8:
        raise TypeError(
            f"{name}[0] must be int8, two E2M1 values per byte, as deep_moe.quantize_mxfp4 packs "
            f"them; got {weight.dtype}"
        )
    if sf.dtype != torch.int32:
        raise TypeError(f"{name}[1] must be int32, four UE8M0 bytes per word; got {sf.dtype}")
    if weight.dim() != 3 or weight.shape[0] == 0:
        raise ValueError(f"{name}[0] must have shape {axes}, E >= 1; got {tuple(weight.shape)}")
    num_experts, num_rows, num_bytes = weight.shape
    if num_rows == 0 or num_rows % SF_BLOCK or num_bytes == 0 or num_bytes % 64:
        raise ValueError(
            f"{name}[0] must have shape {axes} with H and I positive multiples of 128; "
            f"got {tuple(weight.shape)}"
        )
    expected = (num_experts, num_rows, num_bytes // 64)
    if tuple(sf.shape) != expected:
        raise ValueError(
            f"{name}[1] must hold one scale per 32 values, shape {expected}; got {tuple(sf.shape)}"
        )
    return num_experts, num_rows, 2 * num_bytes
