"""Time stamps of a call: complete, in order, on one clock, and without effect on the result."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from deep_moe import jit
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.sm90_tiles import BLOCK_MS
from deep_moe.targets import choose_config
from deep_moe.trial import trace
from deep_moe.trial.synthetic import Tokens, exact_layer, exact_tokens
from deep_moe.trial.trace.rank_trace import SPAN_DTYPE
from deep_moe.trial.trace.recording import CTA_DTYPE, RECORD_DTYPE
from tests.everyday import parametrize

from ..kernels.layer_case import LayerCase

ARCHS = ("sm_90a", "sm_100a")
BLOCK_M = 16
SHAPE = MoEShape(
    num_ranks=2,
    num_experts=6,
    num_topk=3,
    hidden=384,
    intermediate_hidden=128,
    num_max_tokens_per_rank=48,
)
TRACKS = {
    "sm_90a": {"dispatch", "activation_loader", "weight_loader", "math", "combine"},
    "sm_100a": {
        "dispatch",
        "activation_loader",
        "weight_loader",
        "math",
        "epilogue",
        "combine",
    },
}


class Recorded:
    """One call of two ranks, recorded."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.case = LayerCase(SHAPE, exact_layer(SHAPE), arch=arch)
        self.tokens = [
            exact_tokens(SHAPE, 48, seed=1, num_unused_slots=1),
            exact_tokens(SHAPE, 13, seed=2),
        ]
        with trace.record(*self.case.ranks.buffers) as self.recorders:
            self.results = self.case.compare_call(self.tokens, overrides={"block_m": BLOCK_M})
            self.raw = [recorder.collect() for recorder in self.recorders]
        self.ranks = trace.aligned(self.raw)


@pytest.fixture(scope="module", params=ARCHS)
def recorded(request: pytest.FixtureRequest) -> Recorded:
    return Recorded(request.param)


@pytest.fixture(scope="module")
def sm90() -> Recorded:
    return Recorded("sm_90a")


def tokens_of_experts(tokens: list[Tokens], rank: int) -> list[int]:
    """How many each local expert of a rank receives."""
    named = torch.cat([own.topk_idx.flatten() for own in tokens])
    counts = torch.bincount(named[named >= 0], minlength=SHAPE.num_experts)
    return counts.split(SHAPE.num_experts_per_rank)[rank].tolist()


def by_track(rank: trace.RankTrace) -> dict[tuple[int, str], np.ndarray]:
    name_of = {number: name for name, number in trace.tracks().number.items()}
    pairs = np.unique(rank.spans[["cta", "track"]]).tolist()
    return {
        (cta, name_of[track]): rank.spans[
            (rank.spans["cta"] == cta) & (rank.spans["track"] == track)
        ]
        for cta, track in pairs
    }


def rank_barriers() -> list[str]:
    return [name for name in trace.steps().number if name.startswith("rank_barrier_")]


def when_left(rank: trace.RankTrace, barrier: str) -> float:
    """When the first CTA leaves a barrier over all ranks."""
    return rank.select("dispatch", barrier)["end_ns"].min()


def test_the_result_is_exact(recorded: Recorded) -> None:
    assert all(result.is_exact for result in recorded.results), recorded.results


def test_every_track_is_there_and_ends(recorded: Recorded) -> None:
    end = trace.steps().number["end"]
    for rank, recorder in zip(recorded.ranks, recorded.recorders, strict=True):
        assert rank.num_lost == 0
        num_ctas = recorder.config.num_sms
        present = set(by_track(rank))
        expected = {(cta, name) for cta in range(num_ctas) for name in TRACKS[recorded.arch]}
        if recorded.arch == "sm_100a":  # the even CTA of a pair issues the products of both
            expected -= {(cta, "math") for cta in range(1, num_ctas, 2)}
        assert present == expected
        records = recorder.memory.numpy()[num_ctas * 64 :].view(RECORD_DTYPE)
        assert (records["step"] == end).sum() == len(expected)


def test_the_steps_of_a_track_follow_each_other(recorded: Recorded) -> None:
    for rank in recorded.ranks:
        for spans in by_track(rank).values():
            assert (spans["end_ns"] >= spans["start_ns"]).all()
            assert np.array_equal(spans["start_ns"][1:], spans["end_ns"][:-1])


