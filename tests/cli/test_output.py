"""How sizes and text of others are written for people."""

import pytest

from deep_moe.cli.output import format_bytes, new_table, print_error, stderr, stdout


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


@pytest.mark.parametrize("text", ["[/]", "[red]x", "a[b]c", ":smile:", "[link=x]y[/link]"])
def test_text_is_printed_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A file may have such a name."""
    table = new_table(text, text)
    table.add_row(text)
    for console in (stdout(), stderr()):
        console.print(text)
        console.print(table)
    print_error(text)
    captured = capsys.readouterr()
    assert captured.out.count(text) == 4
    assert captured.err.count(text) == 5
    assert captured.err.splitlines()[-1] == f"error: {text}"
