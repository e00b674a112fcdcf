"""How the spans of a recorded call belong together: which block a warp is at, and whom a wait waits
for. The roles of a CTA take the same blocks in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .timeline import NONE, Lane

_LOADS = ("load Linear1", "load Linear2")
_AWAITED_TOKENS = ("wait for Linear1 tokens", "wait for Linear2 tokens")
_MAIN_LOOPS = ("Linear1 main loop", "Linear2 main loop")
_EPILOGUES = ("Linear1 epilogue", "Linear2 epilogue")
_FIELDS = ("expert", "m_block", "n_block", "rows")


def relate(lanes: Sequence[Lane], steps: Sequence[str], spans: np.ndarray) -> None:
    """Fill in what other roles know of a span's block, and `awaited`.

    Args:
        lanes: as of `Timeline`.
        steps: as of `Timeline`.
        spans: as of `Timeline`; changed in place.
    """
    calls = _Relations(lanes, steps, spans)
    calls.relate_blocks()
    calls.relate_tokens()
    calls.relate_meetings()


class _Relations:
    def __init__(self, lanes: Sequence[Lane], steps: Sequence[str], spans: np.ndarray) -> None:
        self.steps = {name: number for number, name in enumerate(steps)}
        self.spans = spans
        self.rank = np.array([lane.rank for lane in lanes], np.int32)[spans["lane"]]
        begins = np.searchsorted(spans["lane"], np.arange(len(lanes) + 1))
        self.of_lane = {
            (lane.rank, lane.cta, lane.role): range(begins[i], begins[i + 1])
            for i, lane in enumerate(lanes)
        }

    def is_at(self, *names: str) -> np.ndarray:
        """Which spans are at one of these steps."""
        numbers = [self.steps[name] for name in names if name in self.steps]
        return np.isin(self.spans["step"], numbers)

    def of(self, rank: int, cta: int, role: str, names: tuple[str, str]) -> np.ndarray:
        """Spans of a warp at a step of Linear1 or Linear2, one for each of its blocks."""
        own = self.of_lane.get((rank, cta, role), range(0))
        wanted = [self.steps.get(name, NONE) for name in names]
        return own.start + np.flatnonzero(np.isin(self.spans["step"][own.start : own.stop], wanted))

    def phases(self, chosen: np.ndarray, names: tuple[str, str]) -> np.ndarray:
        """1 where a span is of Linear2."""
        return self.spans["step"][chosen] == self.steps.get(names[1], NONE)

    def relate_blocks(self) -> None:
        """The k-th block of each role is the same one."""
        for rank, cta in sorted({(rank, cta) for rank, cta, _ in self.of_lane}):
            roles = {
                "tokens": (
                    self.of(rank, cta, "activation loader", _AWAITED_TOKENS),
                    _AWAITED_TOKENS,
                ),
                "copies": (self.of(rank, cta, "activation loader", _LOADS), _LOADS),
                "weights": (self.of(rank, cta, "weight loader", _LOADS), _LOADS),
                "products": (self.of(rank, cta, "math", _MAIN_LOOPS), _MAIN_LOOPS),
            }
            # On SM100 the products of a pair of CTAs are issued by the even one.
            shared = self.of(rank, cta & ~1, "math", _MAIN_LOOPS)
            for role in ("math", "epilogue"):
                found = self.of(rank, cta, role, _EPILOGUES)
                if len(found):
                    roles["results"] = (found, _EPILOGUES)
            known = {name: chosen for name, chosen in roles.items() if len(chosen[0])}
            if not known:
                continue
            count = min(len(chosen) for chosen, _ in known.values())
            kinds = [self.phases(chosen[:count], names) for chosen, names in known.values()]
            if any((kind != kinds[0]).any() for kind in kinds):
                continue  # records are lost
            self.share(np.stack([chosen[:count] for chosen, _ in known.values()]))
            products = known.get("products", (shared, _MAIN_LOOPS))[0]
            self.relate_waits_for_blocks(known, products[:count], count)

    def share(self, blocks: np.ndarray) -> None:
        """blocks: [roles, blocks], spans of the same block in each column."""
        for name in _FIELDS:
            values = self.spans[name][blocks]
            self.spans[name][blocks] = np.where(values == NONE, values.max(axis=0), values)

    def relate_waits_for_blocks(
        self,
        known: dict[str, tuple[np.ndarray, tuple[str, str]]],
        products: np.ndarray,
        count: int,
    ) -> None:
        """Products wait for the loader that begins later, and an epilogue of its own for them."""
        start = self.spans["start_ns"]
        if "products" in known and "copies" in known and "weights" in known:
            copies, weights = (known[name][0][:count] for name in ("copies", "weights"))
            later = np.where(start[copies] > start[weights], copies, weights)
            self.wait(products - 1, "wait for a block", later, start[later])
        if "results" in known and len(products) == count:
            results = known["results"][0][:count]
            if len(results) and self.spans["lane"][results[0]] != self.spans["lane"][products[0]]:
                end = self.spans["end_ns"]
                self.wait(results - 1, "wait for a block", products, end[products])

    def wait(self, waits: np.ndarray, step: str, awaited: np.ndarray, at: np.ndarray) -> None:
        """Note what ended waits, if they are such and it came after their beginning."""
        spans = self.spans
        lasted = (at >= spans["start_ns"][waits]) & (awaited != NONE)
        chosen = lasted & (spans["step"][waits] == self.steps.get(step, NONE)) & (waits >= 0)
        spans["awaited"][waits[chosen]] = awaited[chosen]

    def relate_tokens(self) -> None:
        """Linear2 of an m-block waits for its last block of Linear1."""
        spans = self.spans
        results = np.flatnonzero(self.is_at(_EPILOGUES[0]) & (spans["m_block"] != NONE))
        results = results[np.argsort(spans["end_ns"][results], kind="stable")]
        last = {
            (rank, m_block): i
            for rank, m_block, i in zip(
                self.rank[results].tolist(),
                spans["m_block"][results].tolist(),
                results.tolist(),
                strict=True,
            )
        }
        waits = np.flatnonzero(self.is_at(_AWAITED_TOKENS[1]))
        keys = zip(self.rank[waits].tolist(), spans["m_block"][waits].tolist(), strict=True)
        awaited = np.array([last.get(key, NONE) for key in keys], np.int64)
        self.wait(waits, _AWAITED_TOKENS[1], awaited, spans["end_ns"][awaited])

    def relate_meetings(self) -> None:
        """Who meets waits for the one that comes last."""
        of_one_rank = ("gather CTAs before counts are published", "gather CTAs before combine")
        for step in of_one_rank:
            for rank in np.unique(self.rank).tolist():
                self.relate_to_last(step, step, self.rank == rank)
        everywhere = np.ones(len(self.spans), bool)
        for step, last in (
            ("rank barrier before combine", "rank barrier before combine"),
            ("rank barrier after clean-up", "rank barrier after clean-up"),
            ("wait for combine", "rank barrier before combine"),
            ("wait for token counts", "publish counts"),
        ):
            self.relate_to_last(step, last, everywhere)

    def relate_to_last(self, step: str, last: str, among: np.ndarray) -> None:
        """Waits at `step` end when the last one has begun `last`."""
        waits = np.flatnonzero(self.is_at(step) & among)
        others = np.flatnonzero(self.is_at(last) & among)
        if not len(waits) or not len(others):
            return
        start = self.spans["start_ns"]
        latest = others[np.argmax(start[others])]
        waits = waits[waits != latest]
        awaited = np.full(len(waits), latest)
        self.wait(waits, step, awaited, start[awaited])
