"""The benchmark of whole models: its options, its loads and reports, with an engine and a clock
that are none. tests/serving has vLLM's own classes take the model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import (
    ENGINES,
    SERVERS,
    Loads,
    Progress,
    Request,
    make_server,
    markdown,
    new_report,
    note,
    parse_arguments,
    percentile,
    picture,
    run_limited,
    run_load,
    serve_one,
    show,
    spread_ms,
    steps_of_all,
    timed_parts,
)

BRIEF = ["--repeats", "2", "--first", "4", "--requests", "20", "--steps", "8", "--decode", "1", "4"]


class Clock:
    seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.seconds += seconds


class Engine:
    """Reads up to `step_tokens` of prompts in a step, and makes a token for whoever is read."""

    name = "vLLM"
    start_seconds = 12.0

    def __init__(
        self, clock: Clock, step_s: float = 0.25, step_tokens: int = 8192, who: str = "deep_moe"
    ) -> None:
        self.clock, self.step_s, self.step_tokens, self.who = clock, step_s, step_tokens, who
        self.to_read: dict[str, int] = {}
        self.to_make: dict[str, int] = {}
        self.is_closed = False
        self.counts = {"compiled": 0, "read": 3, "loaded": 3}

    def add(self, name: str, prompt: Sequence[int], new_tokens: int) -> None:
        assert name not in self.to_make
        assert all(0 <= token < 32000 for token in prompt)
        self.to_read[name], self.to_make[name] = len(prompt), new_tokens

    def step(self) -> list[tuple[str, int]]:
        self.clock.seconds += self.step_s
        left, made = self.step_tokens, []
        for name in list(self.to_make):
            read = min(left, self.to_read[name])
            left -= read
            self.to_read[name] -= read
            if self.to_read[name]:
                continue
            self.to_make[name] -= 1
            made.append((name, 1))
            if self.to_make[name] == 0:
                del self.to_make[name]
        return made

    def layers(self) -> dict[str, str]:
        return {f"model.layers.{i}.mlp.experts, GPU 0": self.who for i in range(6)}

    def kernel_counts(self) -> list[dict[str, int]]:
        return [dict(self.counts)]

    def machine(self) -> dict[str, Any]:
        return {"gpu": "no GPU", "commit": "abc"}

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0"], "--gpus must be at least 1; got 0"),
        (["--requests", "0"], "--requests must be at least 1; got 0"),
        (["--rate", "0"], "--rate more than 0"),
        (["--decode", "0", "1"], "--decode must be at least 1"),
        (["--svg", "a.svg"], "--markdown and --svg need --show"),
        (["--engines", "sglang"], "--engines sglang is none of --server vllm"),
        (["--engines", "humming"], "invalid choice"),
    ],
)
def test_impossible_options_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        parse_arguments(words)
    assert message in capsys.readouterr().err


def test_sizes_are_those_of_the_model_unless_given():
    arguments = parse_arguments([])
    assert (arguments.experts, arguments.topk) == (128, 6)
    assert (arguments.hidden, arguments.intermediate) == (4096, 2048)
    assert parse_arguments(["--model", "qwen3-235b", "--topk", "2"]).topk == 2


def test_requests_are_served_from_when_they_come():
    clock = Clock()
    clock.seconds = 100.0
    requests = [Request([1] * 4, 2, after=3.0), Request([1] * 4, 3), Request([1] * 4, 1, after=0.3)]
    late, first, second = run_load(Engine(clock), requests, clock)
    assert first.times == [0.25, 0.5, 0.75]
    assert second.times == [0.75]  # it came while a step ran
    assert second.first_token == pytest.approx(0.45)
    assert late.times == [3.25, 3.5]  # nothing ran before it came
    assert (late.first_token, late.gaps) == (0.25, [0.25])


def test_tokens_that_nobody_asked_for_are_an_error():
    class Mistaken(Engine):
        def step(self) -> list[tuple[str, int]]:
            super().step()
            return [("0", 3)]

    clock = Clock()
    with pytest.raises(RuntimeError, match="made 3 tokens for request '0', of which 2 were"):
        run_load(Mistaken(clock), [Request([1], 2)], clock)


def test_steps_in_which_all_requests_got_a_token():
    ahead = Progress(Request([], 4), [1.0, 2.0, 3.0, 5.0])
    behind = Progress(Request([], 4), [2.0, 3.0, 5.0, 6.0])
    assert steps_of_all([ahead, behind]) == [1.0, 2.0]


def test_percentiles():
    values = [float(i) for i in range(1, 201)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (100, 198)
    assert percentile([5.0], 0.99) == 5
    found = spread_ms([0.001] * 98 + [0.002, 0.003])
    assert found == {"median_ms": 1.0, "p99_ms": 2.0, "max_ms": 3.0, "count": 100}


def test_every_engine_gets_the_same_requests():
    own, other = Loads(7), Loads(7)
    assert own.mixed(5, 2.0) == other.mixed(5, 2.0)
    made = own.mixed(2000, 40.0)
    assert [one.after for one in made] == sorted(one.after for one in made)
    assert made[-1].after == pytest.approx(2000 / 40, rel=0.1)
    assert {256 <= len(one.prompt) <= 2048 for one in made} == {True}


def test_parts_and_their_times():
    clock = Clock()
    found = dict(timed_parts(Engine(clock), parse_arguments(BRIEF), clock))
    assert found["prefill of 16 x 2048 tokens"]["tokens_per_s"] == 32768 / (4 * 0.25)
    first = found["first token after 2048 tokens"]
    assert (first["median_ms"], first["p99_ms"], first["count"]) == (250, 250, 4)
    for name, batch in (("decode of 1 request", 1), ("decode of 4 requests", 4)):
        assert found[name]["batch"] == batch
        assert found[name]["mean_ms"] == found[name]["median_ms"] == 250
        assert found[name]["count"] == 2 * 8
    batch_part = found["64 requests of 1024 tokens, 128 more each"]
    assert batch_part["tokens_per_s"] == 64 * 1152 / (0.25 * (64 * 1024 / 8192 + 127))
    assert found["40 requests a second: first token"]["count"] == 20
    assert found["40 requests a second: between two tokens"]["median_ms"] == 250
    only = parse_arguments([*BRIEF, "--parts", "first"])
    assert list(dict(timed_parts(Engine(clock), only, clock))) == ["first token after 2048 tokens"]


def served(path: Path, name: str, engine: Engine, *words: str) -> None:
    arguments = parse_arguments([*BRIEF, *words, "--json", str(path), "--serve", name])

    def make_engine(folder: Path, _: Any) -> Engine:
        config = json.loads((folder / "config.json").read_text())
        assert (config["num_experts"], config["num_hidden_layers"]) == (128, 6)
        return engine

    serve_one(arguments, make_engine, engine.clock)


def test_no_step_waits_for_the_collection_of_what_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = []
    monkeypatch.setitem(SERVERS, "sglang", lambda folder, settings: made.append(settings) or "it")
    monkeypatch.setattr("gc.freeze", lambda: made.append("frozen"))
    assert make_server(tmp_path, parse_arguments(["--server", "sglang"])) == "it"
    assert made[0].weights == "mxfp4"
    assert made[1] == "frozen"


def test_a_report_of_two_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(new_report(parse_arguments(BRIEF))))
    ours = Engine(Clock(), 0.125, who="deep_moe, routing")
    other = Engine(Clock(), 0.25, who="HummingExperts")
    served(path, "deep_moe", ours)
    served(path, "vllm", other)
    assert ours.is_closed
    report = json.loads(path.read_text())
    assert report["engines"]["vllm"]["layers"] == {"HummingExperts": 6}
    show([report], tmp_path / "a.md", tmp_path / "a.svg")
    assert "no kernel was compiled, read or loaded after the start" in capsys.readouterr().out
    text = (tmp_path / "a.md").read_text()
    assert "vLLM's own choice (HummingExperts)" in text
    assert "| deep_moe |" in text
    assert "no GPU, 1 GPU, vLLM " in text
    assert "128 MXFP4 experts, 4096 x 2048" in text
    decode = next(line for line in text.splitlines() if "decode of 4 requests" in line)
    assert decode.split("|")[2:5] == [
        " 125.00 ms, p99 125.00, mean 125.00 ",
        " 250.00 ms, p99 250.00, mean 250.00 ",
        " 2.00 ",
    ]
    assert (tmp_path / "a.svg").read_text().count("<polyline") == 2


def test_what_ended_early_is_shown_as_far_as_it_came(tmp_path: Path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(new_report(parse_arguments(BRIEF))))
    served(path, "deep_moe", Engine(Clock()), "--parts", "first")
    note(path, "vllm", lambda own: own.update(failed="stopped after 5 s"))
    report = json.loads(path.read_text())
    text = markdown([report])
    assert "- vllm, 1 GPU: stopped after 5 s" in text
    assert "| first token after 2048 tokens | 250.00 ms, p99 250.00 |" in text
    with pytest.raises(SystemExit, match="nothing to draw"):
        picture([report])


def test_a_kernel_that_a_step_waited_for_is_named(tmp_path: Path):
    class Late(Engine):
        def step(self) -> list[tuple[str, int]]:
            self.counts["loaded"] = 4
            return super().step()

    path = tmp_path / "report.json"
    path.write_text(json.dumps(new_report(parse_arguments(BRIEF))))
    served(path, "deep_moe", Late(Clock()), "--parts", "first")
    assert "at the end [{'compiled': 0, 'read': 3, 'loaded': 4}]" in markdown(
        [json.loads(path.read_text())]
    )


@pytest.mark.parametrize(("name", "who"), [("deep_moe", "MarlinExperts"), ("vllm", "deep_moe")])
def test_layers_that_another_ran_are_an_error(name: str, who: str, tmp_path: Path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(new_report(parse_arguments(BRIEF))))
    engine = Engine(Clock(), who=who)
    with pytest.raises(RuntimeError, match=rf"{name}: deep_moe must run . of 6 layers"):
        served(path, name, engine)
    report = json.loads(path.read_text())
    assert report["engines"][name]["layers"] == {who: 6}


def test_a_process_that_fails_or_takes_too_long():
    assert run_limited([sys.executable, "-c", "pass"], {}, 60) is None
    assert run_limited([sys.executable, "-c", "raise SystemExit(3)"], {}, 60) == "exit status 3"
    forever = "import time\nwhile True: time.sleep(1)"
    assert run_limited([sys.executable, "-c", forever], {}, 0.2) == "stopped after 0.2 s"


def test_engines_differ_in_their_variables_alone():
    for name, one in ENGINES.items():
        environment = one.environment()
        assert one.is_ours == name.startswith("deep_moe")
        assert environment["DEEP_MOE_VLLM"] == environment["DEEP_MOE_SGLANG"]
        assert environment["DEEP_MOE_VLLM"] == str(int(one.is_ours))
    assert ENGINES["deep_moe_bf16"].environment()["DEEP_MOE_TOKEN_FORMAT"] == "bf16"
    assert parse_arguments(["--server", "sglang"]).engines == ["deep_moe", "sglang"]