def test_dispatch_takes_each_of_its_steps_once(recorded: Recorded) -> None:
    # They are declared together, in their order.
    number = trace.steps().number
    first, last = number["count_tokens"], number["rank_barrier_after_cleanup"]
    # What one CTA does for all: the one that came last.
    for_all = ("publish_counts", "clean_up", "rank_barrier_after_cleanup")
    for rank, recorder, own_tokens in zip(
        recorded.ranks, recorded.recorders, recorded.tokens, strict=True
    ):
        of_one_cta = {number[name] for name in for_all}
        # With few slots one CTA sends, and has nobody to wait for but its own warps.
        max_few_slots = min(2 * 32 * recorder.config.num_dispatch_warps, SHAPE.num_list_page_slots)
        if own_tokens.num_tokens * SHAPE.num_topk <= max_few_slots:
            of_one_cta.add(number["gather_before_publish"])
        taken: Counter[int] = Counter()
        for (_, track), spans in by_track(rank).items():
            if track == "dispatch":
                own = spans["step"].tolist()
                taken.update(of_one_cta.intersection(own))
                steps = range(first, last + 1)
                assert own == [step for step in steps if step in own or step not in of_one_cta]
        assert taken == dict.fromkeys(of_one_cta, 1)


@pytest.mark.parametrize(("phase", "number"), [("l1", 0), ("l2", 1)])
def test_every_block_of_every_expert_is_there_once(
    recorded: Recorded, phase: str, number: int
) -> None:
    track = "math" if recorded.arch == "sm_90a" else "epilogue"
    steps = (f"{phase}_main_loop",) if recorded.arch == "sm_90a" else (f"{phase}_epilogue",)
    for rank in recorded.ranks:
        num_n_blocks = rank.num_n_blocks[number]
        spans = rank.select(track, *steps)
        seen: Counter[tuple[int, int]] = Counter()
        for detail, num_rows in zip(
            spans["detail"].tolist(), spans["num_rows"].tolist(), strict=True
        ):
            seen[divmod(detail, num_n_blocks)] += num_rows
        counts = tokens_of_experts(recorded.tokens, rank.rank)
        assert seen == {
            (expert, n_block): count
            for expert, count in enumerate(counts)
            for n_block in range(num_n_blocks)
            if count
        }


def test_nothing_starts_before_what_it_waits_for(recorded: Recorded) -> None:
    begins = [rank.spans["start_ns"].min() for rank in recorded.ranks]
    assert min(begins) == 0
    # No CTA of any rank leaves a barrier over all ranks before all of them are in it.
    assert len(rank_barriers()) >= 2
    for barrier in rank_barriers():
        # The last CTA of a rank arrives for all and then cleans up, before it waits.
        arrival = {"rank_barrier_before_combine": "gather_before_combine"}.get(barrier, barrier)
        entered = max(rank.select("dispatch", arrival)["start_ns"].max() for rank in recorded.ranks)
        left = min(rank.select("dispatch", barrier)["end_ns"].min() for rank in recorded.ranks)
        assert left >= entered
    published = max(rank.select(step="publish_counts")["start_ns"].max() for rank in recorded.ranks)
    last_block = max(rank.select(step="l2_epilogue")["end_ns"].max() for rank in recorded.ranks)
    for rank in recorded.ranks:
        assert rank.select("dispatch", "pull")["start_ns"].min() >= published
        assert rank.select("combine", "combine")["start_ns"].min() >= last_block
        # A pool block's Linear2 is loaded when all its n-blocks of Linear1 are stored.
        first_l2 = rank.select("activation_loader", "await_l2_tokens")["end_ns"].min()
        assert first_l2 >= rank.select(step="l1_epilogue")["start_ns"].min()


