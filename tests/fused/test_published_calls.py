"""What ranks in several processes tell each other of the call that they are about to make."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from deep_moe.fused.symm_memory import private_host_memories


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads take turns as often as they can, like processes."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_a_call_is_seen_by_its_number_until_the_next() -> None:
    (memory,) = private_host_memories(1, 64)
    (block,) = memory.blocks
    assert block.published_call(1) is None
    block.publish_call(1, {"num_sms": 4})
    assert block.published_call(1) == {"num_sms": 4}
    block.publish_call(2, {"num_sms": 30})
    assert block.published_call(1) is None
    assert block.published_call(2) == {"num_sms": 30}


@pytest.mark.usefixtures("frequent_switches")
def test_no_call_is_seen_with_what_belongs_to_another() -> None:
    """A rank may go on to its next call while another still compares."""
    (memory,) = private_host_memories(1, 64)
    (block,) = memory.blocks
    last = 3000
    newest = 0

    def publish() -> None:
        nonlocal newest
        for number in range(1, last + 1):
            newest = number
            block.publish_call(number, {"number": number, "sends": "x" * (number % 7)})

    thread = threading.Thread(target=publish)
    thread.start()
    while thread.is_alive():
        for number in (newest - 1, newest):
            call = block.published_call(number) if number > 0 else None
            assert call is None or call["number"] == number
    thread.join()
    assert block.published_call(last) == {"number": last, "sends": "x" * (last % 7)}
