"""What the benchmark of whole models asks of vLLM: its classes take the options, the worker's
methods and the weights. The engine itself needs a GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import vllm_model
from benchmarks.served_model import (
    MXFP4_SCALE_BYTE,
    EngineSettings,
    quantization_of,
    write_config,
)
from benchmarks.vllm_model import (
    ROUTING_VARIABLE,
    VllmModel,
    VllmWorker,
    experts_of_layers,
    make_dummy_weights_random,
)

vllm = pytest.importorskip("vllm", reason="make test-serving installs it")

from .test_vllm import (  # noqa: E402
    INTERMEDIATE,
    NAME,
    checkpoint,
    installed,
    load,
    make_runner,
    world,
)
from .test_vllm_routing import Router, router_of, runner_with  # noqa: E402

__all__ = ["installed"]  # a fixture


class Engine:
    """Of a model that has made two tokens of one request."""

    def __init__(self) -> None:
        self.added: list[Any] = []
        self.engine_core = SimpleNamespace(shutdown=lambda: self.added.append("shut down"))

    def add_request(self, *request: Any) -> None:
        self.added.append(request)

    def step(self) -> list[Any]:
        return [SimpleNamespace(request_id="7", outputs=[SimpleNamespace(token_ids=[5, 6])])]


def test_the_engine_is_made_and_asked_as_vllm_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils.import_utils import resolve_obj_by_qualname

    asked = []

    class Llm:
        def __init__(self, **options: Any) -> None:
            self.options = EngineArgs(**options)
            self.llm_engine = Engine()

        def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
            asked.append((method, *args))
            assert callable(getattr(VllmWorker, method))
            if method == "benchmark_kernel_counts" and args:
                time.sleep(5)
            return ['{"a": 1}', '{"b": 2}']

    monkeypatch.setattr(vllm, "LLM", Llm)
    sizes = {"layers": 2, "experts": 4, "topk": 2, "hidden": 256, "intermediate": 128}
    mxfp4 = quantization_of("mxfp4", 2, in_sglang=False)
    write_config(tmp_path, **sizes, quantization=mxfp4)
    assert json.loads((tmp_path / "config.json").read_text())["num_experts"] == 4
    settings = EngineSettings(
        gpus=2, max_requests=256, step_tokens=None, memory=0.8, commit="abc", weights="mxfp4"
    )
    model = VllmModel(tmp_path, settings)
    options, engine = model._llm.options, model._engine
    assert (options.tensor_parallel_size, options.enable_expert_parallel) == (2, True)
    assert resolve_obj_by_qualname(options.worker_extension_cls) is VllmWorker
    model.add("7", [1, 2, 3], 9)
    (name, prompt, params) = engine.added[0]
    assert (name, prompt["type"], prompt["prompt_token_ids"]) == ("7", "token", [1, 2, 3])
    assert isinstance(params, SamplingParams)
    assert (params.max_tokens, params.output_kind) == (9, RequestOutputKind.DELTA)
    assert model.step() == [("7", 2)]
    assert model.layers() == {"a, GPU 0": 1, "b, GPU 1": 2}
    assert model.kernel_counts() == [{"a": 1}, {"b": 2}]
    assert model.machine() == {"a": 1}
    assert asked[-1] == ("benchmark_machine", "abc")
    model.close()
    assert engine.added[-1] == "shut down"
    monkeypatch.setattr(vllm_model, "ANSWER_TIMEOUT_S", 0.1)
    with pytest.raises(RuntimeError, match=r"did not answer 'kernel_counts' within 0\.1 s"):
        model._ask("kernel_counts", "slowly")
    with pytest.raises(RuntimeError, match="could not answer 'nothing'"):
        model._ask("nothing")


def test_answers_of_a_worker_are_json(monkeypatch: pytest.MonkeyPatch):
    from deep_moe.trial import timing

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    whole = timing.machine
    monkeypatch.setattr(timing, "machine", lambda _, commit: whole(torch.device("cpu"), commit))
    model = torch.nn.Module()
    worker: Any = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    assert json.loads(VllmWorker.benchmark_experts_of_layers(worker)) == {}
    assert set(json.loads(VllmWorker.benchmark_kernel_counts(worker))) == {
        "compiled",
        "read",
        "loaded",
    }
    assert json.loads(VllmWorker.benchmark_machine(worker, "abc"))["commit"] == "abc"


def test_no_method_of_a_worker_is_replaced():
    from vllm.v1.worker.worker_base import WorkerBase

    own = {name for name in vars(VllmWorker) if not name.startswith("__")}
    assert own - {"init_worker_extension"} == {name for name in own if "benchmark" in name}
    assert not own & set(dir(WorkerBase))


@pytest.mark.parametrize("is_routed", [True, False])
def test_who_chooses_experts_is_told(
    is_routed: bool, installed: Any, monkeypatch: pytest.MonkeyPatch
):
    from deep_moe.integrations.vllm import routing

    installed("sm_90a")
    monkeypatch.setattr(vllm_model, "make_dummy_weights_random", lambda: None)
    monkeypatch.setattr(routing, "rule_of", routing.rule_of)
    monkeypatch.setenv(ROUTING_VARIABLE, str(int(is_routed)))
    VllmWorker.init_worker_extension(None)
    with world():
        runner = runner_with(router_of(Router(), None))
        load(runner, "mxfp4", checkpoint("mxfp4"))
        model = torch.nn.Module()
        model.experts = runner
        assert [*experts_of_layers(model).values()] == [
            "deep_moe, routing" if is_routed else "deep_moe"
        ]


@pytest.mark.parametrize("is_ours", [True, False])
def test_made_up_weights_are_random_and_who_runs_them_is_told(
    is_ours: bool, installed: Any, monkeypatch: pytest.MonkeyPatch
):
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    monkeypatch.setattr(DummyModelLoader, "load_weights", DummyModelLoader.load_weights)
    if is_ours:
        installed("sm_90a")
    else:
        monkeypatch.setenv("DEEP_MOE_VLLM", "0")
    filled = []
    fill = vllm_model.fill_randomly
    monkeypatch.setattr(
        vllm_model, "fill_randomly", lambda model: (filled.append(model), fill(model))
    )
    VllmWorker.init_worker_extension(None)
    make_dummy_weights_random()  # as in a process with two models
    with world() as config:
        config.load_config.load_format = "dummy"
        runner = make_runner("mxfp4" if is_ours else "bf16")
        model = torch.nn.Module()
        model.experts = runner
        model.gate = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
        model.norm = torch.nn.RMSNorm(64)
        DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(model, None)
        assert filled == [model]
        assert float(model.gate.weight.detach().float().std()) == pytest.approx(64**-0.5, rel=0.1)
        assert bool((model.norm.weight == 1).all())
        layer = runner.routed_experts
        if is_ours:
            assert (layer.w13_weight.unique().numel(), layer.w13_weight.shape[1]) == (
                256,
                2 * INTERMEDIATE,
            )
            assert layer.w2_weight_scale.unique().tolist() == [MXFP4_SCALE_BYTE]
            layer.quant_method.process_weights_after_loading(layer)
        names = list(experts_of_layers(model).values())
        assert len(names) == 1
        assert (names[0] == "deep_moe") == is_ours, NAME
