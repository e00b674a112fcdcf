"""What paths are estimated to cost: against what was measured, and against sums made by hand."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.path_costs import (
    DEEPEP_THROUGHPUT,
    H200,
    TWO_GPU_OTHERS,
    TWO_GPU_SHAPE,
    TWO_GPU_STEPS,
    Network,
    active_experts,
    deployment,
    fused_cost,
    low_latency_cost,
    low_latency_us,
    parts_of_a_token,
    pipeline_us,
    throughput_cost,
    two_level_cost,
    two_level_transport,
)
from deep_moe.heuristics.symm_buffer_layout import symm_buffer_layout
from deep_moe.heuristics.throughput import ThroughputShape, throughput_buffer_layout

RESULTS = sorted(Path(__file__).parents[2].glob("benchmarks/results/*2026-11-22*.json"))
# benchmarks/LOG.md, 2026-11-23: deepseek-v4-pro, 192 experts on two H200s, us by tokens per rank.
OTHER_FORMATS = {
    "fp8": {1: 112.0, 8: 610.1, 32: 1232.6, 128: 1447.4, 1024: 1546.4, 2048: 2244.8, 8192: 7028.1},
    "bf16": {8: 1172.7, 32: 2387.5, 128: 2779.1, 1024: 3016.8, 8192: 11413.0},
}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_fused_calls_estimates_are_near_what_was_measured(path: Path):
    ratios = []
    for result in json.loads(path.read_text())["results"]:
        tokens = result["tokens_per_rank"]
        shape = MoEShape(result["num_ranks"], **result["layer"], num_max_tokens_per_rank=tokens)
        ratios.append(fused_cost(shape, tokens).us / result["us"])
    assert len(ratios) > 10
    assert min(ratios) > 0.85
    assert max(ratios) < 1.16


@pytest.mark.parametrize("weights", OTHER_FORMATS)
def test_so_are_those_of_other_formats(weights: str):
    for tokens, us in OTHER_FORMATS[weights].items():
        shape = MoEShape(2, 192, 6, 7168, 3072, tokens, weights=weights)
        assert 0.9 < fused_cost(shape, tokens).us / us < 1.11


def test_the_low_latency_model_meets_what_it_was_not_fitted_to():
    """It is fitted to 1 and 128 tokens; 8 and 32 were measured, too."""
    for step, seen in TWO_GPU_STEPS.items():
        for tokens, us in seen.us.items():
            model = low_latency_us(step, TWO_GPU_SHAPE, tokens)
            assert model == pytest.approx(us, rel=1e-9 if tokens in (1, 128) else 0.08)


def test_the_low_latency_model_of_layers_that_it_was_not_fitted_to():
    """Its worst is a dispatch of 512 tokens, of which a CTA has several."""
    for shape, tokens, dispatch_us, combine_us in TWO_GPU_OTHERS:
        assert 0.81 < low_latency_us("dispatch", shape, tokens) / dispatch_us < 1.23
        assert 0.92 < low_latency_us("combine", shape, tokens) / combine_us < 1.16


def test_parts_of_a_token_are_what_drawing_finds():
    generator = random.Random(0)
    drawn = [
        len({expert // 16 for expert in generator.sample(range(64), 6)}) for _ in range(20_000)
    ]
    assert parts_of_a_token(4, 64, 6) == pytest.approx(sum(drawn) / len(drawn), rel=0.01)
    groups = [len({g // 2 for g in chosen}) for chosen in itertools.combinations(range(8), 4)]
    expected = sum(groups) / len(groups)
    found = parts_of_a_token(4, 256, 8, num_groups=8, num_topk_groups=4)
    assert found == pytest.approx(expected)
    with pytest.raises(ValueError, match="num_groups must be a multiple of num_parts"):
        parts_of_a_token(16, 256, 8, num_groups=8, num_topk_groups=4)


def test_active_experts_are_what_drawing_finds():
    generator = random.Random(0)
    shape = MoEShape(2, 64, 2, 128, 128, 8)
    drawn = [len({generator.randrange(32) for _ in range(20)}) for _ in range(5000)]
    assert active_experts(shape, 20) == pytest.approx(sum(drawn) / len(drawn), rel=0.01)


def test_what_a_call_between_two_domains_sends():
    """4 domains, 100 tokens: each goes to the other domains of its experts; sizes that are fixed
    are sent whole."""
    exact = deployment(4, 100, exact_sizes=True)
    row, others = exact.row.num_bytes, parts_of_a_token(4, 256, 8) * 3 / 4
    assert row == 7168 + 4 * 56 + 8 * 8
    sent = two_level_transport(exact, 100)
    assert sent.bytes_there == pytest.approx(100 * others * row)
    assert sent.bytes_back == pytest.approx(100 * others * 2 * 7168)
    cost = two_level_cost(exact, 100)
    assert cost.network_bytes == sent.bytes_there + sent.bytes_back
    fixed = two_level_transport(deployment(4, 100, num_chunks=4), 10)
    assert fixed.bytes_there == 3 * 100 * row
    bounded = two_level_transport(deployment(4, 100, num_max_foreign_tokens=60), 10)
    assert bounded.bytes_there == 60 * row


def test_a_faster_network_leaves_the_kernels():
    shape = deployment(2, 4096, exact_sizes=True)
    network = Network(bytes_per_s=1e15, start_us=0.0)
    cost = two_level_cost(shape, 4096, network=network)
    steps = {step.name: step.us for step in cost.steps}
    assert cost.us == pytest.approx(steps["kernel, 1 x"] + steps["own copies and sums"], rel=1e-3)
    slow = two_level_cost(shape, 4096)
    assert slow.us - cost.us == pytest.approx(
        30 + sum(step.us for step in slow.steps if "x" in step.name) - steps["kernel, 1 x"],
        rel=1e-3,
    )


def test_chunks_hide_transport_behind_kernels():
    assert pipeline_us([10.0], [40.0], 10.0) == 60.0
    assert pipeline_us([5.0, 5.0], [20.0, 20.0], 5.0) == 50.0
    # Transport that takes longer than kernels is what remains.
    assert pipeline_us([30.0, 30.0], [5.0, 5.0], 40.0) == 140.0


def test_shared_experts_cost_a_call_of_their_own():
    plain, shared = (
        two_level_cost(deployment(2, 128, num_shared_experts=number), 128) for number in (0, 1)
    )
    assert "own tokens' kernel" in [step.name for step in shared.steps]
    assert shared.us > plain.us + H200.call_us


def test_a_cost_has_the_buffers_bytes():
    shape = MoEShape(8, 256, 8, 7168, 2048, 128)
    assert fused_cost(shape, 128).buffer_bytes == {
        "symmetric buffer": symm_buffer_layout(shape).num_bytes
    }
    cost = low_latency_cost(shape, 128)
    assert [step.name for step in cost.steps] == ["dispatch", "experts", "combine"]
    assert cost.us == pytest.approx(sum(step.us for step in cost.steps))


def test_every_slot_of_the_throughput_path_travels():
    shape = MoEShape(8, 256, 8, 7168, 2048, 4096)
    cost = throughput_cost(shape, 1000)
    assert cost.link_bytes == pytest.approx(1000 * 8 * 7 / 8 * (7168 + 4 * 56 + 2 * 7168))
    assert cost.us == pytest.approx(sum(step.us for step in cost.steps))
    layer = ThroughputShape(8, 256, 8, 7168, 4096, 2 * 8 * 4096)
    rows = throughput_buffer_layout(layer).num_bytes
    assert cost.buffer_bytes == {"symmetric buffer": rows}


def test_weights_without_measurements_are_refused():
    with pytest.raises(ValueError, match="weights must be mxfp4 or fp8 or bf16"):
        H200.of_format("nvfp4")


def test_published_bandwidth_is_turned_back_into_time():
    """A token of the first version on 8 domains goes to the 4 domains of its 4 groups, its own
    counted with them: 4096 * 4 * 7168 * 33/32 bytes at 51 GB/s."""
    (published,) = [p for p in DEEPEP_THROUGHPUT if (p.version, p.num_domains) == ("V1", 8)]
    assert published.domains_per_token == pytest.approx(4.0)
    assert published.dispatch_us == pytest.approx(4096 * 4 * 7168 * 33 / 32 / 51e3)
    assert published.combine_us == pytest.approx(4096 * 4 * 7168 * 2 / 50e3)
    assert published.network_gb_per_s == pytest.approx(51 * 7 / 8)


def test_a_model_with_more_ranks_than_experts_holds_some_of_them_several_times():
    assert deployment(32, 128).num_experts == 256
    assert deployment(128, 128).num_experts == 1024
