"""One symmetric buffer for all layers of the same sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from deep_moe.fused.buffer import SymmBuffer, get_symm_buffer_for_mega_moe

from .kept_by_group import KeptByGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName

_SMALLEST = 32  # tokens


class LayerSizes(NamedTuple):
    """What a buffer is made for, beside the number of tokens; names as in `MoEShape`. num_experts:
    of all ranks. weights: their format. num_pool_tokens: bounds the pool, None for the worst case.
    token_format: of tokens.
    """

    num_experts: int
    num_topk: int
    hidden: int
    intermediate_hidden: int
    weights: WeightsName
    token_format: TokenFormatName
    biases: bool = False
    num_pool_tokens: int | None = None


def with_index(device: torch.device) -> torch.device:
    """The current GPU by its number: one process may have a model's layers on several."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class SharedBuffers(KeptByGroup[SymmBuffer]):
    """Buffers by group, device and sizes. One grows when a call brings more tokens than it holds:
    to the next power of two, so that this happens seldom."""

    def buffer(
        self,
        group: ProcessGroup | None,
        device: torch.device,
        sizes: LayerSizes,
        num_tokens: int,
    ) -> SymmBuffer:
        """A buffer for at least `num_tokens` tokens per rank. Every rank of `group` must call this
        with the same arguments, in the same order as the others: where the buffer has to be made
        or made anew, ranks meet."""
        device = with_index(device)
        self._close_those_of_destroyed_groups()
        key = (group, device, sizes)
        found = self._kept.get(key)
        if found is not None and found.shape.num_max_tokens_per_rank >= num_tokens:
            return found
        if found is not None:
            # Before the larger one, so that there are never both. No rank is still at work on it
            # once all have come here.
            found.reset()
            found.close()
            del self._kept[key]
        capacity = max(_SMALLEST, 1 << max(num_tokens - 1, 0).bit_length())
        # Tensors that are made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            made = get_symm_buffer_for_mega_moe(
                group,
                sizes.num_experts,
                capacity,
                sizes.num_topk,
                sizes.hidden,
                sizes.intermediate_hidden,
                weights=sizes.weights,
                biases=sizes.biases,
                num_pool_tokens=sizes.num_pool_tokens,
                token_format=sizes.token_format,
                device=device,
            )
        self._kept[key] = made
        return made
