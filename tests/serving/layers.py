"""One layer of experts of an engine, with all that drawn tests do to it, for vLLM and SGLang
alike."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from deep_moe.errors import DeepMoEError
from deep_moe.integrations import served_experts

from . import test_sglang as sglang
from . import test_sglang_formats as sglang_formats
from . import test_sglang_loading as sglang_loading
from . import test_vllm as vllm
from . import test_vllm_formats as vllm_formats

X, LOGITS = vllm.tokens(5)
PLAIN = ("mxfp4", "fp8", "bf16")  # that `test_vllm` and `test_sglang` load
# Made once: numbers that are drawn depend on torch's default type.
vllm_parts, sglang_parts = cache(vllm_formats.made_parts), cache(sglang_formats.made_parts)
plain = cache(vllm.checkpoint)


class Left(Exception):  # noqa: N818
    """To the engine, whose own way ends here: it may read memory that is not there."""


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if record.levelno == logging.WARNING:
            raise Left


@contextlib.contextmanager
def lines_of(logger: str) -> Iterator[list[str]]:
    handler, of = Lines(), logging.getLogger(logger)
    level = of.level
    of.addHandler(handler)
    of.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        of.setLevel(level)
        of.removeHandler(handler)


class VllmLayer:
    """Loaded, and not yet taken. config: of `test_vllm.world`."""

    FORMS = (*vllm_formats.CASES, *PLAIN)

    def __init__(self, form: str, config: Any, seed: int = 0) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        self.form, self.config = form, config
        config.compilation_config.static_forward_context.clear()
        make = vllm if form in PLAIN else vllm_formats
        self.runner = make.make_runner(form, swiglu_limit=1.0)
        self.module = self.runner.routed_experts
        self.names = self.module.quant_method.form.tensors
        layerwise.record_metadata_for_reloading(self.runner)
        self.load(seed)

    def load(self, seed: int) -> None:
        """Parts of a checkpoint, by vLLM's loaders."""
        if self.form in PLAIN:
            vllm.load_parts(self.runner, self.form, plain(self.form, seed))
        else:
            vllm_formats.load_parts(self.runner, vllm_parts(self.form, seed))

    def take(self) -> str | None:
        """Lets the adapter take the layer; the reason if it did not."""
        method = self.module.quant_method
        with lines_of("vllm.deep_moe") as lines, contextlib.suppress(Left):
            method.process_weights_after_loading(self.module)
        assert len(lines) == 1, lines
        return None if "experts run by deep_moe" in lines[0] else lines[0]

    def output(self, x: torch.Tensor = X, logits: torch.Tensor = LOGITS) -> torch.Tensor:
        return vllm.forward(self.runner, self.config, x, logits)

    def reload(self, seed: int) -> None:
        """As `reload_weights` does."""
        from vllm.model_executor.model_loader.reload import layerwise

        layerwise.initialize_layerwise_reload(self.runner)
        self.load(seed)
        layerwise.finalize_layerwise_reload(self.runner, None)


class SglangLayer:
    """The same of SGLang. module: what `test_sglang.started` gave."""

    FORMS = (*sglang_formats.CASES, *PLAIN[:2])

    def __init__(self, form: str, mega_moe: Any, seed: int = 0) -> None:
        self.form, self.mega_moe = form, mega_moe
        if form in PLAIN:
            self.module = sglang.empty_layer(form, swiglu_limit=1.0)
        else:
            self.module = sglang_formats.layer_of(form)
        self.names = sglang_loading.loading.tensors_of(self.module)
        self.load(seed)

    def load(self, seed: int) -> None:
        if self.form in PLAIN:
            sglang.load(self.module, self.form, plain(self.form, seed))
        else:
            sglang_formats.load(self.module, sglang_parts(self.form, seed))

    def take(self) -> str | None:
        with lines_of("sglang.deep_moe") as lines, contextlib.suppress(Left):
            self.module.quant_method.process_weights_after_loading(self.module)
        assert len(lines) == 1, lines
        return None if "experts run by deep_moe" in lines[0] else lines[0]

    def output(self, x: torch.Tensor = X, logits: torch.Tensor = LOGITS) -> torch.Tensor:
        return sglang.forward(self.mega_moe, sglang.block(self.module), x, logits)

    def reload(self, seed: int) -> None:
        """As updates of weights do."""
        model = torch.nn.ModuleDict({"experts": self.module})
        server = sglang_loading.Server(model)
        assert server.manager.begin_weight_update(sglang_loading._request()).success
        self.module.quant_method.restore_weights_before_loading(self.module)
        self.load(seed)
        answer = server.manager.end_weight_update(sglang_loading._request())
        if not answer.success:
            raise DeepMoEError(answer.message)


Layer = VllmLayer | SglangLayer
FORMS = [("vllm", form) for form in VllmLayer.FORMS] + [
    ("sglang", form) for form in SglangLayer.FORMS
]


@pytest.fixture
def make_layers(
    installed: Any, some_backend: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], Callable[..., Layer]]]:
    """By an engine's name and a target: what makes layers by form and seed."""
    with contextlib.ExitStack() as stack:

        def of(engine: str, arch: str) -> Callable[..., Layer]:
            if engine == "sglang":
                if not torch.distributed.is_initialized():  # its ranks meet behind an update
                    torch.distributed.init_process_group(
                        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
                    )
                    stack.callback(torch.distributed.destroy_process_group)
                mega_moe = sglang.started(monkeypatch.setenv, arch)
                return lambda form, seed=0: SglangLayer(form, mega_moe, seed)
            installed(arch)
            config = stack.enter_context(vllm.world())
            return lambda form, seed=0: VllmLayer(form, config, seed)

        yield of
    served_experts.buffers.close()
