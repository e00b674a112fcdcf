"""`deep-moe run`: it passes where the kernel agrees with the reference, and only there."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from deep_moe.checkpoint import save_experts
from deep_moe.cli import app, run
from deep_moe.heuristics import MoEShape
from deep_moe.targets import TARGETS
from deep_moe.trial import calls as trial
from deep_moe.trial import fuzz_workers, paths
from deep_moe.trial.fuzz_workers import Outcome
from deep_moe.trial.fuzzing import Case, FuzzCase
from deep_moe.trial.small_layers import SMALL_LAYERS
from deep_moe.trial.synthetic import random_layer
from deep_moe.weights import WEIGHTS
from tests.checkpoint.test_exporters import write
from tests.checkpoint.written import nvfp4

TINY = ["--hidden", "128", "--intermediate", "128"]


def invoke(*options: str):
    return CliRunner().invoke(app, ["run", *options])


def ran(*options: str) -> dict:
    result = invoke(*options, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_without_options_small_layers_of_each_path_run():
    document = ran()
    assert document["passed"]
    assert [row["path"] for row in document["layers"]] == [case.path for case in SMALL_LAYERS]
    assert {row["path"] for row in document["layers"]} == {
        *("fused", "split", "throughput", "grouped", "adapters", "training", "product")
    }


def test_small_layers_are_of_each_kind():
    """Each format on one kernel, and what a newcomer believes a run has."""
    fused = [case for case in SMALL_LAYERS if type(case) is FuzzCase]
    pairs = [pair for target in TARGETS.values() for pair in target.weights]
    assert {case.shape.weights for case in fused} == {pair.weights for pair in pairs}
    assert {case.shape.token_format for case in fused} == {pair.token_format for pair in pairs}
    assert {case.shape.num_shared_experts for case in fused} >= {0, 1, 3}
    calls = [[t.num_tokens for t in call] for case in fused for call in case.inputs()]
    assert any(0 in counts for counts in calls)
    assert any(len(set(counts) - {0}) > 1 for counts in calls)
    for arch in ("sm_90a", "sm_100a"):
        own = [case for case in fused if case.arch == arch]
        assert {case.shape.is_bounded for case in own} == {False, True}
        assert {case.values["inputs"] for case in own} == {"filled", "prepared"}


@pytest.mark.parametrize("case", SMALL_LAYERS, ids=lambda case: f"{case.path}-{case.number}")
def test_small_layers_have_a_value_on_each_axis_of_fuzz(case: Case):
    assert set(case.axes_of(case.arch)) <= set(case.values)


def test_a_small_layer_that_is_wrong_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    wrong = SMALL_LAYERS[4]

    def outcomes(cases: Iterable[Case], **_: int) -> Iterator[Outcome]:
        for case in cases:
            yield Outcome(case, "rank 1: wrong" if case is wrong else "", 0.0)

    monkeypatch.setattr(fuzz_workers, "outcomes", outcomes)
    result = invoke()
    assert result.exit_code == 1
    assert result.stdout.count("DIFFERENT") == 1
    assert f"fused on {wrong.arch}: rank 1: wrong" in result.stdout
    as_json = invoke("--json")
    assert as_json.exit_code == 1
    passed = [row["passed"] for row in json.loads(as_json.stdout)["layers"]]
    assert passed == [case is not wrong for case in SMALL_LAYERS]


def test_a_long_run_says_so_before_it_starts(monkeypatch: pytest.MonkeyPatch):
    def too_far(*_: object, **__: object) -> None:
        raise ValueError("far enough")

    monkeypatch.setattr(run, "_made_layer", too_far)
    monkeypatch.setattr(run, "check_call", lambda *_, **__: None)
    long = invoke("--model", "deepseek-v4-pro", "--ranks", "8", "--device", "cpu")
    assert "far enough" in str(long.exception)
    assert re.search(r"this takes about \d\d+ minutes: \d+\.\d billion weights", long.stderr)
    assert "minutes" not in invoke(*TINY, "--device", "cpu").stderr


def test_a_random_layer_is_near_on_every_rank():
    document = ran(*TINY, "--tokens", "9", "--clamp", "10")
    assert document["passed"]
    assert [row["rank"] for row in document["ranks"]] == [0, 1]
    for row in document["ranks"]:
        assert row["num_values"] == 9 * 128
        assert (row["num_wrong"], row["num_wrong_tokens"], row["num_tokens"]) == (0, 0, 9)


@pytest.mark.parametrize(
    "activation", ["swiglu_oai", "situ:beta=2,linear_beta=3", "swiglu:clamp=0.5"]
)
def test_activations_reach_the_call_and_the_reference(activation: str):
    assert ran(*TINY, "--tokens", "9", "--activation", activation)["passed"]


def test_an_exact_layer_needs_an_activation_that_can_be_exact():
    assert ran(*TINY, "--exact", "--activation", "swiglu_oai:limit=100")["passed"]
    result = invoke(*TINY, "--exact", "--activation", "situ")
    assert result.exit_code == 2
    assert "--exact must be without --activation situ" in " ".join(result.output.split())


def test_calls_that_accumulate_are_compared_with_a_reference_that_does():
    assert ran(*TINY, "--exact", "--accumulate", "--tokens", "9")["passed"]


def test_an_exact_layer_is_equal_with_other_tokens_on_each_rank():
    document = ran(*TINY, "--exact", "--ranks", "3", "--tokens", "5,0,17")
    assert [row["num_tokens"] for row in document["ranks"]] == [5, 0, 17]
    assert all(row["num_equal"] == row["num_values"] for row in document["ranks"])
    assert sum(row["num_received"] for row in document["ranks"]) == 22 * 2


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
@pytest.mark.parametrize("kind", ["--exact", "--seed=3"], ids=["exact", "random"])
def test_fp8_weights(kind: str, arch: str):
    document = ran(*TINY, "--tokens", "9", "--weights", "fp8", kind, "--arch", arch)
    assert document["passed"]
    assert document["shape"]["weights"] == "fp8"


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
@pytest.mark.parametrize("kind", ["--exact", "--seed=4"])
def test_biases(kind: str, arch: str):
    document = ran(*TINY, "--tokens", "9", "--biases", kind, "--arch", arch)
    assert document["passed"]
    assert document["shape"]["biases"]


def test_weights_that_there_are_not():
    result = invoke(*TINY, "--weights", "nvfp3")
    assert result.exit_code == 2
    words = " ".join(result.output.replace("│", " ").split())
    assert f"--weights must be one of {', '.join(WEIGHTS)}; got 'nvfp3'" in words


def test_seeds_and_overrides_reach_the_call():
    document = ran(
        *TINY, "--exact", "--override", "block_m=64", "--num-sms", "2", "--schedule-seed", "3"
    )
    assert document["passed"]
    refused = invoke(*TINY, "--override", "block_m=65")
    assert refused.exit_code == 1
    assert "block_m must be one of" in str(refused.exception)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_small_pool_gives_the_same(arch: str):
    options = ["--exact", "--ranks", "1", "--experts", "2", "--tokens", "250", "--arch", arch]
    document = ran(*TINY, *options, "--override", "block_m=64", "--pool-tokens", "384")
    assert document["shape"]["num_pool_tokens"] == 384
    assert document["passed"]


@pytest.mark.parametrize("kind", ["--exact", "--seed=3"], ids=["exact", "random"])
def test_the_sm90_kernel_agrees_with_its_own_reference(kind: str):
    document = ran("--hidden", "384", "--intermediate", "256", kind, "--arch", "sm_90a")
    assert document["arch"] == "sm_90a"
    assert document["passed"]


def test_an_unknown_architecture_is_refused():
    result = invoke(*TINY, "--arch", "sm_80")
    assert result.exit_code == 2
    assert "sm_90a" in result.output


def test_the_table_gives_a_verdict_per_rank():
    result = invoke(*TINY, "--tokens", "2")
    assert result.exit_code == 0
    assert result.stdout.count(" ok") == 2


@pytest.mark.parametrize("kind", [[], ["--exact"]], ids=["random", "exact"])
def test_a_difference_is_a_failure(kind: list[str], monkeypatch: pytest.MonkeyPatch):
    correct = paths.reference_bounds

    def wrong_in_one_row(x: torch.Tensor, *inputs, **options):
        x = x.clone()
        x.view(torch.uint8)[0, :4] = 0x40
        return correct(x, *inputs, **options)

    monkeypatch.setattr(paths, "reference_bounds", wrong_in_one_row)
    result = invoke(*TINY, *kind, "--tokens", "4")
    assert result.exit_code == 1
    assert result.stdout.count("DIFFERENT") == 2
    as_json = invoke(*TINY, *kind, "--tokens", "4", "--json")
    assert as_json.exit_code == 1
    assert [row["num_wrong_tokens"] for row in json.loads(as_json.stdout)["ranks"]] == [1, 1]


def test_a_value_rounded_to_the_neighbouring_e4m3_number_is_not_different():
    sizes = ("--hidden", "512", "--intermediate", "256", "--experts", "8", "--topk", "8")
    document = ran("--arch", "sm_100a", "--ranks", "8", "--tokens", "3", *sizes)
    assert min(row["num_near"] / row["num_values"] for row in document["ranks"]) < 0.999


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
@pytest.mark.parametrize("kind", [[], ["--exact"]], ids=["random", "exact"])
def test_awkward_tokens_in_two_calls_are_right(kind: list[str], arch: str):
    awkward = ("--unused-slots", "1", "--duplicates", "--nan-tokens", "2", "--calls", "2")
    document = ran(*TINY, *kind, *awkward, "--topk", "3", "--tokens", "5", "--arch", arch)
    assert [(row["call"], row["rank"]) for row in document["ranks"]] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    for row in document["ranks"]:
        assert row["num_equal"] < row["num_values"] == 5 * 128  # two tokens are NaN
    assert sum(row["num_received"] for row in document["ranks"]) == 2 * 2 * 5 * 2


def test_slots_that_there_are_not_are_refused():
    assert invoke(*TINY, "--unused-slots", "3").exit_code == 2
    assert invoke(*TINY, "--topk", "1", "--duplicates").exit_code == 2


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    layer = random_layer(MoEShape(1, 4, 2, 256, 128, 1))
    save_experts(tmp_path, {3: (layer.l1, layer.l2)})
    return tmp_path


def test_a_checkpoint_gives_the_sizes(checkpoint: Path):
    document = ran("--checkpoint", str(checkpoint), "--layer", "3", "--tokens", "3")
    assert document["passed"]
    assert document["shape"]["num_experts"] == 4
    assert document["shape"]["hidden"] == 256
    assert document["shape"]["intermediate_hidden"] == 128


def test_an_mxfp4_checkpoint_with_tokens_in_bf16(checkpoint: Path):
    options = ("--checkpoint", str(checkpoint), "--layer", "3", "--tokens", "3")
    document = ran(*options, "--token-format", "bf16", "--arch", "sm_90a")
    assert document["passed"]
    assert document["shape"]["token_format"] == "bf16"
    assert ran(*options, "--token-format", "bf16", "--arch", "sm_100a")["passed"]
    refused = invoke(*options, "--token-format", "fp8_128", "--arch", "sm_100a")
    assert "on sm_100a; got 'fp8_128'" in str(refused.exception)
    refused = invoke(*options, "--weights", "fp8")
    words = " ".join(refused.output.replace("│", "").split())
    assert "--weights must be mxfp4, the format of the checkpoint's experts; got fp8" in words


def test_a_checkpoint_that_does_not_say_how_many_experts_it_has(checkpoint: Path):
    (checkpoint / "config.json").unlink()
    refused = invoke("--checkpoint", str(checkpoint), "--layer", "3")
    assert refused.exit_code == 1
    assert "does not say how many experts" in str(refused.exception)
    document = ran("--checkpoint", str(checkpoint), "--layer", "3", "--experts", "4")
    assert document["passed"]


def test_an_fp8_checkpoint(tmp_path: Path):
    tensors = {}
    for expert in range(2):
        for part, rows, columns in (("gate", 128, 256), ("up", 128, 256), ("down", 256, 128)):
            name = f"model.layers.0.mlp.experts.{expert}.{part}_proj"
            tensors[f"{name}.weight"] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
            tensors[f"{name}.weight_scale_inv"] = torch.full((rows // 128, columns // 128), 0.0625)
    save_file(tensors, tmp_path / "model.safetensors")
    options = ("--checkpoint", str(tmp_path), "--layer", "0", "--experts", "2", "--tokens", "3")
    assert "--weights must be fp8" in " ".join(invoke(*options, "--weights", "bf16").output.split())
    document = ran(*options)
    assert document["passed"]
    assert document["shape"]["weights"] == "fp8"
    assert document["shape"]["hidden"] == 256


@pytest.mark.parametrize(
    ("case", "weights", "token_format"),
    [
        ("nvfp4 modelopt", "nvfp4", "bf16"),
        ("nvfp4 compressed-tensors", "nvfp4", "bf16"),
        ("int4 32", "int4", "bf16"),
        ("w4afp8", "int4", "bf16"),
        ("mxfp8", "mxfp8", "bf16"),
        ("fp8 per row", "fp8", "fp8_token"),
        ("fp8 per matrix modelopt", "fp8", "fp8_token"),
    ],
)
def test_a_checkpoint_of_an_exporter(tmp_path: Path, case: str, weights: str, token_format: str):
    """Its format, and the tokens that go with it, need not be said."""
    write(tmp_path, case)
    options = ("--checkpoint", str(tmp_path), "--layer", "2", "--tokens", "3", "--ranks", "1")
    document = ran(*options, "--arch", "sm_90a")
    assert document["passed"]
    shape = document["shape"]
    assert (shape["weights"], shape["token_format"]) == (weights, token_format)


def test_a_checkpoint_of_experts_without_gate(tmp_path: Path):
    tensors = {}
    for expert in range(2):
        for part, rows, columns in (("up", 128, 256), ("down", 256, 128)):
            name = f"backbone.layers.0.mixer.experts.{expert}.{part}_proj"
            written = nvfp4(rows, columns, is_divided=False)
            tensors |= {name + suffix: tensor for suffix, tensor in written.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    options = ("--checkpoint", str(tmp_path), "--layer", "0", "--experts", "2", "--tokens", "3")
    document = ran(*options, "--arch", "sm_90a")
    assert document["passed"]
    assert document["shape"]["has_gate"] is False
    refused = invoke(*options, "--arch", "sm_90a", "--activation", "swiglu")
    assert "--activation must be one without a gate" in " ".join(refused.output.split())


def test_a_checkpoint_refuses_other_sizes_and_absent_layers(checkpoint: Path):
    assert invoke("--checkpoint", str(checkpoint), "--hidden", "256").exit_code == 2
    absent = invoke("--checkpoint", str(checkpoint), "--layer", "4")
    assert absent.exit_code == 1
    assert "no experts of layer 4" in str(absent.exception)


def gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """As if there were these GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_capability",
        lambda device: capabilities[device if isinstance(device, int) else 0],
    )