def test_the_breakdown_accounts_for_the_whole_track(recorded: Recorded) -> None:
    phases = json.loads(json.dumps(trace.breakdown(recorded.ranks)))
    for rank, own in zip(recorded.ranks, phases["ranks"], strict=True):
        for track in TRACKS[recorded.arch]:
            spans = rank.select(track)
            # What one CTA does for all is shown as it sees it; leave those tracks out.
            if track == "dispatch":
                continue
            num_ctas = len(np.unique(spans["cta"]))
            whole = float((spans["end_ns"] - spans["start_ns"]).sum()) / num_ctas / 1e3
            shown = own["tracks"][trace.tracks().text[trace.tracks().number[track]]]
            parts = [us for name, us in shown.items() if ", of it" not in name]
            assert sum(parts) == pytest.approx(whole)
        timeline = own["timeline"]
        assert timeline["kernel begins"] <= timeline["first block begins, mean CTA"]
        assert timeline["last block ends, last CTA"] <= timeline["combine begins"]
        assert timeline["combine ends, last CTA"] <= timeline["kernel ends"]
    assert phases["timeline_latest"]["kernel ends"] == max(
        own["timeline"]["kernel ends"] for own in phases["ranks"]
    )
    assert phases["num_lost"] == 0


def test_the_breakdown_counts_blocks(sm90: Recorded) -> None:
    for rank, own in zip(sm90.ranks, trace.breakdown(sm90.ranks)["ranks"], strict=True):
        num_m_blocks = sum(
            -(-count // BLOCK_M) for count in tokens_of_experts(sm90.tokens, rank.rank)
        )
        num_ctas = len(np.unique(rank.spans["cta"]))
        for phase, num_n_blocks in zip(("Linear1", "Linear2"), rank.num_n_blocks, strict=True):
            mean = num_m_blocks * num_n_blocks / num_ctas
            assert own["blocks"][f"{phase}, mean"] == pytest.approx(mean)


def test_waits_are_of_the_phase_they_belong_to() -> None:
    """Two CTAs' blocks by hand; the records behind the second one's main loop are lost."""
    step = trace.steps().number
    # step, begin, end in ns, and what it says of itself
    by_cta = (
        (
            ("await_block", 0, 10_000, 0),
            ("l1_main_loop", 10_000, 30_000, 0),
            ("l1_epilogue", 30_000, 40_000, 0),
            ("await_block", 40_000, 46_000, 7_000),
            ("l2_main_loop", 46_000, 60_000, 0),
            ("l2_epilogue", 60_000, 70_000, 0),
            ("await_block", 70_000, 71_000, 3_000),
        ),
        (("await_block", 0, 4_000, 0), ("l1_main_loop", 4_000, 24_000, 0)),
    )
    math = trace.tracks().number["math"]
    rows = [
        (cta, math, step[name], begin, end, 1, detail)
        for cta, spans in enumerate(by_cta)
        for name, begin, end, detail in spans
    ]
    barriers = [
        (0, trace.tracks().number["dispatch"], step[name], 0, 1, 0, 0)
        for name in (*rank_barriers(), "await_counts")
    ]
    spans = np.array(barriers + rows, SPAN_DTYPE)
    rank = trace.RankTrace(0, (3, 2), True, spans, clock_error_ns=0.0, sm_clock_mhz=1e3, num_lost=1)
    assert trace.breakdown([rank])["tracks"]["math"] == {
        "wait for the first block": 7.0,
        "wait for a Linear2 block": 3.0,
        "wait for the end of the list": 0.5,
        "Linear1 main loop": 20.0,
        "Linear1 main loop, of it waiting for stages": 3.5,
        "Linear1 epilogue": 5.0,
        "Linear2 main loop": 7.0,
        "Linear2 main loop, of it waiting for stages": 1.5,
        "Linear2 epilogue": 5.0,
    }


def test_the_table_has_a_column_for_each_breakdown(sm90: Recorded) -> None:
    phases = trace.breakdown(sm90.ranks)
    lines = trace.table({"8": phases, "512": phases}).splitlines()
    assert lines[0].split() == ["microseconds", "8", "512"]
    (row,) = [line for line in lines if line.startswith("  Linear1 main loop  ")]
    assert row.split()[-2:] == [f"{phases['tracks']['math']['Linear1 main loop']:.1f}"] * 2


@pytest.mark.parametrize("ending", ["json", "json.gz"])
def test_a_chrome_trace_is_valid_and_its_slices_nest(
    recorded: Recorded, tmp_path: Path, ending: str
) -> None:
    path = tmp_path / f"layer.{ending}"
    trace.write_chrome_trace(recorded.ranks, path)
    raw = path.read_bytes()
    document = json.loads(gzip.decompress(raw) if ending == "json.gz" else raw)
    events = document["traceEvents"]
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert {event["pid"] for event in events} == {0, 1}
    assert threads[1, 0] == "CTA 0 dispatch"

    slices: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= 0
            key = event["pid"], event["tid"]
            slices.setdefault(key, []).append(
                (event["ts"], event["ts"] + event["dur"], event["name"])
            )
    assert set(slices) == set(threads)
    for own in slices.values():
        open_ends: list[float] = []
        # Of two that begin together the longer one holds the other.
        for begin, end, name in sorted(own, key=lambda piece: (piece[0], -piece[1])):
            while open_ends and open_ends[-1] <= begin + 1e-6:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 2e-3, name  # rounded to 1 ns each
            open_ends.append(end)
    blocks = [event for event in events if event["name"].startswith("Linear1 expert")]
    loops = [event for event in events if event["name"] == "Linear1 main loop"]
    if recorded.arch == "sm_90a":
        assert len(blocks) == len(loops) > 0


def test_gpu_clocks_come_out_on_one_clock(sm90: Recorded) -> None:
    """Counters that start anywhere in each SM, a global clock that moves every 32 ns and stands
    elsewhere on each rank: the times that went in come out."""
    rng = np.random.default_rng(0)
    ticks_per_ns = 1.755
    memories = [recorder.memory.clone() for recorder in sm90.recorders]
    for recorder, memory in zip(sm90.recorders, memories, strict=True):
        raw, num_ctas = memory.numpy(), recorder.config.num_sms
        ctas = raw[: num_ctas * 64].view(CTA_DTYPE)
        records = raw[num_ctas * 64 :].view(RECORD_DTYPE).reshape(num_ctas, -1)
        epoch_ns = 1_763_730_000_000_000_000 + int(rng.integers(0, 10**9))
        for cta in range(num_ctas):
            counter = int(rng.integers(0, 1 << 45))
            for anchor in (ctas[cta]["first"], ctas[cta]["last"]):
                ns = int(anchor["ticks"])
                anchor["global_ns"] = (epoch_ns + ns) // 32 * 32
                anchor["ticks"] = counter + round(ns * ticks_per_ns)
            used = records[cta]["step"] != 0
            ns = records[cta]["ticks"][used]
            records[cta]["ticks"][used] = counter + np.round(ns * ticks_per_ns).astype(np.uint64)

    ranks = []
    for recorder, memory in zip(sm90.recorders, memories, strict=True):
        with mock.patch.multiple(recorder, memory=memory, is_timed=True):
            ranks.append(recorder.collect())
    found_ranks = trace.aligned(ranks)
    # As near as the ranks really were when they left the barriers.
    spread = sum(
        abs(when_left(sm90.ranks[0], barrier) - when_left(sm90.ranks[1], barrier))
        for barrier in rank_barriers()
    )
    for barrier in rank_barriers():
        left = [when_left(rank, barrier) for rank in found_ranks]
        assert abs(left[0] - left[1]) <= spread + 3 * 32
    for found, truth in zip(found_ranks, sm90.ranks, strict=True):
        # Of that CTA and of the median one, whose anchors are rounded down to 32 ns.
        assert found.clock_error_ns <= 2 * 32
        assert found.sm_clock_mhz == pytest.approx(1e3 * ticks_per_ns, rel=1e-2)
        difference = found.spans["start_ns"] - truth.spans["start_ns"]
        # What is left is one shift of the whole rank: where it left the barrier.
        assert np.ptp(difference) <= 3 * 32


def test_only_gpus_have_clocks_to_bring_together(sm90: Recorded) -> None:
    def begins(is_emulated: bool, shift_ns: float) -> list[float]:
        first, second = (dataclasses.replace(rank, is_emulated=is_emulated) for rank in sm90.ranks)
        ranks = trace.aligned([second.shifted(shift_ns), first])
        assert [rank.rank for rank in ranks] == [0, 1]
        return [rank.spans["start_ns"].min() for rank in ranks]

    assert begins(False, 1e6) == pytest.approx(begins(False, 0))
    assert begins(True, 1e6)[1] == pytest.approx(begins(True, 0)[1] + 1e6)


def test_an_unfinished_call_has_no_times(sm90: Recorded) -> None:
    recorder = sm90.recorders[0]
    empty = torch.zeros_like(recorder.memory)
    with (
        mock.patch.multiple(recorder, memory=empty, is_timed=True),
        pytest.raises(ValueError, match="did not run to its end"),
    ):
        recorder.collect()


def test_records_without_room_are_counted(sm90: Recorded) -> None:
    capacity = 4
    with trace.record(*sm90.case.ranks.buffers, capacity=capacity) as recorders:
        results = sm90.case.compare_call(sm90.tokens, overrides={"block_m": BLOCK_M})
        ranks = [recorder.collect() for recorder in recorders]
    assert all(result.is_exact for result in results)
    for rank, whole in zip(ranks, sm90.raw, strict=True):
        # Which CTA computes a block is not fixed, how many there are is.
        kept = [len(spans) + 1 for spans in by_track(rank).values()]
        all_marks = sum(len(spans) + 1 for spans in by_track(whole).values())
        assert max(kept) == capacity
        assert rank.num_lost == all_marks - sum(kept) > 0


def test_a_second_call_replaces_the_first(sm90: Recorded) -> None:
    with trace.record(*sm90.case.ranks.buffers) as recorders:
        sm90.case.call(sm90.tokens, overrides={"block_m": BLOCK_M})
        few = [exact_tokens(SHAPE, 1), exact_tokens(SHAPE, 0)]
        sm90.case.call(few, overrides={"block_m": BLOCK_M})
        ranks = [recorder.collect() for recorder in recorders]
    for rank in ranks:
        counts = tokens_of_experts(few, rank.rank)
        blocks = sum(count > 0 for count in counts) * rank.num_n_blocks[0]
        assert len(rank.select("math", "l1_main_loop")) == blocks


def test_recording_ends_with_its_block(sm90: Recorded) -> None:
    buffers = sm90.case.ranks.buffers
    with pytest.raises(RuntimeError, match="on purpose"), trace.record(*buffers):
        raise RuntimeError("on purpose")
    assert [buffer.recorder for buffer in buffers] == [None, None]


def test_what_cannot_be_recorded_is_refused(sm90: Recorded) -> None:
    buffer = sm90.case.ranks.buffers[0]
    with trace.record(buffer) as (recorder,):
        with pytest.raises(ValueError, match="being recorded already"), trace.record(buffer):
            pass
        assert buffer.recorder is recorder
        with pytest.raises(ValueError, match="no call was made"):
            recorder.collect()
    with pytest.raises(ValueError, match="at least 1 record"), trace.record(buffer, capacity=0):
        pass


def test_only_a_kernel_with_the_switch_looks_at_a_clock(recorded: Recorded) -> None:
    config = recorded.recorders[0].config
    without = jit.build(dataclasses.replace(config, trace=False)).ptx
    assert "%clock" in jit.build(config).ptx
    assert "%clock" not in without
    assert "%smid" not in without


@parametrize("block_m", [BLOCK_MS[0], BLOCK_MS[-1]], everyday=[BLOCK_MS[-1]])
def test_recording_leaves_the_overlap_of_products_alone(block_m: int) -> None:
    without, recording = (
        jit.compile_source(
            jit.render_kernel(
                choose_config(
                    MoEShape(4, 384, 6, 7168, 3072, 1024),
                    1024,
                    arch="sm_90a",
                    activation_clamp=10.0,
                    trace=trace,
                    overrides={"block_m": block_m},
                )
            ),
            arch="sm_90a",
            include_paths=jit.find_headers().include_paths,
        )
        for trace in (False, True)
    )
    assert "serialized" not in recording.log, recording.log
    # A track's state may go to local memory, which traces bear and accumulators would not.
    more = recording.resources.spill_store_bytes - without.resources.spill_store_bytes
    assert more <= 128, (without.resources, recording.resources)
    more = recording.resources.spill_load_bytes - without.resources.spill_load_bytes
    assert more <= 128, (without.resources, recording.resources)


def test_every_step_and_track_has_a_name() -> None:
    source = (jit.find_headers().library.path / "deep_moe/trace/tracer.cuh").read_text()
    for names_, enum in ((trace.steps(), "TraceStep"), (trace.tracks(), "TraceTrack")):
        body = source.split(f"enum class {enum}")[1].split("};")[0]
        assert len(names_.number) == body.count(" = ")
        assert sorted(names_.text) == list(range(len(names_.number)))
