"""Bugs to plant into the layer over several domains; see catalogue.py. Each is noticed by the case
of `deep-moe fuzz` whose values `arguments` names (`test_two_level_mutations.BASE` has the others).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from .catalogue import Mutation, in_module

_LAYER = "deep_moe/split/two_level.py"
_ROUTES = "deep_moe/split/domain_routes.py"
_TRANSPORT = "deep_moe/split/domain_transport.py"
MODULES = (_LAYER, _ROUTES, _TRANSPORT)
_ONE_RANK_EACH = (3, 3, 9, 2, 128, 128)
_FOUR_DOMAINS = (4, 4, 8, 2, 256, 128)


def bug(name: str, file: str, old: str, new: str, **arguments: Any) -> Mutation:
    values = {name.replace("_", " "): value for name, value in arguments.items()}
    return Mutation(name, in_module(file, old, new), "result", arguments=values)


_exact = partial(bug, sizes="exact", chunks=3)
_bounded = partial(bug, room="for half")
TWO_LEVEL_MUTATIONS = (
    # ---- rows that travel
    bug(
        "nobody_stands_behind_the_tokens_but_for_one_row",
        _LAYER,
        "row.ids].view(torch.int32).fill_(-1)",
        "row.ids].view(torch.int32)[:, 1:].fill_(-1)",
        tokens="any",
    ),
    bug(
        "rows_of_the_first_domain_sent_alone",
        _LAYER,
        "sizes.num_chunks == sizes.num_other_domains == 1",
        "sizes.num_chunks == 1",
        shape=_ONE_RANK_EACH,
    ),
    bug(
        "routing_weights_not_sent",
        _LAYER,
        "        self._field(rows, row.weights, torch.float32).copy_(staged.topk_weights[own])\n",
        "",
    ),
    bug(
        "own_tokens_of_each_chunk_are_the_first_ones",
        _LAYER,
        "slice(end - begin), slice(begin, end)",
        "slice(end - begin), slice(end - begin)",
        chunks=3,
    ),
    bug(
        "rows_not_awaited",
        _LAYER,
        "            arrive()\n            y = self",
        "            y = self",
    ),
    _bounded(
        "nobody_names_expert_0",
        _LAYER,
        "        self._field(self._rows, row.ids, torch.int32)[-1] = -1\n",
        "",
        tokens="none, 1 or most",
    ),
    bug("unused_slots_name_expert_0", _ROUTES, "clamp(-1, num_experts)", "clamp(0, num_experts)"),
    # ---- which tokens go where
    _exact(
        "tokens_of_unused_slots_travel",
        _ROUTES,
        "(topk_idx >= 0) & (topk_idx < shape.num_experts)",
        "topk_idx < shape.num_experts",
        room="for half",
        slots="none to one domain",
    ),
    _bounded(
        "the_last_row_of_a_domain_stays_empty",
        _ROUTES,
        "position <= shape.num_pair_rows",
        "position < shape.num_pair_rows",
    ),
    _exact(
        "chunks_are_cut_at_two_places",
        _ROUTES,
        "    size = -(-num_tokens // num_chunks)\n    missing",
        "    size = num_tokens // num_chunks + 1\n    missing",
        tokens="many",
    ),
    _exact(
        "sizes_sent_and_received_change_places",
        _LAYER,
        "[table[d][chunk] for d in range(shape.num_domains)],\n"
        "                [table[shape.num_domains + d][chunk]",
        "[table[shape.num_domains + d][chunk] for d in range(shape.num_domains)],\n"
        "                [table[d][chunk]",
        tokens="one rank has none",
    ),
    # ---- partial sums
    bug(
        "sums_of_own_tokens_sent_back",
        _LAYER,
        "y[y.shape[0] - num_foreign :].view",
        "y[:num_foreign].view",
    ),
    bug(
        "sums_of_every_chunk_at_one_place",
        _LAYER,
        "        first = chunk * sizes.num_chunk_rows\n        return",
        "        first = 0\n        return",
        chunks=2,
    ),
    bug("sums_not_awaited", _LAYER, "                come_back()\n", "                pass\n"),
    _exact(
        "shared_experts_leave_no_room_for_a_sum",
        _ROUTES,
        "num_sums = shape.num_topk + shape.is_own_apart",
        "num_sums = shape.num_topk",
        shape=_FOUR_DOMAINS,
        shared_experts=1,
        slots="all",
    ),
    # ---- tokens without room
    _bounded(
        "ranks_of_the_domain_are_not_told",
        _TRANSPORT,
        "self._num_rounds * (self._groups.cross, self._groups.domain):",
        "self._num_rounds * (self._groups.cross,):",
    ),
    _bounded(
        "calls_are_refused_for_ever",
        _LAYER,
        "            self._worst.zero_()\n            raise_overflow(int(worst)",
        "            raise_overflow(int(worst)",
    ),
)
