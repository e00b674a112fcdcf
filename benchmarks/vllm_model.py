"""A whole model in vLLM for benchmarks: of random weights that are made where they lie, with its
experts run by deep_moe or by the kernel that vLLM chooses."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import torch

from .served_model import MAX_MODEL_LEN, EngineSettings, fill_randomly

ANSWER_TIMEOUT_S = 60  # of a question to an engine's workers, which is answered in a second
# 0: vLLM's own kernel chooses experts, in front of our layers.
ROUTING_VARIABLE = "DEEP_MOE_BENCHMARK_ROUTING"


class VllmModel:
    """vLLM's engine with the model in `folder`, asked for tokens step by step. Attention is spread
    over GPUs by heads, and experts by expert parallelism."""

    name = "vLLM"

    def __init__(self, folder: Path, settings: EngineSettings) -> None:
        from vllm import LLM, SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        started = time.perf_counter()
        llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=settings.max_requests,
            max_num_batched_tokens=settings.step_tokens,
            gpu_memory_utilization=settings.memory,
            enable_prefix_caching=False,
            tensor_parallel_size=settings.gpus,
            enable_expert_parallel=settings.gpus > 1,
            worker_extension_cls=f"{VllmWorker.__module__}.{VllmWorker.__name__}",
        )
        self.start_seconds = time.perf_counter() - started
        self._llm = llm
        self._engine = llm.llm_engine
        self._commit = settings.commit
        self._tokens_input = tokens_input
        self._options = partial(
            SamplingParams,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def add(self, name: str, prompt: Sequence[int], new_tokens: int) -> None:
        """A request from now on."""
        options = self._options(max_tokens=new_tokens)
        self._engine.add_request(name, self._tokens_input([*prompt]), options)

    def step(self) -> list[tuple[str, int]]:
        """Wait for what one step of the model makes: requests by name, and how many new tokens each
        of them has."""
        return [
            (output.request_id, len(output.outputs[0].token_ids)) for output in self._engine.step()
        ]

    def layers(self) -> dict[str, str]:
        """Who runs the experts of each layer, on every GPU; see `experts_of_layers`."""
        said = self._ask("experts_of_layers")
        return {f"{name}, GPU {i}": who for i, own in enumerate(said) for name, who in own.items()}

    def kernel_counts(self) -> list[dict[str, int]]:
        """Of each GPU's process: the kernels that deep_moe compiled, read and loaded until now."""
        return self._ask("kernel_counts")

    def machine(self) -> dict[str, Any]:
        """What is measured on, and with."""
        found: dict[str, Any] = self._ask("machine", self._commit)[0]
        return found

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        """Raises RuntimeError if no answer comes: an engine that fails on one may say nothing."""
        answers: Queue[Any] = Queue()

        def ask() -> None:
            try:
                answers.put(self._llm.collective_rpc(f"benchmark_{name}", args=arguments))
            except Exception as error:
                answers.put(error)

        Thread(target=ask, daemon=True).start()
        try:
            answer = answers.get(timeout=ANSWER_TIMEOUT_S)
        except Empty:
            raise RuntimeError(
                f"vLLM's workers did not answer {name!r} within {ANSWER_TIMEOUT_S} s"
            ) from None
        if isinstance(answer, Exception):
            raise RuntimeError(f"vLLM's workers could not answer {name!r}") from answer
        return [json.loads(one) for one in answer]

    def close(self) -> None:
        """End the engine's processes."""
        with suppress(AttributeError):  # an engine in this process has none
            self._engine.engine_core.shutdown()


class VllmWorker:
    """What a vLLM worker's class gets beside its own methods. Answers are JSON: vLLM's messages
    take no other types than its own, and its engine hangs on one that they do not take."""

    @staticmethod
    def init_worker_extension(worker: Any) -> None:
        """Before the model is made. A checkout has no entry point by which vLLM would find the
        adapter; an installed deep_moe is registered already, and twice does not matter."""
        from deep_moe.integrations.vllm import register

        register()
        if os.environ.get(ROUTING_VARIABLE) == "0":
            leave_routers_to_vllm()
        make_dummy_weights_random()

    def benchmark_experts_of_layers(self) -> str:
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return json.dumps(experts_of_layers(model))

    def benchmark_kernel_counts(self) -> str:
        from deep_moe import jit

        return json.dumps(jit.kernel_counts()._asdict())

    def benchmark_machine(self, commit: str | None) -> str:
        from deep_moe.trial.timing import machine

        return json.dumps(machine(torch.device("cuda", torch.cuda.current_device()), commit))


def leave_routers_to_vllm() -> None:
    """From now on, no rule of a router is computed where tokens are prepared."""
    from deep_moe.integrations.vllm import routing

    routing.rule_of = lambda router: None


def experts_of_layers(model: torch.nn.Module) -> dict[str, str]:
    """Who runs the experts of each layer: "deep_moe", with a word more where it chooses them, too,
    or the name of vLLM's class."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from deep_moe.integrations.vllm.routed_experts import DeepMoEMethod
    from deep_moe.integrations.vllm.routing import PreparationRouting

    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, RoutedExperts):
            continue
        method = module.quant_method
        if isinstance(method, DeepMoEMethod):
            runner = method.runners.get(module.layer_name)
            routing = None if runner is None else runner.router._compute_routing
            routes = isinstance(routing, PreparationRouting)
            found[name] = "deep_moe, routing" if routes else "deep_moe"
        else:
            kernel = getattr(method, "moe_kernel", None)
            experts = method if kernel is None else kernel.fused_experts
            found[name] = type(experts).__name__
    return found


def make_dummy_weights_random() -> None:
    """From now on, vLLM's loader of made-up weights gives this process's models weights as trained
    ones are spread. Its own are so small that a router's choices follow from the token alone."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    vllms = DummyModelLoader.load_weights
    if vllms.__module__ == __name__:
        return

    def load_weights(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        vllms(self, model, model_config)
        fill_randomly(model)

    load_weights.__module__ = __name__
    DummyModelLoader.load_weights = load_weights
