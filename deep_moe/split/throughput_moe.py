"""`ThroughputMoE`: one layer by the throughput path, dispatch, experts and combine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.activations import DEFAULT_ACTIVATION, Activation
from deep_moe.described import described_as
from deep_moe.fused.buffer import device_for, ranks_of
from deep_moe.fused.checks import require_type
from deep_moe.fused.closing import Closing
from deep_moe.heuristics.shape import require_int
from deep_moe.heuristics.throughput import ThroughputShape
from deep_moe.weights import DEFAULT_WEIGHTS
from deep_moe.weights.layers import MegaMoEWeights

from .grouped_experts import GroupedExperts
from .profile import DumpsTraces
from .quantized_rows import Unrouted, quantize_rows, unrouted
from .throughput import AllToAll, AllToAllHandle, Received

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self

    from deep_moe.activations import ActivationName
    from deep_moe.heuristics.low_latency import Step
    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName

# Experts take rows from anywhere, so there need be no padding between those of two.
EXPERT_ALIGNMENT = 1


def most_rows(num_ranks: int, max_tokens_per_rank: int, num_topk: int) -> int:
    """That the experts of a rank can get: every slot of every token.

    >>> most_rows(8, 4096, 8)
    262144
    """
    sizes = {
        "num_ranks": num_ranks,
        "max_tokens_per_rank": max_tokens_per_rank,
        "num_topk": num_topk,
    }
    for name, value in sizes.items():
        require_int(name, value, "at least 1")
    return num_ranks * max_tokens_per_rank * num_topk


@described_as(AllToAll, GroupedExperts)
class ThroughputMoE(DumpsTraces, Closing):
    """An `AllToAll` and the `GroupedExperts` of its rank, as one layer for many tokens.

    Other arguments and errors are as of `AllToAll` and `GroupedExperts`.

    Args:
        max_recv_rows: most rows that the experts of a rank get in one call, for which there is
            memory. With more every rank gets a MegaMoEError, on a GPU at its next call or
            `check()`, and `reset()` is needed. By default as many as can come: ranks *
            max_tokens_per_rank * num_topk.
        token_format: format in which tokens travel, with the choices and defaults of
            `GroupedExperts`.
        quantize_behind: whether tokens travel as bfloat16 and are quantized to token_format where
            their experts are. Results have the same bits; the links carry twice the bytes.
        device: as of both.
        num_sms: as of both.
        arch: as of both.
        timeout_s: as of both.
        checked: as of both.
        schedule_seed: as of both.

    Every rank of the group makes one, with the same arguments, and all call it in the same order.
    The experts write their rows where other ranks fetch them, so nothing is copied in between.
    Routing weights are applied in the combine, to rows rounded to BF16. The host waits for nothing,
    and calls may be captured in a CUDA graph after one outside.

    Attributes:
        all_to_all: the `AllToAll`.
        experts: the `GroupedExperts`.
    """

    all_to_all: AllToAll
    experts: GroupedExperts

    def __init__(
        self,
        group: ProcessGroup | None,
        max_tokens_per_rank: int,
        hidden: int,
        intermediate_hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        max_recv_rows: int | None = None,
        weights: WeightsName = DEFAULT_WEIGHTS,
        biases: bool = False,
        token_format: TokenFormatName | None = None,
        quantize_behind: bool = False,
        activation: ActivationName | Activation = DEFAULT_ACTIVATION,
        activation_clamp: float | None = None,
        fast_math: bool = True,
        num_pool_tokens: int | None = None,
        overrides: Mapping[str, int] | None = None,
        device: torch.device | str | int | None = None,
        num_sms: int | None = None,
        arch: str | None = None,
        timeout_s: float | None = None,
        checked: bool | None = None,
        schedule_seed: int = 0,
        enable_profiling: bool = False,
    ) -> None:
        of_both: dict[str, Any] = {
            "num_sms": num_sms,
            "arch": arch,
            "timeout_s": timeout_s,
            "checked": checked,
            "schedule_seed": schedule_seed,
        }
        require_type("quantize_behind", quantize_behind, bool, "a bool")
        num_ranks = ranks_of(group)
        if max_recv_rows is None:
            max_recv_rows = most_rows(num_ranks, max_tokens_per_rank, num_topk)
        shape = ThroughputShape(  # or an error, before anything is made
            num_ranks, num_experts, num_topk, hidden, max_tokens_per_rank, max_recv_rows
        )
        self.experts = GroupedExperts(
            max_recv_rows,
            hidden,
            intermediate_hidden,
            shape.num_experts_per_rank,
            weights=weights,
            biases=biases,
            token_format=token_format,
            activation=activation,
            activation_clamp=activation_clamp,
            fast_math=fast_math,
            num_pool_tokens=num_pool_tokens,
            overrides=overrides,
            device=device_for(group, device),
            **of_both,
        )
        try:
            self.all_to_all = AllToAll(
                group,
                max_tokens_per_rank,
                hidden,
                num_experts,
                num_topk,
                max_recv_rows,
                expert_alignment=EXPERT_ALIGNMENT,
                token_format="bf16" if quantize_behind else self.experts.token_format,
                device=device,
                enable_profiling=enable_profiling,
                **of_both,
            )
            self._behind = self._quantized_rows() if quantize_behind else None
        except BaseException:
            self.experts.close()
            raise

    @classmethod
    def over(cls, all_to_all: AllToAll, intermediate_hidden: int, **experts: Any) -> Self:
        """On an all-to-all that is there, as those of `EmulatedThroughputAllToAll`, whose tokens
        travel in a format that experts with these weights take.

        Args:
            all_to_all: one that is there.
            intermediate_hidden: as of `GroupedExperts`.
            experts: further arguments of `GroupedExperts`.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a value, shape, dtype or device that is not allowed; the
                text names it.
        """
        shape = all_to_all.shape
        layer = cls.__new__(cls)
        layer.all_to_all = all_to_all
        layer._behind = None
        layer.experts = GroupedExperts(
            shape.max_recv_rows,
            shape.hidden,
            intermediate_hidden,
            shape.num_experts_per_rank,
            token_format=all_to_all.token_format,
            device=all_to_all.device,
            **experts,
        )
        return layer

    def _quantized_rows(self) -> tuple[torch.Tensor, torch.Tensor, Unrouted] | None:
        """Room for received rows as the experts take them; None where that is bfloat16."""
        tokens, shape = self.experts.tokens, self.all_to_all.shape
        dtype = tokens.scale_torch_dtype
        if not tokens.has_scales or dtype is None:
            return None
        if not tokens.is_of_all_to_alls:
            raise ValueError(
                "quantize_behind must be False for a token_format with a scale for each token; "
                f"got True for {tokens.name!r}"
            )
        device, num_rows = self.all_to_all.device, shape.max_recv_rows
        num_words = tokens.num_scale_words(shape.hidden)
        values = torch.zeros((num_rows, shape.hidden), dtype=torch.uint8, device=device)
        scales = torch.zeros((num_rows, num_words), dtype=dtype, device=device)
        return values.view(tokens.dtype), scales, unrouted(num_rows, 1, device)

    def __repr__(self) -> str:
        return f"ThroughputMoE({self.all_to_all!r}, {self.experts!r})"

    @property
    def nbytes(self) -> int:
        """Symmetric memory and work space."""
        return self.all_to_all.nbytes + self.experts.nbytes

    @described_as(errors_of=AllToAll.dispatch)
    def __call__(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        weights: MegaMoEWeights,
        *,
        x_sf: torch.Tensor | None = None,
        l1_bias: torch.Tensor | None = None,
        l2_bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        masked_ranks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One MoE layer over all ranks: bfloat16 [tokens, hidden].

        x, x_sf, topk_idx: as of `AllToAll.dispatch`; tokens may be 0 and may differ between ranks,
        and -1 is a slot that is not used. topk_weights: float32 [tokens, topk]. weights,
        l1_bias, l2_bias: this rank's experts, as of `GroupedExperts`.
        out: where to write the result, by default a new tensor. masked_ranks, errors: as of
        `AllToAll.dispatch`.
        """
        received, handle = self.dispatch(x, topk_idx, x_sf=x_sf, masked_ranks=masked_ranks)
        y = self.compute(received, weights, l1_bias=l1_bias, l2_bias=l2_bias)
        return self.combine(y, handle, topk_weights, out=out, masked_ranks=masked_ranks)

    # The steps of a call, each of which comes once and in this order.

    @described_as(AllToAll.dispatch)
    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        *,
        x_sf: torch.Tensor | None = None,
        masked_ranks: torch.Tensor | None = None,
    ) -> tuple[Received, AllToAllHandle]:
        """The tokens of this rank's experts.

        Arguments and errors are as of `AllToAll.dispatch`.
        """
        return self.all_to_all.dispatch(x, topk_idx, x_sf=x_sf, masked_ranks=masked_ranks)

    @described_as(GroupedExperts.__call__)
    def compute(
        self,
        received: Received,
        weights: MegaMoEWeights,
        *,
        l1_bias: torch.Tensor | None = None,
        l2_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the experts make of them, in the memory from which `combine` fetches it.

        Errors are as of `GroupedExperts`.

        Args:
            received: what `dispatch` returned.
            weights: this rank's experts, transformed.
            l1_bias: transformed biases of Linear1, where there are some.
            l2_bias: those of Linear2.
        """
        require_type("received", received, Received, "what a dispatch returned")
        x, scales = received.x, received.x_sf
        if self._behind is not None:
            values, own_scales, scratch = self._behind
            arch = self.all_to_all.settings.arch
            quantize_rows(x, self.experts.tokens, values, own_scales, scratch, arch, packs=True)
            x, scales = values, own_scales
        return self.experts(
            x,
            scales,
            weights,
            received.expert_count,
            received.expert_begin,
            self.all_to_all.get_combine_buffer(),
            l1_bias=l1_bias,
            l2_bias=l2_bias,
        )

    @described_as(AllToAll.combine)
    def combine(
        self,
        y: torch.Tensor,
        handle: AllToAllHandle,
        topk_weights: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        masked_ranks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The weighted sums of the rows, bfloat16 [tokens, hidden].

        Other arguments and errors are as of `AllToAll.combine`.

        Args:
            y: what `compute` returned.
            handle: what `dispatch` returned.
            topk_weights: float32 [tokens, topk].
        """
        return self.all_to_all.combine(
            y, handle, topk_weights=topk_weights, out=out, masked_ranks=masked_ranks
        )

    def _dump_trace(self, step: Step, path: str | Path) -> None:
        self.all_to_all.dump_trace(step, path, self.all_to_all.rank)

    def check(self) -> None:
        """Raise what the last kernels reported, if one gave up. Does not wait for a GPU.

        Raises:
            MegaMoEError: the last kernel gave up; the text says why.
            ValueError: the object was closed.
        """
        self.all_to_all.check()
        self.experts.check()

    def reset(self, group: ProcessGroup | None = None) -> None:
        """Make the layer usable again after a failed call. Every rank of the group must call this;
        it returns when all have.

        Args:
            group: as of `AllToAll.reset`.
        """
        self.experts.reset()
        self.all_to_all.reset(group)

    def close(self) -> None:
        """Give the memory back. The layer cannot be used after this."""
        self.all_to_all.close()
        self.experts.close()
