"""Expert weights, from the layout of checkpoints to the layout that a kernel loads.

A layer's weights are a pair of E local experts' values and scales, of a format that has a file of
its own. For SM100 the rows of gate and up alternate in runs of 8, so that a tile of the accumulator
holds matching pairs, and scales, in words of four UE8M0 bytes [E, N, K/128], lie MN-major with the
rows of each 128 in the order that one `tcgen05.cp` spreads over tensor memory. For SM90 see
sm90_weights.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from deep_moe.formats import sm90_weights
from deep_moe.heuristics.shape import MoEShape
from deep_moe.targets import TargetWeights, target_of, target_of_device
from deep_moe.tensor_memory import check_dense, check_memory, refuse_shared_memory

from .weight_formats import DEFAULT_WEIGHTS, WeightFormat, weight_format

GATE_UP_RUN = 8  # consecutive rows of gate, then of up
SF_BLOCK = 128  # rows whose scales are permuted among themselves
SM90_FP8_SCALES = 4  # of a block of 256 rows x 128 k

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
    l1_weights: Pair | torch.Tensor,
    l2_weights: Pair | torch.Tensor,
    arch: str | None = None,
    *,
    weights: str = DEFAULT_WEIGHTS,
    requantize: bool = False,
    out: tuple[Pair, Pair] | None = None,
) -> MegaMoEWeights:
    """Lay out weights for the kernel, once, after loading. The sources may then be freed.

    l1_weights: (values [E, 2*I, H], scales), rows gate 0..I-1, then up 0..I-1.
    l2_weights: (values [E, H, I], scales).
    arch: the target; by default that of the tensors' device, sm_100a for tensors on the CPU.
    weights: their format.
        "mxfp4": int8, two E2M1 values in each, so [E, N, K/2], and int32 scales [E, N, K/128], four
        UE8M0 bytes in each, one for every 32 values.
        "fp8": float8_e4m3fn [E, N, K]. Scales for every 32 values, in int32 as above, or [E, N,
        K/32], or for every 128 x 128 of them, [E, N/128, K/128], each rounded up, for Linear1
        [E, 2*ceil(I/128), ...], those of gate before those of up: float8_e8m0fnu, uint8, or
        float32. On sm_100a and sm_103a they have to be powers of two. On sm_90a they have to be
        equal within 128 x 128 values, and may be any positive numbers.
        "bf16": bfloat16 [E, N, K], without scales: a tensor for each layer, not a pair. What is
        returned are pairs as of all formats, with an empty tensor in place of scales.
        "mxfp4_bf16": as "mxfp4", laid out for tokens in bfloat16. On sm_90a only.
    requantize: of fp8, let scales be others, too: the weights are then rounded anew, and a
        `RequantizationWarning` says how far they moved.
    out: where to put them, for the same E, of `empty_weights_for_mega_moe`; by default new tensors.
        After an error its contents are undefined.

    H and I are multiples of 32. Up to multiples of 128, weights are padded with zeros. What is a
    quotient by 128 above is rounded up.

    Returns `out`. Every weight keeps its exact value, unless requantized. ValueError names expert
    and row of a scale that is NaN, of one that the target cannot apply, and, on sm_90a, of a row
    whose scales differ by more than 2^26 for mxfp4, and by more than 2^125 for mxfp4_bf16.

    Expert by expert, so that a layer and its transformed copy never exist at the same time:

    >>> from deep_moe import quantize_mxfp4
    >>> weights = empty_weights_for_mega_moe(4, hidden=256, intermediate_hidden=128)
    >>> for i in range(4):
    ...     l1 = quantize_mxfp4(torch.randn(1, 2 * 128, 256))
    ...     l2 = quantize_mxfp4(torch.randn(1, 256, 128))
    ...     _ = transform_weights_for_mega_moe(l1, l2, out=weights.expert(i))
    """
    source = weight_format(weights)
    l1 = _detached(weight_pair("l1_weights", l1_weights, source))
    l2 = _detached(weight_pair("l2_weights", l2_weights, source))
    if not isinstance(requantize, bool):
        raise TypeError(f"requantize must be a bool; got {requantize!r}")
    sizes = source.check(l1, l2)
    _check_memory({"l1_weights": l1, "l2_weights": l2})
    device = l1.weight.device
    on_target = _target_weights(arch, device, weights)
    shape = _shape_of(*sizes, weights)
    if out is None:
        out = _empty_weights(on_target, shape, device)
    else:
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            raise TypeError(
                f"out must be a pair of empty_weights_for_mega_moe; got {type(out).__name__}"
            )
        out = MegaMoEWeights(
            weight_pair("out[0]", out[0], source), weight_pair("out[1]", out[1], source)
        )
        _check_out(out, (l1, l2), on_target, shape)
    source.check_values("l1_weights", l1)
    source.check_values("l2_weights", l2)
    if shape.padded is not shape:
        l1, l2 = source.padded(l1, l2)
    if not requantize:
        on_target.transform(l1, l2, out)
        return out
    for warning in on_target.requantize(l1, l2, out):
        warnings.warn(warning, stacklevel=2)
    return out


def empty_weights_for_mega_moe(
    num_experts: int,
    hidden: int,
    intermediate_hidden: int,
    *,
    arch: str | None = None,
    device: torch.device | str = "cpu",
    weights: str = DEFAULT_WEIGHTS,
) -> MegaMoEWeights:
    """Uninitialized tensors of the form that `transform_weights_for_mega_moe` gives `num_experts`
    local experts, for its `out`.

    hidden, intermediate_hidden: H and I, as `transform_weights_for_mega_moe` allows them.
    arch: the target; by default that of
    `device`. weights: their format.
    """
    shape = _shape_of(num_experts, hidden, intermediate_hidden, weights)
    device = torch.device(device)
    return _empty_weights(_target_weights(arch, device, weights), shape, device)


def inverse_transform_weights(
    l1_weights: Pair,
    l2_weights: Pair,
    arch: str | None = None,
    *,
    weights: str = DEFAULT_WEIGHTS,
    hidden: int | None = None,
    intermediate_hidden: int | None = None,
) -> MegaMoEWeights:
    """Give back what `transform_weights_for_mega_moe` was given, as new tensors: of fp8, with int32
    scales, four UE8M0 bytes in each, or for sm_90a with float32 scales for 128 x 128 values. Of
    MXFP4 for sm_90a, groups of zeros may have got another scale.

    l1_weights, l2_weights: transformed for `arch`, by default the target of their device.
    weights: their format. hidden, intermediate_hidden: H and I, where they are no multiples of 128
    and so were padded.

    Raises TypeError or ValueError if they have not the form that it makes.
    """
    source = weight_format(weights)
    l1 = _detached(weight_pair("l1_weights", l1_weights, source))
    l2 = _detached(weight_pair("l2_weights", l2_weights, source))
    padded = _target_weights(arch, l1.weight.device, weights).inverse(l1, l2)
    if hidden is None and intermediate_hidden is None:
        return padded
    num_experts, padded_hidden, padded_intermediate = source.check(*padded)
    shape = _shape_of(
        num_experts,
        padded_hidden if hidden is None else hidden,
        padded_intermediate if intermediate_hidden is None else intermediate_hidden,
        weights,
    )
    for name, allowed in (
        ("hidden", padded_hidden),
        ("intermediate_hidden", padded_intermediate),
    ):
        if getattr(shape.padded, name) != allowed:
            raise ValueError(
                f"{name} must become {allowed} when it is padded, as the weights were; "
                f"got {getattr(shape, name)}"
            )
    if shape.padded is shape:
        return padded
    return MegaMoEWeights(*source.without_padding(*padded, shape))


def weight_pair(name: str, value: object, source: WeightFormat) -> LayerWeights:
    """`value` as weights with their scales, or a TypeError that says what it should be."""
    allowed = source.pair
    if isinstance(value, torch.Tensor):
        pair = source.pair_of(value)
        if pair is not None:
            check_dense(name, value)
            return pair
    if not isinstance(value, (tuple, list)):
        got = type(value).__name__
        if isinstance(value, torch.Tensor):
            got = f"one tensor of {value.dtype}"
        raise TypeError(f"{name} must be {allowed}; got {got}")
    if len(value) != 2 or not all(isinstance(tensor, torch.Tensor) for tensor in value):
        got = ", ".join(type(tensor).__name__ for tensor in value)
        raise TypeError(f"{name} must be {allowed}; got ({got})")
    for i, tensor in enumerate(value):
        check_dense(f"{name}[{i}]", tensor)
    return LayerWeights(*value)


def _detached(layer: LayerWeights) -> LayerWeights:
    """Without a history: what is made of a Parameter would else keep its memory."""
    return LayerWeights(layer.weight.detach(), layer.sf.detach())


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
    """Interleave and permute, as above. Scales: int32 [E, N, K/128]."""
    interleave_gate_up(l1.weight, out.l1.weight)
    l1_sf = torch.empty(l1.sf.shape, dtype=l1.sf.dtype, device=l1.sf.device)
    out.l1.sf.copy_(permute_sf_rows(interleave_gate_up(l1.sf, l1_sf)))
    out.l2.weight.copy_(l2.weight)
    out.l2.sf.copy_(permute_sf_rows(l2.sf))


def sm100_inverse(
    l1: LayerWeights, l2: LayerWeights, *, dtype: torch.dtype, values_per_byte: int
) -> MegaMoEWeights:
    axes = "[E, 2*I, H]" if values_per_byte == 1 else f"[E, 2*I, H/{values_per_byte}]"
    num_experts, num_l1_rows, num_bytes = _sizes("l1_weights[0]", l1.weight, axes)
    shape = _shape_of(num_experts, values_per_byte * num_bytes, num_l1_rows // 2)
    expected = sm100_tensors(shape, dtype=dtype, values_per_byte=values_per_byte)
    _check_form({"l1_weights": l1, "l2_weights": l2}, expected)
    return MegaMoEWeights(
        LayerWeights(separate_gate_up(l1.weight), separate_gate_up(restore_sf_rows(l1.sf))),
        LayerWeights(_copy(l2.weight), restore_sf_rows(l2.sf)),
    )


def sm100_tensors(
    shape: MoEShape, *, dtype: torch.dtype, values_per_byte: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    num_experts, hidden = shape.num_local_experts, shape.hidden
    intermediate = shape.intermediate_hidden
    return {
        "l1_weights[0]": (dtype, (num_experts, 2 * intermediate, hidden // values_per_byte)),
        "l1_weights[1]": (torch.int32, (num_experts, hidden // 128, 2 * intermediate)),
        "l2_weights[0]": (dtype, (num_experts, hidden, intermediate // values_per_byte)),
        "l2_weights[1]": (torch.int32, (num_experts, intermediate // 128, hidden)),
    }


def sm100_bf16_inverse(l1: LayerWeights, l2: LayerWeights) -> MegaMoEWeights:
    from .bf16 import no_scales

    num_experts, num_l1_rows, hidden = _sizes("l1_weights[0]", l1.weight, "[E, 2*I, H]")
    shape = _shape_of(num_experts, hidden, num_l1_rows // 2, "bf16")
    _check_form({"l1_weights": l1, "l2_weights": l2}, sm100_bf16_tensors(shape))
    w1, w2 = separate_gate_up(l1.weight), _copy(l2.weight)
    return MegaMoEWeights(LayerWeights(w1, no_scales(w1)), LayerWeights(w2, no_scales(w2)))


def sm100_bf16_tensors(shape: MoEShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    num_experts, hidden = shape.num_local_experts, shape.hidden
    intermediate = shape.intermediate_hidden
    return {
        "l1_weights[0]": (torch.bfloat16, (num_experts, 2 * intermediate, hidden)),
        "l1_weights[1]": (torch.float32, (num_experts, 0)),
        "l2_weights[0]": (torch.bfloat16, (num_experts, hidden, intermediate)),
        "l2_weights[1]": (torch.float32, (num_experts, 0)),
    }


def sm90_transform(l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
    sm90_weights.shuffle_layer(*l1, out.l1, name="l1_weights", is_l1=True)
    sm90_weights.shuffle_layer(*l2, out.l2, name="l2_weights", is_l1=False)


def sm90_inverse(l1: LayerWeights, l2: LayerWeights) -> MegaMoEWeights:
    block_k = sm90_weights.BLOCK_K
    shape = _sm90_shape(l1, block_k, "mxfp4")
    _check_form({"l1_weights": l1, "l2_weights": l2}, sm90_tensors(shape))
    return _unshuffled(l1, l2, shape, sm90_weights.unshuffle_layer)


def sm90_tensors(shape: MoEShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return _shuffled_tensors(shape, sm90_weights.BLOCK_K, sm90_weights.BLOCK_BYTES)


def sm90_mxfp4_bf16_inverse(l1: LayerWeights, l2: LayerWeights) -> MegaMoEWeights:
    from .sm90_bf16_weights import BLOCK_K
    from .sm90_mxfp4_bf16_weights import unshuffle_layer

    shape = _sm90_shape(l1, BLOCK_K, "mxfp4_bf16")
    _check_form({"l1_weights": l1, "l2_weights": l2}, sm90_mxfp4_bf16_tensors(shape))
    return _unshuffled(l1, l2, shape, unshuffle_layer)


def sm90_mxfp4_bf16_tensors(shape: MoEShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    from .sm90_bf16_weights import BLOCK_K
    from .sm90_mxfp4_bf16_weights import BLOCK_BYTES

    return _shuffled_tensors(shape, BLOCK_K, BLOCK_BYTES)


def _sm90_shape(l1: LayerWeights, block_k: int, weights: str) -> MoEShape:
    """Of which Linear1's blocks are these, if of any."""
    axes = "[E, n-blocks, k-blocks, bytes]"
    num_experts, num_n_blocks, num_k_blocks, _ = _sizes("l1_weights[0]", l1.weight, axes)
    num_l1_rows = num_n_blocks * sm90_weights.BLOCK_N
    return _shape_of(num_experts, num_k_blocks * block_k, num_l1_rows // 2, weights)


def _unshuffled(
    l1: LayerWeights, l2: LayerWeights, shape: MoEShape, unshuffle: Callable[..., Pair]
) -> MegaMoEWeights:
    """Of decoded weights."""
    num_l1_rows, num_l2_rows = 2 * shape.intermediate_hidden, shape.hidden
    return MegaMoEWeights(
        LayerWeights(*unshuffle(*l1, num_rows=num_l1_rows, is_l1=True)),
        LayerWeights(*unshuffle(*l2, num_rows=num_l2_rows, is_l1=False)),
    )


def _shuffled_tensors(
    shape: MoEShape, block_k: int, block_bytes: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Of decoded weights: blocks, and a factor for each row."""
    num_experts, block_n = shape.num_local_experts, sm90_weights.BLOCK_N
    num_l1_n_blocks = 2 * shape.intermediate_hidden // block_n
    num_l2_n_blocks = -(-shape.hidden // block_n)
    l1 = (num_experts, num_l1_n_blocks, shape.hidden // block_k, block_bytes)
    l2 = (num_experts, num_l2_n_blocks, shape.intermediate_hidden // block_k, block_bytes)
    return {
        "l1_weights[0]": (torch.int8, l1),
        "l1_weights[1]": (torch.float32, (num_experts, num_l1_n_blocks, block_n)),
        "l2_weights[0]": (torch.int8, l2),
        "l2_weights[1]": (torch.float32, (num_experts, num_l2_n_blocks, block_n)),
    }


def sm90_fp8_inverse(l1: LayerWeights, l2: LayerWeights) -> MegaMoEWeights:
    from .sm90_fp8_weights import read_expert

    axes = "[E, n-blocks, k-blocks, bytes]"
    num_experts, num_n_blocks, num_k_blocks, _ = _sizes("l1_weights[0]", l1.weight, axes)
    num_l1_rows = num_n_blocks * sm90_weights.BLOCK_N
    hidden = num_k_blocks * sm90_weights.BLOCK_K
    shape = _shape_of(num_experts, hidden, num_l1_rows // 2)
    _check_form({"l1_weights": l1, "l2_weights": l2}, sm90_fp8_tensors(shape))

    def read(layer: LayerWeights, num_rows: int, num_columns: int, is_l1: bool) -> LayerWeights:
        made = LayerWeights(
            layer.weight.new_empty((num_experts, num_rows, num_columns)),
            layer.sf.new_empty((num_experts, num_rows // SF_BLOCK, num_columns // SF_BLOCK)),
        )
        for own, out in zip(zip(*layer, strict=True), zip(*made, strict=True), strict=True):
            read_expert(LayerWeights(*own), LayerWeights(*out), is_l1=is_l1)
        return made

    return MegaMoEWeights(
        read(l1, num_l1_rows, hidden, True), read(l2, hidden, num_l1_rows // 2, False)
    )


def sm90_fp8_tensors(shape: MoEShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    num_experts = shape.num_local_experts
    block_n, block_k = sm90_weights.BLOCK_N, sm90_weights.BLOCK_K
    l1 = (num_experts, 2 * shape.intermediate_hidden // block_n, shape.hidden // block_k)
    l2 = (num_experts, -(-shape.hidden // block_n), shape.intermediate_hidden // block_k)
    block_bytes = block_n * block_k
    return {
        "l1_weights[0]": (torch.float8_e4m3fn, (*l1, block_bytes)),
        "l1_weights[1]": (torch.float32, (*l1, SM90_FP8_SCALES)),
        "l2_weights[0]": (torch.float8_e4m3fn, (*l2, block_bytes)),
        "l2_weights[1]": (torch.float32, (*l2, SM90_FP8_SCALES)),
    }


def sm90_bf16_inverse(l1: LayerWeights, l2: LayerWeights) -> MegaMoEWeights:
    from .bf16 import no_scales
    from .sm90_bf16_weights import BLOCK_K, read_expert

    axes = "[E, n-blocks, k-blocks, values]"
    num_experts, num_n_blocks, num_k_blocks, _ = _sizes("l1_weights[0]", l1.weight, axes)
    num_l1_rows = num_n_blocks * sm90_weights.BLOCK_N
    hidden = num_k_blocks * BLOCK_K
    shape = _shape_of(num_experts, hidden, num_l1_rows // 2, "bf16")
    _check_form({"l1_weights": l1, "l2_weights": l2}, sm90_bf16_tensors(shape))

    def read(layer: LayerWeights, num_rows: int, num_columns: int, is_l1: bool) -> LayerWeights:
        weight = layer.weight.new_empty((num_experts, num_rows, num_columns))
        for own, out in zip(layer.weight, weight, strict=True):
            read_expert(own, out, is_l1=is_l1)
        return LayerWeights(weight, no_scales(weight))

    return MegaMoEWeights(
        read(l1, num_l1_rows, hidden, True), read(l2, hidden, num_l1_rows // 2, False)
    )


def sm90_bf16_tensors(shape: MoEShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    from .sm90_bf16_weights import BLOCK_K, BLOCK_VALUES

    num_experts, block_n = shape.num_local_experts, sm90_weights.BLOCK_N
    l1 = (num_experts, 2 * shape.intermediate_hidden // block_n, shape.hidden // BLOCK_K)
    l2 = (num_experts, -(-shape.hidden // block_n), shape.intermediate_hidden // BLOCK_K)
    return {
        "l1_weights[0]": (torch.bfloat16, (*l1, BLOCK_VALUES)),
        "l1_weights[1]": (torch.float32, (num_experts, 0)),
        "l2_weights[0]": (torch.bfloat16, (*l2, BLOCK_VALUES)),
        "l2_weights[1]": (torch.float32, (num_experts, 0)),
    }


def _target_weights(arch: str | None, device: torch.device, weights: str) -> TargetWeights:
    target = target_of_device(device) if arch is None else target_of(arch)
    return target.weights_of(weights)


def _shape_of(
    num_experts: int, hidden: int, intermediate_hidden: int, weights: str = DEFAULT_WEIGHTS
) -> MoEShape:
    """A shape whose one rank has these weights."""
    return MoEShape(
        num_ranks=1,
        num_experts=num_experts,
        num_topk=1,
        hidden=hidden,
        intermediate_hidden=intermediate_hidden,
        num_max_tokens_per_rank=1,
        weights=weights,
    )


def _empty_weights(
    on_target: TargetWeights, shape: MoEShape, device: torch.device
) -> MegaMoEWeights:
    w1, sf1, w2, sf2 = (
        torch.empty(size, dtype=dtype, device=device)
        for dtype, size in on_target.tensors(shape.padded).values()
    )
    return MegaMoEWeights(LayerWeights(w1, sf1), LayerWeights(w2, sf2))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _check_out(
    out: MegaMoEWeights, sources: tuple[Pair, Pair], on_target: TargetWeights, shape: MoEShape
) -> None:
    """Raise unless `out` is what `on_target` makes, in memory of its own."""
    _check_form({"out[0]": out.l1, "out[1]": out.l2}, on_target.tensors(shape.padded))
    device = sources[0][0].device
    written = {f"out[{i}][{j}]": out[i][j] for i in range(2) for j in range(2)}
    for name, tensor in written.items():
        if tensor.device != device:
            raise ValueError(
                f"{name} must be on {device}, as l1_weights[0] is; got {tensor.device}"
            )
        if tensor.data_ptr() % _ALIGNMENT:
            raise ValueError(
                f"{name} must start at a multiple of {_ALIGNMENT} bytes; got {tensor.data_ptr():#x}"
            )
    names = ("l1_weights", "l2_weights")
    read = {f"{names[i]}[{j}]": sources[i][j] for i in range(2) for j in range(2)}
    refuse_shared_memory(written, read)


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
    _check_memory(pairs)


def _check_memory(pairs: Mapping[str, LayerWeights]) -> None:
    for name, pair in pairs.items():
        for i, tensor in enumerate(pair):
            check_memory(f"{name}[{i}]", tensor)


def _sizes(name: str, tensor: torch.Tensor, axes: str) -> tuple[int, ...]:
    """The tensor's shape, or an error if it has not these axes."""
    if tensor.dim() != axes.count(",") + 1:
        raise ValueError(f"{name} must have shape {axes}; got {tuple(tensor.shape)}")
    return tuple(tensor.shape)
