"""A whole model in SGLang for benchmarks: of random weights that are made where they lie, with its
experts run by deep_moe or by the kernel that SGLang chooses."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from .served_model import MAX_MODEL_LEN, EngineSettings, fill_randomly

STEP_TOKENS = 8192  # most of a step
MAX_TOKENS_VARIABLE = "SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK"
REPORT = "benchmark_report"


def engine_options(folder: Path, settings: EngineSettings, *, is_ours: bool) -> dict[str, Any]:
    """Of `sglang.Engine`: SGLang's defaults, and what all engines have in common."""
    given = {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "context_length": MAX_MODEL_LEN,
        "max_running_requests": settings.max_requests,
        "chunked_prefill_size": settings.step_tokens or STEP_TOKENS,
        "mem_fraction_static": settings.memory,
        "disable_radix_cache": True,
        "stream_interval": 1,
        "tp_size": settings.gpus,
    }
    if is_ours:
        return given | {
            "ep_size": settings.gpus,
            "moe_a2a_backend": "megamoe",
            "moe_runner_backend": "deep_gemm",
        }
    # What SGLang chooses by itself for this format reads experts in FP8.
    return given | ({"moe_runner_backend": "marlin"} if settings.weights == "mxfp4" else {})


class SglangModel:
    """SGLang's engine with the model in `folder`, asked for tokens step by step. Attention is
    spread over GPUs by heads."""

    name = "SGLang"

    def __init__(self, folder: Path, settings: EngineSettings) -> None:
        is_ours = os.environ["DEEP_MOE_SGLANG"] == "1"
        options = engine_options(folder, settings, is_ours=is_ours)
        os.environ[MAX_TOKENS_VARIABLE] = str(options["chunked_prefill_size"])
        self._folder = folder
        self._gpus = settings.gpus
        self._commit = settings.commit
        self._names: dict[str, str] = {}  # of requests, by SGLang's names
        self._ids = map(str, count())
        self._tasks: set[asyncio.Task[None]] = set()
        self._steps: asyncio.Queue[list[tuple[str, int]] | Exception] = asyncio.Queue()
        add_plugin(folder)
        import sglang

        started = perf_counter()
        self._engine = sglang.Engine(**options)
        self.start_seconds = perf_counter() - started
        manager = self._engine.tokenizer_manager
        manager._handle_batch_output = partial(self._note, manager._handle_batch_output)

    async def _note(self, handle: Callable[[Any], Any], output: Any) -> None:
        """One message for each step of the model."""
        await handle(output)
        self._steps.put_nowait(
            [
                (self._names[request], len(tokens))
                for request, tokens in zip(output.rids, output.output_ids, strict=True)
            ]
        )

    def add(self, name: str, prompt: Sequence[int], new_tokens: int) -> None:
        """A request from now on."""
        request = next(self._ids)
        self._names[request] = name
        task = self._engine.loop.create_task(self._serve(request, [*prompt], new_tokens))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, request: str, prompt: list[int], new_tokens: int) -> None:
        try:
            made = await self._engine.async_generate(
                input_ids=prompt,
                sampling_params={
                    "temperature": 0,
                    "max_new_tokens": new_tokens,
                    "ignore_eos": True,
                },
                rid=request,
                stream=True,
            )
            async for _ in made:
                pass
        except Exception as error:
            self._steps.put_nowait(error)

    def step(self) -> list[tuple[str, int]]:
        """Wait for what one step of the model makes: requests by name, and how many new tokens each
        of them has."""
        made = self._engine.loop.run_until_complete(self._steps.get())
        if isinstance(made, Exception):
            raise RuntimeError("SGLang did not serve a request") from made
        return made

    def layers(self) -> dict[str, str]:
        """Who runs the experts of each layer, on every GPU; see `experts_of_layers`."""
        said = enumerate(self._ask())
        return {f"{name}, GPU {i}": who for i, own in said for name, who in own["layers"].items()}

    def kernel_counts(self) -> list[dict[str, int]]:
        """Of each GPU's process: the kernels that deep_moe compiled, read and loaded until now."""
        return [own["kernels"] for own in self._ask()]

    def machine(self) -> dict[str, Any]:
        """What is measured on, and with."""
        found: dict[str, Any] = self._ask()[0]["machine"]
        return found

    def _ask(self) -> list[dict[str, Any]]:
        """What `report` says in each GPU's process."""
        stem = self._folder / "answer"
        self._engine.collective_rpc(REPORT, stem=str(stem), commit=self._commit)
        return [json.loads(Path(f"{stem}-{i}").read_text()) for i in range(self._gpus)]

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()


def add_plugin(folder: Path) -> None:
    """Let SGLang find `register` in this process and those that it starts: as a distribution on
    the path has it."""
    path = Path(tempfile.mkdtemp(dir=folder))
    info = path / "deep_moe_benchmark-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deep_moe_benchmark\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\ndeep_moe_benchmark = {__name__}:register\n"
    )
    sys.path.insert(0, str(path))


def register() -> None:
    """SGLang's plugin: the adapter, which a checkout does not register, random weights, and answers
    to this process's questions."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from deep_moe.integrations.sglang import register as register_adapter

    register_adapter()
    for target, hook in (
        ("sglang.srt.model_loader.loader.initialize_dummy_weights", fill),
        ("sglang.srt.managers.scheduler.Scheduler.handle_rpc_request", answer),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)


def fill(original: Callable[..., None], model: torch.nn.Module, *others: Any, **more: Any) -> None:
    original(model, *others, **more)
    fill_randomly(model)


def answer(original: Callable[[Any, Any], Any], scheduler: Any, request: Any) -> Any:
    """SGLang calls the scheduler's method of the name that the request has."""
    if request.method == REPORT:
        model = scheduler.tp_worker.model_runner.model
        setattr(scheduler, REPORT, partial(report, model))
    return original(scheduler, request)


def report(model: torch.nn.Module, stem: str, commit: str | None) -> None:
    from deep_moe import jit
    from deep_moe.trial.timing import machine

    device = torch.device("cuda", torch.cuda.current_device())
    rank = torch.distributed.get_rank()
    said = {
        "layers": experts_of_layers(model),
        "kernels": jit.kernel_counts()._asdict(),
        "machine": machine(device, commit),
    }
    Path(f"{stem}-{rank}").write_text(json.dumps(said))


def experts_of_layers(model: torch.nn.Module) -> dict[str, str]:
    """Who runs the experts of each layer: "deep_moe", or the name of SGLang's method."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    from deep_moe.integrations.sglang.hooks import served_of

    return {
        name: type(module.quant_method).__name__ if served_of(module) is None else "deep_moe"
        for name, module in model.named_modules()
        if isinstance(module, FusedMoE)
    }
