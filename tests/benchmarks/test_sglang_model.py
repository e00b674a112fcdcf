"""How whole models in SGLang are asked, with an engine that is none. tests/serving looks at the
names in SGLang's own source."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import served_model, sglang_model
from benchmarks.served_model import (
    FP8_SCALE,
    MXFP4_SCALE_BYTE,
    EngineSettings,
    fill_randomly,
    quantization_of,
)
from benchmarks.sglang_model import MAX_TOKENS_VARIABLE, SglangModel, add_plugin, engine_options

SETTINGS = EngineSettings(
    gpus=2, max_requests=256, step_tokens=None, memory=0.8, commit="abc", weights="fp8"
)


class Manager:
    async def _handle_batch_output(self, output: Any) -> None:
        self.handled = output


class Engine:
    """Makes a token of each request that runs in a step, all in one message."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = Manager()
        self.left: dict[str, int] = {}
        self.asked: list[Any] = []

    async def async_generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], rid: str, stream: bool
    ) -> Any:
        assert stream
        assert sampling_params["ignore_eos"]
        if not input_ids:
            raise ValueError("a prompt must not be empty")
        self.left[rid] = sampling_params["max_new_tokens"]

        async def made() -> Any:
            while rid in self.left:
                await self.step(rid)
                yield {}

        return made()

    async def step(self, rid: str) -> None:
        for _ in range(3):  # until the others have come
            await asyncio.sleep(0)
        if rid == next(iter(self.left), None):
            rids = list(self.left)
            for one in rids:
                self.left[one] -= 1
                if self.left[one] == 0:
                    del self.left[one]
            output = SimpleNamespace(rids=rids, output_ids=[[7]] * len(rids))
            await self.tokenizer_manager._handle_batch_output(output)

    def collective_rpc(self, method: str, stem: str, commit: str | None) -> None:
        self.asked.append((method, commit))
        for rank in range(self.options["tp_size"]):
            said = {"layers": {"a": "deep_moe"}, "kernels": {"read": rank}, "machine": {"gpu": "x"}}
            Path(f"{stem}-{rank}").write_text(json.dumps(said))

    def shutdown(self) -> None:
        self.asked.append("shut down")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SglangModel:
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=Engine))  # type: ignore[arg-type]
    monkeypatch.setenv("DEEP_MOE_SGLANG", "1")
    monkeypatch.setenv(MAX_TOKENS_VARIABLE, "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return SglangModel(tmp_path, SETTINGS)


def test_a_step_is_a_message_of_the_scheduler(model: SglangModel):
    for name, new_tokens in (("0", 2), ("1", 1)):
        model.add(name, [1, 2, 3], new_tokens)
    assert model.step() == [("0", 1), ("1", 1)]
    model.add("1", [4], 1)  # a name may come again
    made = [model.step() for _ in range(2)]
    assert sorted(one for step in made for one in step) == [("0", 1), ("1", 1)]
    assert model._engine.tokenizer_manager.handled.output_ids == [[7]]
    model.add("2", [], 1)
    with pytest.raises(RuntimeError, match="did not serve a request"):
        model.step()


def test_answers_come_from_every_gpu(model: SglangModel):
    assert model.layers() == {"a, GPU 0": "deep_moe", "a, GPU 1": "deep_moe"}
    assert model.kernel_counts() == [{"read": 0}, {"read": 1}]
    assert model.machine() == {"gpu": "x"}
    assert model._engine.asked[-1] == ("benchmark_report", "abc")
    model.close()
    assert model._engine.asked[-1] == "shut down"


def test_options_of_ours_and_of_sglangs_own_choice(tmp_path: Path):
    def options(weights: str, *, is_ours: bool) -> dict[str, Any]:
        return engine_options(tmp_path, replace(SETTINGS, weights=weights), is_ours=is_ours)

    ours, own, marlin = (
        options("fp8", is_ours=True),
        options("fp8", is_ours=False),
        options("mxfp4", is_ours=False),
    )
    assert (ours["moe_a2a_backend"], ours["ep_size"]) == ("megamoe", 2)
    assert ours == own | {name: ours[name] for name in ours.keys() - own.keys()}
    assert "moe_runner_backend" not in own
    assert marlin["moe_runner_backend"] == "marlin"


def test_sglang_finds_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    add_plugin(tmp_path)
    found = entry_points(group="sglang.srt.plugins", name="deep_moe_benchmark")
    assert [one.load() for one in found] == [sglang_model.register]


def test_the_plugin_fills_weights_and_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    hooks: dict[str, Any] = {}
    registry = ModuleType("hook_registry")
    registry.HookType = SimpleNamespace(AROUND="around")  # type: ignore[attr-defined]
    registry.HookRegistry = SimpleNamespace(  # type: ignore[attr-defined]
        register=lambda target, hook, kind: hooks.update({target.rpartition(".")[2]: hook})
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    monkeypatch.setattr("deep_moe.integrations.sglang.register", lambda: hooks.update(adapter=1))
    sglang_model.register()
    assert hooks["adapter"]
    layer = torch.nn.Linear(64, 32)
    filled = []
    hooks["initialize_dummy_weights"](filled.append, layer)
    assert filled == [layer]
    assert float(layer.weight.detach().std()) == pytest.approx(64**-0.5, rel=0.1)
    monkeypatch.setattr(sglang_model, "report", lambda model, stem, commit: (model, stem, commit))
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=layer))
    scheduler: Any = SimpleNamespace(tp_worker=runner)

    def sglangs(self: Any, request: Any) -> Any:
        return getattr(self, request.method)(**request.parameters)

    request = SimpleNamespace(
        method="benchmark_report", parameters={"stem": str(tmp_path), "commit": None}
    )
    answer = hooks["handle_rpc_request"]
    assert answer(sglangs, scheduler, request) == (layer, str(tmp_path), None)


