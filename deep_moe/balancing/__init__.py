"""Experts that are held twice, chosen by their load: counters, places, and the moves between them.
Engines with a balancer of their own need none of it."""

from typing import TYPE_CHECKING

from deep_moe.lazy import names_on_use

if TYPE_CHECKING:
    from .counters import LoadCounters
    from .moving import move_experts
    from .placement import ExpertPlacement, place_experts

_MODULES = {
    "ExpertPlacement": "placement",
    "LoadCounters": "counters",
    "move_experts": "moving",
    "place_experts": "placement",
}

__all__ = ["ExpertPlacement", "LoadCounters", "move_experts", "place_experts"]

if not TYPE_CHECKING:  # so that type checkers find names that do not exist
    __getattr__, __dir__ = names_on_use(__name__, _MODULES)
