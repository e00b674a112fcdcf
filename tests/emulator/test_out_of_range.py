"""Each instruction checks the range of its addresses before anything else looks at them."""

from __future__ import annotations

import pytest
from warpcheck import OutOfBounds

from .families import FAMILIES, GLOBAL_BYTES, SHARED_BYTES, run


@pytest.mark.parametrize(
    "shared_offset", [SHARED_BYTES, 0xFFFA00], ids=["behind", "end of the window"]
)
@pytest.mark.parametrize(
    ("name", "checks"),
    [(n, c) for n, f in FAMILIES.items() for c in (True, False) if c or not f.needs_checks],
)
def test_an_address_out_of_range_is_an_error(name: str, checks: bool, shared_offset: int) -> None:
    with pytest.raises(OutOfBounds):
        run(FAMILIES[name], shared_offset, GLOBAL_BYTES, checks=checks)