@pytest.mark.parametrize("weights", served_model.WEIGHTS)
def test_made_up_experts_have_numbers(weights: str):
    model = torch.nn.Module()
    packed = torch.int8 if weights == "mxfp4" else torch.float8_e4m3fn
    scale = torch.float32 if weights == "fp8" else torch.float8_e8m0fnu
    for name, tensor in (
        ("w13_weight", torch.zeros(2, 256, 128).to(packed)),
        ("w13_weight_scale_inv", torch.ones(2, 2, 8).to(scale)),
    ):
        model.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    fill_randomly(model)
    codes = model.w13_weight.view(torch.uint8)
    if weights == "fp8":
        assert codes.unique().numel() == 128
        assert bool((model.w13_weight.float().abs() < 2).all())
        assert model.w13_weight_scale_inv.unique().tolist() == [FP8_SCALE]
    else:
        assert codes.unique().numel() == 256
        scales = model.w13_weight_scale_inv.view(torch.uint8)
        assert scales.unique().tolist() == [MXFP4_SCALE_BYTE]
        # SGLang may keep them as numbers.
        wide = torch.nn.Parameter(torch.ones(2, 2, 8), requires_grad=False)
        model.w13_weight_scale_inv = wide
        fill_randomly(model)
        assert wide.unique().tolist() == [2.0 ** (MXFP4_SCALE_BYTE - 127)]


def test_experts_alone_are_quantized():
    assert quantization_of("mxfp4", 2, in_sglang=False) == {"quant_method": "mxfp4"}
    fp8, mxfp4 = (quantization_of(one, 2, in_sglang=True) for one in ("fp8", "mxfp4"))
    assert mxfp4 == fp8 | {"routed_experts_quant_method": "mxfp4"}
    assert quantization_of("fp8", 2, in_sglang=False) == fp8
    assert "model.layers.1.mlp.gate" in fp8["ignored_layers"]
    assert not any("experts" in name for name in fp8["ignored_layers"])
