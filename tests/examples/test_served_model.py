"""The model that the examples of engines serve, without an engine."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deep_moe.checkpoint import load_experts
from deep_moe.weights import weight_format
from deep_moe.weights.layers import one_expert

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--layers", "1", "--experts", "2", "--topk", "1", "--hidden", "256"]
SMALL += ["--intermediate", "128"]


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As Python runs it, with its neighbours importable."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What a config says, and the scale of blocks of so many values; of gate in the last two cases.
QUANTIZED = {
    "mxfp4": ("mxfp4", ".weight", ".weight_scale", (1, 32)),
    "mxfp4_in_fp8": ("fp8", ".weight", ".weight_scale_inv", (1, 32)),
    "fp8": ("fp8", ".weight", ".weight_scale_inv", (128, 128)),
    "fp8_rows": ("compressed-tensors", ".weight", ".weight_scale", (1, 0)),
    "mxfp8": ("modelopt", ".weight", ".weight_scale", (1, 32)),
    "nvfp4": ("modelopt", ".weight", ".weight_scale", (1, 16)),
    "int4": ("compressed-tensors", ".weight_packed", ".weight_scale", (1, 32)),
}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def values_of(stored: torch.Tensor, weights: str) -> torch.Tensor:
    if stored.dtype == torch.float8_e4m3fn:
        return stored.double()
    packed = stored.view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    return codes.double() - 8 if weights == "int4" else E2M1.double()[codes.long()]


@pytest.mark.parametrize("weights", QUANTIZED)
def test_the_reference_has_the_numbers_of_the_quantized_experts(weights, tmp_path, monkeypatch):
    served_model = example("served_model", monkeypatch)
    assert QUANTIZED.keys() == served_model.FORMATS.keys()
    monkeypatch.setattr(served_model, "VOCABULARY", 64)
    parser = argparse.ArgumentParser()
    served_model.add_model_options(parser)
    served_model.add_engine_options(parser)
    quantized, reference = tmp_path / "a", tmp_path / "b"
    served_model.write_models(quantized, reference, parser.parse_args(SMALL), weights)
    own, expected = (load_file(f / "experts-0.safetensors") for f in (quantized, reference))
    method, weight, suffix, (rows, columns) = QUANTIZED[weights]
    for name, numbers in expected.items():
        stem = name.removesuffix(".weight")
        scales = own[stem + suffix]
        if scales.element_size() == 1 and scales.dtype != torch.float8_e4m3fn:
            scales = torch.exp2(scales.view(torch.uint8).double() - 127)
        factors = scales.double().repeat_interleave(rows, 0)
        factors = factors.repeat_interleave(columns or numbers.shape[1], 1)
        made = values_of(own[stem + weight], weights) * factors
        if weights == "nvfp4":
            made *= own[f"{stem}.weight_scale_2"].double()
        # BF16 holds them, but for products of INT4 and scales, which kernels round, too.
        assert weights == "int4" or torch.equal(made.bfloat16().double(), made)
        assert torch.equal(made.bfloat16(), numbers), name
        assert 0.5 < numbers.float().std() * numbers.shape[1] ** 0.5 < 5
    config = json.loads((quantized / "config.json").read_text())
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == method
    experts = quantization.get("routed_experts_quant_method")
    assert experts == ("mxfp4" if weights == "mxfp4_in_fp8" else None)
    assert "quantization_config" not in json.loads((reference / "config.json").read_text())


@pytest.mark.parametrize("weights", QUANTIZED)
def test_experts_load_as_a_checkpoint(weights, tmp_path, monkeypatch):
    served_model = example("served_model", monkeypatch)
    monkeypatch.setattr(served_model, "VOCABULARY", 64)
    parser = argparse.ArgumentParser()
    served_model.add_model_options(parser)
    served_model.add_engine_options(parser)
    folders = tmp_path / "a", tmp_path / "b"
    served_model.write_models(*folders, parser.parse_args(SMALL), weights)
    loaded = load_experts(folders[0], 0)
    reference = load_file(folders[1] / "experts-0.safetensors")
    down = reference["model.layers.0.mlp.experts.1.down_proj.weight"]
    made = weight_format(weights.split("_")[0]).dequantize(one_expert(loaded.l2, 1))
    assert torch.equal(made.bfloat16(), down)


def test_new_weights_are_another_model(tmp_path, monkeypatch):
    served_model = example("served_model", monkeypatch)
    monkeypatch.setattr(served_model, "VOCABULARY", 64)
    parser = argparse.ArgumentParser()
    served_model.add_model_options(parser)
    served_model.add_engine_options(parser)
    models = [tmp_path / "a", tmp_path / "b"]
    arguments = parser.parse_args([*SMALL, "--new-weights"])
    served_model.write_models(*models, arguments, "mxfp4")
    for model in models:
        for file in ("experts-0.safetensors", "rest.safetensors"):
            old, new = (load_file(folder / file) for folder in (model, served_model.after(model)))
            assert {name: (t.shape, t.dtype) for name, t in old.items()} == {
                name: (t.shape, t.dtype) for name, t in new.items()
            }
            equal = {name for name in old if torch.equal(old[name], new[name])}
            assert all("norm" in name for name in equal)


CHILD = """
import json, os, sys
print("model.layers.0.mlp.experts: experts run by deep_moe (mxfp4)")
print("Rearranged experts  (profile)  in 0.01 s.")
print("Rearranged experts   in 0.02 s.")
rank = int(os.environ["RANK_OF_TEST"])
if os.environ.get("FAILS") == "1":
    if rank == 1 and "SIGNAL_OF_TEST" in os.environ:
        os.kill(os.getpid(), int(os.environ["SIGNAL_OF_TEST"]))
    if rank == 1:
        sys.exit(3)
    import time; time.sleep(600)
