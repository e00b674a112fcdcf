"""The model of traffic between domains, and its table in the documents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deep_moe.heuristics.domain_relay import RelayShape
from deep_moe.heuristics.domain_traffic import domain_traffic, share_with_expert

DOCUMENT = Path(__file__).parents[2] / "docs" / "two-level.md"
HIDDEN, TOPK, TOKENS = 7168, 8, 128


def test_a_token_with_all_experts_goes_everywhere_and_one_with_one_to_its_domain() -> None:
    assert share_with_expert(8, 4, 8) == 1
    assert share_with_expert(8, 4, 1) == pytest.approx(1 / 4)
    # Of 4 experts, two to a domain: 6 pairs, of which one misses a domain.
    assert share_with_expert(4, 2, 2) == pytest.approx(5 / 6)


def test_the_table_in_the_document_is_the_models() -> None:
    text = DOCUMENT.read_text()
    table = text[text.index("## What it should cost") :]
    rows = re.findall(r"^\| (\d+) \|((?: \d+ \|){6})", table, re.MULTILINE)
    assert [int(domains) for domains, _ in rows] == [2, 4, 8, 16, 32, 64, 128]
    for domains, cells in rows:
        num_domains = int(domains)
        num_experts = max(256, TOPK * num_domains)
        shape = RelayShape(
            num_domains,
            8,
            num_experts,
            TOPK,
            HIDDEN,
            TOKENS,
            token_format="fp8_128",
            is_numbered=True,
        )
        found = domain_traffic(
            num_domains, num_experts, TOPK, TOKENS, shape.row.num_bytes, 2 * HIDDEN
        )
        assert found.num_fixed_rows == shape.num_chunk_sent
        expected = (
            *(found.num_rows, found.dispatch_us, found.combine_us),
            *(found.num_fixed_rows, found.fixed_dispatch_us, found.fixed_combine_us),
        )
        numbers = [int(cell) for cell in cells.replace("|", " ").split()]
        assert numbers == [round(value) for value in expected]
