"""Biases of both linear layers, from the form of checkpoints to the form that a kernel loads.

On the device they are float32 whatever the caller has: [E, n-blocks of 256 rows, 256], each block's
rows in the order in which the target's epilogues have them with weights of that format, zeros
behind the last row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from deep_moe.heuristics.shape import MAX_SIZE, require_int
from deep_moe.targets import TargetWeights, target_for
from deep_moe.tensor_memory import check_dense, check_memory

if TYPE_CHECKING:
    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName

BLOCK_ROWS = 256

_DTYPES = (torch.float32, torch.bfloat16)


class MegaMoEBiases(NamedTuple):
    """Biases of the local experts, of both layers. What the tensors hold after the transformation
    depends on the architecture and on the format of the weights.

    Attributes:
        l1: of Linear1.
        l2: of Linear2.
    """

    l1: torch.Tensor
    l2: torch.Tensor


def transform_biases_for_mega_moe(
    l1_bias: torch.Tensor,
    l2_bias: torch.Tensor,
    arch: str | None = None,
    *,
    weights: WeightsName,
    token_format: TokenFormatName | None = None,
) -> MegaMoEBiases:
    """Lay out biases for the kernel, once, after loading, as new float32 tensors.

    Args:
        l1_bias: float32 or bfloat16 [E, 2*I], gate 0..I-1, then up 0..I-1.
        l2_bias: the same [E, H].
        arch: the target; by default that of the tensors' device, sm_100a for tensors on the CPU.
        weights: the format of the weights that they go with. The order of rows depends on it, and a
            call cannot tell for which format biases were laid out: so there is no default.
        token_format: that of the tokens, on which the order of rows depends, too; by default the
            one that goes with the weights.

    The result is what calls take as `l1_bias` and `l2_bias`. ValueError names expert and row of a
    bias that is no finite number.

    Examples:
        >>> given = torch.zeros(4, 2 * 128), torch.zeros(4, 384)
        >>> l1, l2 = transform_biases_for_mega_moe(*given, weights="mxfp4")
        >>> l1.shape, l2.shape
        (torch.Size([4, 1, 256]), torch.Size([4, 2, 256]))

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    check_biases(l1_bias, l2_bias)
    l1_bias, l2_bias = l1_bias.detach(), l2_bias.detach()
    target = target_for(arch, l1_bias.device).weights_of(weights, token_format)
    for name, bias in (("l1_bias", l1_bias), ("l2_bias", l2_bias)):
        _check_finite(name, bias)
    return MegaMoEBiases(
        _laid_out(l1_bias, target, is_l1=True), _laid_out(l2_bias, target, is_l1=False)
    )


