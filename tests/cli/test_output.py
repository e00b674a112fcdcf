"""How sizes are written for people."""

import pytest

from deep_moe.cli.output import format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (10239, "10239 B"),
        (10240, "10.0 KiB"),
        (1024 * 1024, "1.0 MiB"),
        (5 * 1024**4, "5120.0 GiB"),
    ],
)
def test_sizes_keep_a_readable_unit(num_bytes, text):
    assert format_bytes(num_bytes) == text
