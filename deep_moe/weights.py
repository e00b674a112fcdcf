"""Expert weights, from the layout of checkpoints to the layout that a kernel loads.

A layer's weights are a pair (packed E2M1 int8 [E, N, K/2], UE8M0 scales int32 [E, N, K/128]) with E
the local experts. For SM100 the rows of gate and up alternate in runs of 8, so that a tile of the
accumulator holds matching pairs, and scales lie MN-major with the rows of each 128 in the order
that one `tcgen05.cp` spreads over tensor memory. For SM90 see weights_sm90.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from deep_moe.heuristics.shape import MoEShape

from . import weights_sm90

GATE_UP_RUN = 8  # consecutive rows of gate, then of up
SF_BLOCK = 128  # rows whose scales are permuted among themselves


class LayerWeights(NamedTuple):
    """Weights of one linear layer of all local experts, with their scales. What the tensors hold
    after the transformation depends on the architecture."""

    weight: torch.Tensor
    sf: torch.Tensor


class MegaMoEWeights(NamedTuple):
    """Both linear layers."""

    l1: LayerWeights
    l2: LayerWeights


Pair = tuple[torch.Tensor, torch.Tensor]


def transform_weights_for_mega_moe(
    l1_weights: Pair, l2_weights: Pair, arch: str | None = None
) -> MegaMoEWeights:
    """Lay out weights for the kernel, once, after loading. The results are new tensors: the sources
    may be freed.

    l1_weights: (int8 [E, 2*I, H/2], int32 [E, 2*I, H/128]), rows gate 0..I-1, then up 0..I-1.
    l2_weights: (int8 [E, H, I/2], int32 [E, H, I/128]).
    arch: the target; by default that of the tensors' device, sm_100a for tensors on the CPU.

    Every weight keeps its exact value. For sm_90a, a row whose scales differ by more than 2^26 is a
    ValueError that names expert and row.
    """
    l1, l2 = LayerWeights(*l1_weights), LayerWeights(*l2_weights)
    _check_weights(l1, l2)
    return _layout_of(arch, l1.weight.device).transform(l1, l2)


def inverse_transform_weights(
    l1_weights: Pair, l2_weights: Pair, arch: str | None = None
) -> MegaMoEWeights:
    """Give back what `transform_weights_for_mega_moe` was given, as new tensors. For sm_90a, groups
    of zeros may have got another scale."""
    l1, l2 = LayerWeights(*l1_weights), LayerWeights(*l2_weights)
    return _layout_of(arch, l1.weight.device).inverse(l1, l2)


def weight_arch(device: torch.device) -> str:
    """The architecture of `device`: what weights on it are laid out for, and what calls on it run,
    when the caller names none. A CPU emulates sm_100a."""
    if device.type != "cuda":
        return "sm_100a"
    major, minor = torch.cuda.get_device_capability(device)
    return {(9, 0): "sm_90a", (10, 0): "sm_100a"}.get((major, minor), f"sm_{major}{minor}")


def interleave_gate_up(rows: torch.Tensor) -> torch.Tensor:
    """[E, 2*I, ...] with gate rows before up rows, to runs of 8 in turn. A copy."""
    num_runs = rows.shape[1] // (2 * GATE_UP_RUN)
    runs = rows.unflatten(1, (2, num_runs, GATE_UP_RUN)).transpose(1, 2)
    return _copy(runs).reshape(rows.shape)


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


def _sm100_transform(l1: LayerWeights, l2: LayerWeights) -> MegaMoEWeights:
    return MegaMoEWeights(
        LayerWeights(interleave_gate_up(l1.weight), permute_sf_rows(interleave_gate_up(l1.sf))),
        LayerWeights(_copy(l2.weight), permute_sf_rows(l2.sf)),
    )


def _sm100_inverse(l1: LayerWeights, l2: LayerWeights) -> MegaMoEWeights:
    return MegaMoEWeights(
        LayerWeights(separate_gate_up(l1.weight), separate_gate_up(restore_sf_rows(l1.sf))),
        LayerWeights(_copy(l2.weight), restore_sf_rows(l2.sf)),
    )


def _sm100_tensors(shape: MoEShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    num_experts, hidden = shape.num_experts_per_rank, shape.hidden
    intermediate = shape.intermediate_hidden
    return {
        "l1_weights[0]": (torch.int8, (num_experts, 2 * intermediate, hidden // 2)),
        "l1_weights[1]": (torch.int32, (num_experts, hidden // 128, 2 * intermediate)),
        "l2_weights[0]": (torch.int8, (num_experts, hidden, intermediate // 2)),
        "l2_weights[1]": (torch.int32, (num_experts, intermediate // 128, hidden)),
    }


def _sm90_transform(l1: LayerWeights, l2: LayerWeights) -> MegaMoEWeights:
    return MegaMoEWeights(
        LayerWeights(*weights_sm90.shuffle_layer(*l1, name="l1_weights", is_l1=True)),
        LayerWeights(*weights_sm90.shuffle_layer(*l2, name="l2_weights", is_l1=False)),
    )


def _sm90_inverse(l1: LayerWeights, l2: LayerWeights) -> MegaMoEWeights:
    num_l1_rows = l1.weight.shape[1] * weights_sm90.BLOCK_N
    hidden = l1.weight.shape[2] * weights_sm90.BLOCK_K
    return MegaMoEWeights(
        LayerWeights(*weights_sm90.unshuffle_layer(*l1, num_rows=num_l1_rows, is_l1=True)),
        LayerWeights(*weights_sm90.unshuffle_layer(*l2, num_rows=hidden, is_l1=False)),
    )


def _sm90_tensors(shape: MoEShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    num_experts = shape.num_experts_per_rank
    block_n, block_k = weights_sm90.BLOCK_N, weights_sm90.BLOCK_K
    num_l1_n_blocks = 2 * shape.intermediate_hidden // block_n
    num_l2_n_blocks = -(-shape.hidden // block_n)
    l1 = (num_experts, num_l1_n_blocks, shape.hidden // block_k, weights_sm90.BLOCK_BYTES)
    l2 = (num_experts, num_l2_n_blocks, shape.intermediate_hidden // block_k, l1[-1])
    return {
        "l1_weights[0]": (torch.int8, l1),
        "l1_weights[1]": (torch.float32, (num_experts, num_l1_n_blocks, block_n)),
        "l2_weights[0]": (torch.int8, l2),
        "l2_weights[1]": (torch.float32, (num_experts, num_l2_n_blocks, block_n)),
    }


@dataclass(frozen=True)
class WeightLayout:
    """How one architecture wants its weights. tensors: dtype and shape of what one rank's
    transformation gives, by the names that a call knows them by."""

    transform: Callable[[LayerWeights, LayerWeights], MegaMoEWeights]
    inverse: Callable[[LayerWeights, LayerWeights], MegaMoEWeights]
    tensors: Callable[[MoEShape], dict[str, tuple[torch.dtype, tuple[int, ...]]]]


WEIGHT_LAYOUTS: dict[str, WeightLayout] = {
    "sm_100a": WeightLayout(_sm100_transform, _sm100_inverse, _sm100_tensors),
    "sm_90a": WeightLayout(_sm90_transform, _sm90_inverse, _sm90_tensors),
}


def _layout_of(arch: str | None, device: torch.device) -> WeightLayout:
    name = weight_arch(device) if arch is None else arch
    if name not in WEIGHT_LAYOUTS:
        raise ValueError(f"arch must be one of {', '.join(WEIGHT_LAYOUTS)}; got {name!r}")
    return WEIGHT_LAYOUTS[name]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _check_weights(l1: LayerWeights, l2: LayerWeights) -> None:
    num_experts, intermediate, hidden = _check_layer("l1_weights", l1, "[E, 2*I, H/2]")
    if intermediate % 256:
        raise ValueError(
            "l1_weights[0] must have 2*I rows with I a multiple of 128; "
            f"got shape {tuple(l1.weight.shape)}"
        )
    _check_layer("l2_weights", l2, "[E, H, I/2]")
    expected = (num_experts, hidden, intermediate // 4)
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


def _check_layer(name: str, layer: LayerWeights, axes: str) -> tuple[int, int, int]:
    """(experts, rows, values per row) of a layer, or an error that names the tensor."""
    weight, sf = layer
    if weight.dtype != torch.int8:
        raise TypeError(f"{name}[0] must be int8, two E2M1 values per byte; got {weight.dtype}")
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
