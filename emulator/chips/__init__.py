"""What the emulator's clock knows of each chip: one file per chip, and what its numbers mean.

    from warpcheck import Machine, chips

    machine = Machine(clock="h100")
    slower = chips.load("h100").replace(hbm_gb_per_s=2000)
    machine = Machine(clock=slower)

`Chip.parameters` holds every number with its source and uncertainty; `chips.SCHEMA` says what each
of them means.
"""

from __future__ import annotations

from .b200 import B200
from .b300 import B300
from .chip import SCHEMA as SCHEMA
from .chip import Chip, Meaning, Parameter
from .gb200 import GB200
from .h100 import H100
from .h200 import H200

CHIPS: dict[str, Chip] = {chip.name: chip for chip in (H100, H200, B200, B300, GB200)}


def load(name: str) -> Chip:
    """The chip of this name.

    Args:
        name: of its file; ValueError lists those that there are.

    Raises:
        ValueError: there is no chip of this name.
    """
    if name not in CHIPS:
        raise ValueError(f"chip must be one of {', '.join(CHIPS)}; got {name!r}")
    return CHIPS[name]


# CHIPS and SCHEMA are public, too; what the reference lists are classes and functions.
__all__ = ["Chip", "Meaning", "Parameter", "load"]