out = sys.argv[sys.argv.index("--out") + 1]
json.dump({"prompts": [[rank - 1.0, -3.0]], "tokens": [[1]], "decoded": [[-1.0]], "read": [[-1.0]]},
          open(out, "w"))
if os.environ.get("ABORTS") == "1":
    sys.stdout.flush()
    os.abort()
if os.environ.get("STAYS") == "1":
    sys.stdout.flush()
    import time; time.sleep(600)
"""


def test_children_are_run_together_and_compared(tmp_path, monkeypatch, capsys):
    served_model = example("served_model", monkeypatch)
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(sys, "argv", [str(script), "--layers", "1"])
    environments = [{"RANK_OF_TEST": str(rank)} for rank in range(2)]
    run = served_model.run_child("deep_moe", tmp_path / "model", environments, "an engine")
    assert run["prompts"] == [[-1.0, -3.0], [0.0, -3.0]]
    assert len(run["paths"]) == 2
    assert run["moves"] == ["Rearranged experts   in 0.02 s."] * 2
    runs = {"reference": run, "deep_moe": run}
    assert served_model.report(runs, "deep_moe", 1, moves_experts=True) == 0
    kept = runs | {"deep_moe": run | {"moves": []}}
    assert served_model.report(kept, "deep_moe", 1) == 0
    assert served_model.report(kept, "deep_moe", 1, moves_experts=True) == 1
    assert "deep_moe: no experts were moved" in capsys.readouterr().out
    assert served_model.report(runs, "deep_moe", 1) == 0
    assert served_model.report(runs, "deep_moe", 2) == 1
    assert "deep_moe ran 1 of 2 layers" in capsys.readouterr().out
    far = run | {"prompts": [[-2.0, -3.0], [0.0, -3.0]]}
    assert served_model.report(runs | {"an engine": far}, "deep_moe", 1) == 0
    assert served_model.report(runs | {"deep_moe": far}, "deep_moe", 1) == 1
    assert "deep_moe is further from the reference than 0.1" in capsys.readouterr().out
    # After other weights: ours has not got them.
    kept = served_model.with_new_weights({"prompts": run["prompts"]})
    replaced = served_model.with_new_weights({"prompts": far["prompts"]})
    runs = {"reference": run | replaced, "deep_moe": run | replaced}
    assert served_model.report(runs, "deep_moe", 1, new_weights=True) == 0
    assert capsys.readouterr().out.count("mean difference to reference") == 2
    runs["deep_moe"] = run | kept
    assert served_model.report(runs, "deep_moe", 1) == 0
    assert served_model.report(runs, "deep_moe", 1, new_weights=True) == 1
    # As an engine may end whose threads outlive it.
    monkeypatch.setitem(os.environ, "ABORTS", "1")
    assert served_model.run_child("deep_moe", tmp_path / "model", environments, "an engine") == run
    monkeypatch.setitem(os.environ, "ABORTS", "0")
    # Or one that does not end.
    monkeypatch.setattr(served_model, "END_S", 0.5)
    monkeypatch.setitem(os.environ, "STAYS", "1")
    assert served_model.run_child("deep_moe", tmp_path / "model", environments, "an engine") == run
    monkeypatch.setitem(os.environ, "FAILS", "1")
    with pytest.raises(SystemExit, match="an engine ended with exit status 3"):
        served_model.run_child("deep_moe", tmp_path / "model", environments, "an engine")
    # Not that of the one that is ended for it.
    monkeypatch.setitem(os.environ, "SIGNAL_OF_TEST", str(int(signal.SIGSEGV)))
    with pytest.raises(SystemExit, match="an engine ended with exit status -11"):
        served_model.run_child("deep_moe", tmp_path / "model", environments, "an engine")


def test_more_runs_have_their_variables(monkeypatch, capsys):
    served_model = example("served_model", monkeypatch)
    parser = argparse.ArgumentParser()
    served_model.add_model_options(parser)
    words = ["--also", "A=1", "--also", "B=low=2"]
    assert served_model.own_runs(parser.parse_args(words)) == {
        "deep_moe": {},
        "deep_moe, A=1": {"A": "1"},
        "deep_moe, B=low=2": {"B": "low=2"},
    }
    with pytest.raises(SystemExit):
        parser.parse_args(["--also", "A"])
    assert "must be VARIABLE=VALUE; got 'A'" in capsys.readouterr().err


class SleepingLlm:
    """vLLM's, which forgets its weights at level 2, until they are loaded."""

    def __init__(self, **options: Any) -> None:
        assert options["enable_sleep_mode"]
        self.calls: list[Any] = []
        self.shift = 0.0

    def sleep(self, level: int) -> None:
        self.calls.append(level)
        self.shift = 1.0 if level == 2 else self.shift

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(tags)

    def collective_rpc(self, method: str, kwargs: dict[str, str]) -> None:
        assert method == "reload_weights"
        self.shift = float(os.environ.get("SHIFT_OF_TEST", "0"))

    def generate(self, prompts: list[dict[str, list[int]]], options: Any) -> list[Any]:
        def step(token: int) -> dict[int, Any]:
            return {token: SimpleNamespace(logprob=self.shift - token / 1000)}

        new = SimpleNamespace(token_ids=[1, 2], logprobs=[step(1), step(2)])
        return [
            SimpleNamespace(
                prompt_logprobs=[step(t) for t in one["prompt_token_ids"]], outputs=[new]
            )
            for one in prompts
        ]


