"""What benchmarks/rates.py times, in small and on a CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import rates

CPU = torch.device("cpu")


def test_every_workload_is_timed_in_its_unit() -> None:
    found = rates.workloads(CPU, read_bytes=4096, size=16)
    assert {name: work.unit for name, work in found.items()} == {"read": "TB/s", "bf16": "TFLOPS"}
    assert found["read"].call() == 1024  # as many ones as were asked for: all of them are read
    assert found["bf16"].amount == 2 * 16**3 / 1e12
    for work in found.values():
        measured = rates.measure(work, CPU, short_calls=1, long_calls=2, rest_s=0)
        assert measured["short"] > 0
        assert measured["long"] > 0


def test_a_rate_is_the_amount_over_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "seconds_per_call", lambda call, num_calls, device: num_calls)
    work = rates.Workload("TB/s", 6.0, lambda: None)
    measured = rates.measure(work, CPU, short_calls=2, long_calls=3, rest_s=0)
    assert measured == {"unit": "TB/s", "short": 3.0, "long": 2.0}


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rates.main([]) == 1
    assert "needs a GPU" in capsys.readouterr().err