H200, B200, A100 = (9, 0), (10, 0), (8, 0)


@pytest.mark.parametrize(
    ("capabilities", "options", "taken"),
    [
        ((), (), ("cpu", 2, "sm_100a")),
        ((H200,), (), ("cuda", 1, "sm_90a")),
        ((B200, B200, B200), (), ("cuda", 2, "sm_100a")),
        ((H200, H200), ("--ranks", "2"), ("cuda", 2, "sm_90a")),
        ((H200,), ("--ranks", "2"), ("cpu", 2, "sm_100a")),
        ((H200,), ("--device", "cpu"), ("cpu", 2, "sm_100a")),
        ((H200,), ("--arch", "sm_100a"), ("cpu", 2, "sm_100a")),
        ((H200,), ("--arch", "sm_90a"), ("cuda", 1, "sm_90a")),
        ((H200,), ("--schedule-seed", "3"), ("cpu", 2, "sm_100a")),
        ((A100,), (), ("cpu", 2, "sm_100a")),
    ],
)
def test_gpus_are_taken_if_there_are_enough(
    capabilities, options, taken, monkeypatch: pytest.MonkeyPatch
):
    gpus(monkeypatch, *capabilities)
    calls = []

    def run_on(device: str):
        def run_ranks(shape, layer, tokens, *, arch, **options):
            calls.append((device, shape.num_ranks, arch))
            raise ValueError("far enough")

        return run_ranks

    monkeypatch.setattr(trial, "run_processes", run_on("cuda"))
    monkeypatch.setattr(trial, "run_emulated_ranks", run_on("cpu"))
    assert str(invoke(*TINY, "--tokens", "1", *options).exception) == "far enough"
    assert calls == [taken]


