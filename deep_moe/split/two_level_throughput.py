"""`TwoLevelAllToAll`: the all-to-all for many tokens over several NVLink domains.

Between domains `torch.distributed` moves rows; inside each of them the kernels of `AllToAll` do the
rest. docs/two-level.md says how.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from deep_moe.described import described_as
from deep_moe.fused.checks import check_tensor, refuse_gradients, require_type
from deep_moe.heuristics.throughput import MAX_TOKENS_PER_RANK

from .domain_groups import (
    NUM_TRANSPORT_SMS,
)
from .domain_relay import RelayedCall
from .domain_transport import TransportName
from .handle import own_handle
from .split_layer import name_of_dtype
from .throughput import GIVEN_FORMATS, AllToAll, AllToAllHandle, Received
from .two_level_layer import TwoLevelLayer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.tokens import TokenFormatName

_FORMATS = (*GIVEN_FORMATS, "bf16")


@dataclass(frozen=True, eq=False, repr=False)
class TwoLevelHandle(AllToAllHandle):
    """inside: of the all-to-all of the domain, whose places are those of this one, too."""

    inside: AllToAllHandle
    relayed: RelayedCall


@described_as(AllToAll)
class TwoLevelAllToAll(TwoLevelLayer):
    """`AllToAll` whose ranks are in several NVLink domains: the same calls with the same results,
    over the ranks of all domains.

    Other arguments and errors are as of `AllToAll`.

    Args:
        domain_group: as of `TwoLevelMoE`.
        cross_group: as of `TwoLevelMoE`.
        max_tokens_per_rank: most own tokens of one call.
        num_experts: of all domains together: domain d owns the d-th part, and its rank r the r-th
            part of that. Each domain has at least num_topk.
        max_recv_rows: as of `AllToAll`; more are an error on the ranks of that domain.
        token_format: as of `AllToAll`, but for "fp8_128_ue8m0"; so tokens travel between domains,
            too.
        num_max_foreign_tokens: as of `TwoLevelLowLatencyAllToAll`. Own and foreign tokens together
            are at most 32,768.
        num_transport_sms: as of `TwoLevelLowLatencyAllToAll`.
        transport: as of `TwoLevelMoE`.
        num_sms: as of `TwoLevelLowLatencyAllToAll`.
        timeout_s: as of `TwoLevelLowLatencyAllToAll`.

    Ranks, sizes between domains and roundings are those of `TwoLevelLowLatencyAllToAll`.

    Attributes:
        rank: of this process among the ranks of all domains.
        nbytes: what this rank gives to the layer.
    """

    _most_tokens = "max_tokens_per_rank"
    _inside: AllToAll

    def __init__(
        self,
        domain_group: ProcessGroup | None,
        cross_group: ProcessGroup | None,
        max_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_topk: int,
        max_recv_rows: int,
        *,
        expert_alignment: int = 128,
        token_format: TokenFormatName = "bf16",
        dtype: torch.dtype = torch.bfloat16,
        num_max_foreign_tokens: int | None = None,
        num_transport_sms: int = NUM_TRANSPORT_SMS,
        transport: TransportName = "torch",
        device: torch.device | str | int | None = None,
        num_sms: int | None = None,
        timeout_s: float | None = None,
        arch: str | None = None,
        checked: bool | None = None,
        schedule_seed: int = 0,
        enable_profiling: bool = False,
    ) -> None:
        require_type("token_format", token_format, str, f"one of {', '.join(_FORMATS)}")
        if token_format not in _FORMATS:
            raise ValueError(
                f"token_format must be one of {', '.join(_FORMATS)}; got {token_format!r}"
            )
        self._join(
            AllToAll,
            domain_group,
            cross_group,
            {
                "num_experts": num_experts,
                "num_topk": num_topk,
                "hidden": hidden,
                "num_max_tokens_per_rank": max_tokens_per_rank,
                "num_max_foreign_tokens": num_max_foreign_tokens,
                "token_format": token_format,
                "dtype": name_of_dtype(dtype),
            },
            MAX_TOKENS_PER_RANK,
            max_recv_rows,
            equal={},
            num_transport_sms=num_transport_sms,
            transport=transport,
            device=device,
            num_sms=num_sms,
            timeout_s=timeout_s,
            expert_alignment=expert_alignment,
            dtype=dtype,
            arch=arch,
            checked=checked,
            schedule_seed=schedule_seed,
            enable_profiling=enable_profiling,
        )

    @property
    def token_format(self) -> TokenFormatName:
        """How they travel."""
        return self.shape.token_format

    @described_as(AllToAll.dispatch)
    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        *,
        topk_weights: torch.Tensor | None = None,
        x_sf: torch.Tensor | None = None,
        handle: AllToAllHandle | None = None,
    ) -> tuple[Received, AllToAllHandle]:
        """Send every token to the ranks of its experts, and receive those of the local ones.

        Arguments are as of `AllToAll.dispatch`.

        What is returned is as of `AllToAll.dispatch`. An expert's rows lie by their source rank's
        number in its domain, of those with the same the ones of this domain first, then by token
        and slot.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a value, shape, dtype or device that is not allowed; the
                text names it.
            ForeignTokensError: other domains have more tokens for a rank than it has room for.
            LostDomainError: a domain does not answer.
            MegaMoEError: the kernel gave up, or an earlier call did; `reset()` on every rank makes
                the object usable again. On a GPU the next call raises it.
            MegaMoETimeoutError: a wait took longer than `timeout_s`; the text names what is
                missing. It is a MegaMoEError.
            CompileError: NVRTC refused the kernel.
        """
        self._relay.transport.raise_if_failed()
        if (topk_idx is None) == (handle is None):
            raise ValueError(
                "dispatch must have either topk_idx or the handle of an earlier dispatch; got "
                + ("neither" if handle is None else "both")
            )
        self._check_rows(x, x_sf)
        num_tokens = x.shape[0]
        if topk_weights is not None:
            self._check_weights(topk_weights, num_tokens)
        if torch.is_grad_enabled():
            refuse_gradients(x=x)
        relay = self._relay
        own = None if handle is None else own_handle(handle, TwoLevelHandle, self)
        with torch.no_grad():
            if own is None:
                assert topk_idx is not None
                self._check_routing(topk_idx, num_tokens)
                relayed, arrive = relay.begin(x, topk_idx, topk_weights, x_sf)
            else:
                if num_tokens != own.num_tokens:
                    raise ValueError(
                        "x must have as many tokens as the handle's dispatch "
                        f"({own.num_tokens}); got {num_tokens}"
                    )
                relayed = own.relayed
                arrive = relay.again(relayed, x, topk_weights, x_sf)
            arrive()
            with relay.transport.naming_the_domain():
                received, inside = self._inside.dispatch(
                    relay.x,
                    relayed.topk_idx if own is None else None,
                    topk_weights=None if topk_weights is None else relay.weights_of(relayed),
                    x_sf=relay.x_sf if relay.x_sf.numel() else None,
                    handle=None if own is None else own.inside,
                    masked_ranks=self._mask.inside,
                )
        if own is not None:
            return received, own
        places = replace(inside, layer=self, num_tokens=num_tokens)
        return received, TwoLevelHandle(**vars(places), inside=inside, relayed=relayed)

    @described_as(AllToAll.combine, errors_of=dispatch)
    def combine(
        self,
        y: torch.Tensor,
        handle: AllToAllHandle,
        *,
        topk_weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Bring the experts' rows back and add them: bfloat16 [tokens, hidden].

        Arguments are as of `AllToAll.combine`, errors as of `dispatch`.
        """
        self._relay.transport.raise_if_failed()
        own = own_handle(handle, TwoLevelHandle, self)
        rows = (self._inside.shape.max_recv_rows, self.shape.hidden)
        check_tensor("y", y, self.dtype, rows, self.device)
        if topk_weights is not None:
            self._check_weights(topk_weights, own.num_tokens)
        if torch.is_grad_enabled():
            refuse_gradients(y=y)
        read = {"y": y} if topk_weights is None else {"y": y, "topk_weights": topk_weights}
        out = self._out(out, own.num_tokens, read)
        relay, relayed = self._relay, own.relayed
        with torch.no_grad():
            weights = None
            if topk_weights is not None:
                relay.send_weights(relayed, topk_weights)()
                weights = relay.weights_of(relayed)
            with relay.transport.naming_the_domain():
                self._inside.combine(
                    y,
                    own.inside,
                    topk_weights=weights,
                    out=relay.sums_of(relayed),
                    masked_ranks=self._mask.inside,
                )
            relay.send_back(relayed)()
            return relay.add(relayed, out)

    @described_as(AllToAll.return_scalars, errors_of=dispatch)
    def return_scalars(self, values: torch.Tensor, handle: AllToAllHandle) -> torch.Tensor:
        """Bring a number of each row back to its slot: float32 [tokens, topk], 0 for slots that are
        not used.

        Arguments are as of `AllToAll.return_scalars`, errors as of `dispatch`.
        """
        self._relay.transport.raise_if_failed()
        own = own_handle(handle, TwoLevelHandle, self)
        with torch.no_grad():
            with self._relay.transport.naming_the_domain():
                listed = self._inside.return_scalars(
                    values, own.inside, masked_ranks=self._mask.inside
                )
            return self._relay.add_numbers(own.relayed, listed)

    def get_combine_buffer(self) -> torch.Tensor:
        """As of `AllToAll`."""
        return self._inside.get_combine_buffer()

    def _check_rows(self, x: torch.Tensor, x_sf: torch.Tensor | None) -> None:
        require_type("x", x, torch.Tensor, "a tensor")
        if x.dtype != torch.float8_e4m3fn:
            if x_sf is not None:
                kind = str(x.dtype).removeprefix("torch.")
                raise ValueError(f"x_sf must be None for an x of {kind}; got a tensor")
            self._check_tokens(x, self.dtype)
            return
        dtype = self.shape.tokens.scale_torch_dtype
        if dtype is None:
            raise ValueError(
                f"x must be bfloat16 for token_format {self.token_format!r}; got float8_e4m3fn"
            )
        self._check_tokens(x, torch.float8_e4m3fn)
        require_type("x_sf", x_sf, torch.Tensor, "a tensor for an x of float8_e4m3fn")
        assert x_sf is not None
        check_tensor("x_sf", x_sf, dtype, (x.shape[0], self.shape.num_scale_words), self.device)
