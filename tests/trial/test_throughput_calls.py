"""Calls of the layer for many tokens with a process for each rank, recorded."""

from __future__ import annotations

import pytest

from deep_moe.heuristics import MoEShape
from deep_moe.targets import target_of
from deep_moe.trial.split_trace import summary
from deep_moe.trial.synthetic import exact_layer, exact_tokens
from deep_moe.trial.throughput_calls import trace_emulated_throughput, trace_throughput_processes

SHAPE = MoEShape(2, 4, 2, 256, 128, 8)
OPTIONS = {"arch": "sm_90a", "num_sms": 2}


@pytest.mark.slow
def test_processes_record_what_one_process_does() -> None:
    """The last of the calls, on each rank: as many phases of CTAs, as many steps of experts."""
    layer = exact_layer(SHAPE, scale_block=target_of("sm_90a").weights_of().scale_block)
    tokens = [exact_tokens(SHAPE, count, seed=count) for count in (8, 3)]
    alone = trace_emulated_throughput(SHAPE, layer, tokens, **OPTIONS)
    found = trace_throughput_processes(SHAPE, layer, tokens, device="cpu", num_warmup=1, **OPTIONS)
    assert [trace.rank for trace in found] == [0, 1]
    for one, other in zip(found, alone, strict=True):
        for step in ("dispatch", "combine"):
            phases = [[(p.phase, p.cta) for p in getattr(trace, step)] for trace in (one, other)]
            assert sorted(phases[0]) == sorted(phases[1]) != []
        assert len(one.experts.spans) == len(other.experts.spans) > 0
    assert all(us > 0 for us in summary(found)["kernels"].values())


def test_gpus_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    layer = exact_layer(SHAPE)
    tokens = [exact_tokens(SHAPE, 1)] * 2
    with pytest.raises(ValueError, match="a GPU for each of 2 ranks; there are 1"):
        trace_throughput_processes(SHAPE, layer, tokens, device="cuda", num_warmup=0)