def inverse_transform_biases(
    l1_bias: torch.Tensor,
    l2_bias: torch.Tensor,
    *,
    hidden: int,
    intermediate_hidden: int,
    arch: str | None = None,
    weights: WeightsName,
    token_format: TokenFormatName | None = None,
) -> MegaMoEBiases:
    """Give back what `transform_biases_for_mega_moe` was given, as new float32 tensors [E, 2*I] and
    [E, H].

    Args:
        l1_bias: what `transform_biases_for_mega_moe` returned for Linear1.
        l2_bias: what it returned for Linear2.
        hidden: H.
        intermediate_hidden: I.
        arch: as there.
        weights: as there.
        token_format: as there.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    for name, bias in (("l1_bias", l1_bias), ("l2_bias", l2_bias)):
        if not isinstance(bias, torch.Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(bias).__name__}")
        check_dense(name, bias)
    for name, size in (("hidden", hidden), ("intermediate_hidden", intermediate_hidden)):
        if not 1 <= require_int(name, size, "at least 1") < MAX_SIZE:
            raise ValueError(f"{name} must be at least 1 and below 2^31; got {size}")
    target = target_for(arch, l1_bias.device).weights_of(weights, token_format)
    num_rows = {"l1_bias": 2 * intermediate_hidden, "l2_bias": hidden}
    rows = []
    for (name, number), bias in zip(num_rows.items(), (l1_bias, l2_bias), strict=True):
        is_l1 = name == "l1_bias"
        num_experts = bias.shape[0] if bias.ndim else 0
        expected = (num_experts, *bias_blocks(number))
        if tuple(bias.shape) != expected or bias.dtype != torch.float32 or not num_experts:
            raise ValueError(
                f"{name} must be float32 of shape {expected}, as transform_biases_for_mega_moe "
                f"makes it; got {bias.dtype} {tuple(bias.shape)}"
            )
        check_memory(name, bias)
        in_order = torch.empty_like(bias).flatten(1)
        order = _order(target, in_order.shape[1], bias.device, is_l1=is_l1)
        in_order[:, order] = bias.detach().flatten(1)
        rows.append(_parts(in_order, number, is_l1=is_l1).flatten(1).contiguous())
    return MegaMoEBiases(*rows)


def check_biases(l1_bias: object, l2_bias: object) -> tuple[int, int, int]:
    """(experts, hidden, intermediate) of biases as checkpoints have them, or an error."""
    for name, bias, axes in (("l1_bias", l1_bias, "[E, 2*I]"), ("l2_bias", l2_bias, "[E, H]")):
        if not isinstance(bias, torch.Tensor):
            raise TypeError(f"{name} must be a tensor {axes}; got {type(bias).__name__}")
        check_dense(name, bias)
        if bias.dtype not in _DTYPES:
            raise TypeError(f"{name} must be float32 or bfloat16; got {bias.dtype}")
        if bias.dim() != 2 or 0 in bias.shape:
            raise ValueError(f"{name} must have shape {axes}; got {tuple(bias.shape)}")
    assert isinstance(l1_bias, torch.Tensor)
    assert isinstance(l2_bias, torch.Tensor)
    if l1_bias.shape[1] % 2:
        raise ValueError(f"l1_bias must have shape [E, 2*I]; got {tuple(l1_bias.shape)}")
    if l2_bias.shape[0] != l1_bias.shape[0]:
        raise ValueError(
            f"l2_bias must be of the {l1_bias.shape[0]} experts of l1_bias; got {l2_bias.shape[0]}"
        )
    if l2_bias.device != l1_bias.device:
        raise ValueError(f"l2_bias must be on {l1_bias.device} like l1_bias; got {l2_bias.device}")
    check_memory("l1_bias", l1_bias)
    check_memory("l2_bias", l2_bias)
    return l1_bias.shape[0], l2_bias.shape[1], l1_bias.shape[1] // 2


def bias_blocks(num_rows: int) -> tuple[int, int]:
    """How many blocks the biases of so many rows take, and the rows of a block. Of Linear1, gate
    and up are each padded to a multiple of 128.

    >>> bias_blocks(2 * 2880), bias_blocks(2880)
    ((23, 256), (12, 256))
    """
    return -(-num_rows // BLOCK_ROWS), BLOCK_ROWS


def _parts(rows: torch.Tensor, num_rows: int, *, is_l1: bool) -> torch.Tensor:
    """Of padded rows [E, N] a view of those that there are: gate and up, or one part."""
    num_parts = 2 if is_l1 else 1
    return rows.unflatten(1, (num_parts, -1))[..., : num_rows // num_parts]


def _laid_out(bias: torch.Tensor, target: TargetWeights, *, is_l1: bool) -> torch.Tensor:
    blocks = bias_blocks(bias.shape[1])
    rows = torch.zeros(
        (bias.shape[0], blocks[0] * blocks[1]), dtype=torch.float32, device=bias.device
    )
    _parts(rows, bias.shape[1], is_l1=is_l1).copy_(bias.unflatten(1, (2 if is_l1 else 1, -1)))
    order = _order(target, rows.shape[1], bias.device, is_l1=is_l1)
    return rows[:, order].unflatten(1, blocks)


def _order(
    target: TargetWeights, num_rows: int, device: torch.device, *, is_l1: bool
) -> torch.Tensor:
    return target.bias_order(num_rows, is_l1=is_l1).to(device)


def _check_finite(name: str, bias: torch.Tensor) -> None:
    is_wrong = ~bias.isfinite()
    if bool(is_wrong.any()):
        expert_idx, row = is_wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: expert {expert_idx}, row {row} must be a finite number; got "
            f"{bias[expert_idx, row].item()}"
        )