@pytest.mark.parametrize("num_layers", [1, 2])
def test_deep_moe_alone_is_one_start(num_layers, monkeypatch, capsys):
    serve_vllm = example("serve_vllm", monkeypatch)
    monkeypatch.setattr(serve_vllm, "write_models", lambda *_: None)
    started = []

    def run(name: str, model: Path, arguments: Any, variables: dict[str, str]) -> Any:
        started.append((name, model.name, variables))
        return {"paths": ["model.layers.0.mlp.experts: experts run by deep_moe (mxfp4)"]}

    monkeypatch.setattr(serve_vllm, "run", run)
    monkeypatch.setattr(sys, "argv", ["x", "--alone", "--layers", str(num_layers)])
    assert serve_vllm.main() == num_layers - 1
    assert started == [("deep_moe", "mxfp4", {"DEEP_MOE_VLLM": "1"})]
    assert ("deep_moe ran 1 of 2 layers" in capsys.readouterr().out) == (num_layers == 2)


@pytest.mark.parametrize(("shift", "found"), [("0", [0.0, 0.0]), ("0.25", [0.0, 0.25])])
def test_an_engine_that_sleeps_is_asked_again(shift, found, tmp_path, monkeypatch):
    serve_vllm = example("serve_vllm", monkeypatch)
    envs = SimpleNamespace(VLLM_DP_RANK=0)
    fake = SimpleNamespace(LLM=SleepingLlm, SamplingParams=lambda **_: None, envs=envs)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setenv("DEEP_MOE_VLLM", "1")
    monkeypatch.setenv("SHIFT_OF_TEST", shift)
    out = tmp_path / "out.json"
    words = [
        "--sleep",
        "--new-tokens",
        "2",
        "--prompts",
        "2",
        "--serve",
        "model",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", ["serve_vllm.py", *words])
    assert serve_vllm.main() == 0
    served = json.loads(out.read_text())
    assert served["slept"] == found
    if shift == "0":
        serve_vllm.check_slept("deep_moe", served)
    else:
        with pytest.raises(SystemExit, match=r"deep_moe: after sleep at level 2, .* by 0.25, more"):
            serve_vllm.check_slept("deep_moe", served)