def test_where_it_ran_is_said():
    assert ran(*TINY, "--tokens", "1", "--device", "cpu")["device"] == "cpu"
    assert "emulated" in invoke(*TINY, "--tokens", "1", "--device", "cpu").stdout


@pytest.mark.slow
def test_a_process_per_rank():
    assert ran(*TINY, "--exact", "--tokens", "3", "--processes")["passed"]


def test_ranks_without_gpus_are_a_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = invoke(*TINY, "--device", "cuda", "--ranks", "2")
    assert result.exit_code == 1
    assert "a GPU for each of 2 ranks; there are 1" in str(result.exception)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_a_checkpoint_like_that_of_gpt_oss(tmp_path: Path, arch: str):
    """Stacked, rows of gate and up in turn, biases, sizes that are no multiples of 128."""
    experts, hidden, intermediate = 4, 96, 160
    tensors = {}
    for part, rows, columns in (
        ("gate_up", 2 * intermediate, hidden),
        ("down", hidden, intermediate),
    ):
        name = f"model.layers.0.mlp.experts.{part}_proj"
        blocks = (experts, rows, columns // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 124, blocks[:3], dtype=torch.uint8)
        tensors[f"{name}_bias"] = torch.randn(experts, rows).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    options = ("--checkpoint", str(tmp_path), "--layer", "0", "--tokens", "9")
    document = ran(*options, "--activation", "swiglu_oai", "--arch", arch)
    assert document["passed"]
    assert document["shape"]["biases"]
    assert document["shape"]["hidden"] == hidden
    assert "--checkpoint decides" in " ".join(invoke(*options, "--biases").output.split())


TWO_DOMAINS = ("--domains", "2", "--ranks", "2", "--num-sms", "2")


@pytest.mark.slow
def test_two_domains_are_compared_with_the_sum_of_their_parts():
    document = ran(*TINY, *TWO_DOMAINS, "--tokens", "9,4", "--chunks", "2", "--unused-slots", "1")
    assert document["domains"] == 2
    assert [row["num_tokens"] for row in document["ranks"]] == [9, 4]
    assert sum(row["num_received"] for row in document["ranks"]) == 13
    exact = ran(*TINY, *TWO_DOMAINS, "--tokens", "9,4", "--exact", "--exact-sizes")
    assert all(row["num_equal"] == row["num_values"] for row in exact["ranks"])


def test_what_two_domains_need():
    result = invoke(*TINY, "--domains", "2", "--ranks", "3")
    assert result.exit_code == 2
    assert "--ranks must be a multiple of --domains 2; got 3" in " ".join(result.output.split())
    result = invoke(*TINY, "--chunks", "2")
    assert result.exit_code == 2
    assert "--exact-sizes need --domains of 2 or more" in " ".join(result.output.split())


SPLIT = ["--path", "split", "--hidden", "256", "--intermediate", "128"]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_split_path_on_awkward_tokens(arch: str):
    awkward = ["--duplicates", "--unused-slots", "1", "--nan-tokens", "1", "--calls", "2"]
    document = ran(*SPLIT, *awkward, "--tokens", "9,17", "--topk", "3", "--arch", arch, "--biases")
    assert document["path"] == "split"
    assert [row["passed"] for row in document["ranks"]] == [True] * 4


def test_the_split_path_of_an_exact_layer_is_equal():
    document = ran(*SPLIT, "--exact", "--tokens", "5,0,17", "--ranks", "3", "--experts", "6")
    assert [row["num_equal"] for row in document["ranks"]] == [5 * 256, 0, 17 * 256]


def test_the_split_path_with_float_scales_of_any_size():
    """As the fused call has them there, and refused where it has not."""
    options = [*SPLIT, "--weights", "fp8", "--token-format", "fp8_128"]
    assert ran(*options, "--arch", "sm_90a", "--tokens", "9,3", "--calls", "2")["passed"]
    refused = invoke(*options, "--arch", "sm_100a")
    assert "token_format must be mxfp8 or fp8_token with fp8 weights on sm_100a" in str(
        refused.exception
    )


def test_the_split_path_with_a_process_per_rank():
    assert ran(*SPLIT, "--processes", "--weights", "bf16", "--num-sms", "2")["passed"]


def test_a_difference_on_the_split_path_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    given = trial.transform_weights_for_mega_moe
    monkeypatch.setattr(
        trial,
        "transform_weights_for_mega_moe",
        lambda l1, l2, **options: given((l1[0].flip(0), l1[1].flip(0)), l2, **options),
    )
    assert invoke(*SPLIT).exit_code == 1


def test_what_the_split_path_does_not_do_is_refused():
    for options, words in (
        (["--shared-experts", "1"], "--shared-experts must be 0 with --path split"),
        (["--max-tokens", "2000"], "num_max_tokens_per_rank must be"),
    ):
        result = invoke(*SPLIT, *options)
        assert result.exit_code != 0
        said = f"{result.output} {result.exception}"
        assert words in " ".join(said.replace("│", " ").split())


THROUGHPUT = ["--path", "throughput", "--hidden", "256", "--intermediate", "128"]


def test_the_throughput_path_on_awkward_tokens():
    awkward = ["--duplicates", "--unused-slots", "1", "--nan-tokens", "1", "--calls", "2"]
    words = ["--tokens", "9,17", "--topk", "3", "--arch", "sm_90a", "--biases"]
    document = ran(*THROUGHPUT, *awkward, *words)
    assert document["path"] == "throughput"
    assert [row["passed"] for row in document["ranks"]] == [True] * 4
    # Each used slot is a row.
    assert sum(row["num_received"] for row in document["ranks"]) == 2 * 2 * (9 + 17)


def test_the_throughput_path_of_an_exact_layer_is_equal():
    words = ["--exact", "--tokens", "5,0,17", "--ranks", "3", "--experts", "6"]
    document = ran(*THROUGHPUT, *words, "--activation", "swiglu_oai", "--arch", "sm_100a")
    assert [row["num_equal"] for row in document["ranks"]] == [5 * 256, 0, 17 * 256]


def test_the_throughput_path_with_a_process_per_rank():
    assert ran(*THROUGHPUT, "--processes", "--weights", "bf16", "--num-sms", "2")["passed"]


def test_the_throughput_path_with_a_float32_scale_per_128_values():
    words = ["--weights", "fp8", "--token-format", "fp8_128", "--arch", "sm_90a"]
    assert ran(*THROUGHPUT, *words, "--tokens", "7")["passed"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shared-experts", "1"], "--shared-experts must be 0 with --path throughput"),
        (["--domains", "2"], "--domains must be 1 with --path throughput"),
        (["--accumulate"], "--accumulate needs --path fused"),
        (["--path", "split", "--recv-rows", "9"], "--recv-rows needs --path throughput"),
        (["--max-tokens", "40000"], "max_tokens_per_rank must be 1 to 32768"),
        (["--recv-rows", "4"], "would get"),
    ],
)
def test_what_the_throughput_path_does_not_do_is_refused(options: list[str], words: str):
    result = invoke(*THROUGHPUT, *options)
    assert result.exit_code != 0
    said = f"{result.output} {result.exception}"
    assert words in " ".join(said.replace("│", " ").split())
