"""vLLM's own kernels for experts in four bits or in MXFP8, made and called by vLLM's own classes:
what an engine runs on Hopper where deep_moe does not."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Barrier, Thread
from typing import Any

import torch
import torch.distributed as dist

import deep_moe
from deep_moe.formats.block_scaled import GROUP_SIZE, unpack_ue8m0
from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import Layer


@dataclass(frozen=True)
class Backend:
    """A kernel. option: vLLM's `moe_backend` that chooses it. tokens: as they are multiplied.
    package: what it needs beside vLLM. is_declared: it multiplies such tokens if the checkpoint
    says so. weights: formats that it is for."""

    option: str
    label: str
    tokens: str = "bf16"
    package: str | None = None
    is_declared: bool = False
    weights: tuple[str, ...] = ("mxfp4",)


_DECODED = ("mxfp4", "nvfp4", "int4", "mxfp8")  # to the type of the tokens
BACKENDS = {
    "marlin": Backend("marlin", "vLLM's Marlin", weights=_DECODED),
    "humming": Backend("humming", "Humming", package="humming", weights=_DECODED),
    "humming_fp8": Backend("humming", "Humming", "fp8", "humming", is_declared=True),
    "triton": Backend("triton_unfused", "vLLM's Triton"),
    "cutlass": Backend("flashinfer_cutlass", "FlashInfer's CUTLASS", package="flashinfer"),
    "cutlass_fp8": Backend(
        "flashinfer_cutlass_afp8", "FlashInfer's CUTLASS", "fp8", package="flashinfer"
    ),
}


class AbsentError(Exception):
    """A kernel that cannot be timed here, and why."""


def require(backend: Backend) -> None:
    """Raise AbsentError unless what the kernel needs can be imported."""
    for package in ("vllm", *(() if backend.package is None else (backend.package,))):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise AbsentError(f"{package} cannot be imported: {error}") from error


@contextmanager
def vllm_groups(config: Any, rank: int, tp: int, local_rank: int, backend: str) -> Iterator[None]:
    """vLLM's groups over torch's process group, which is there already, with `config` as the
    current one. rank: of all. tp: ranks of tensor parallelism."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    with set_current_vllm_config(config):
        init_distributed_environment(tp, rank % tp, "env://", local_rank, backend)
        initialize_model_parallel(tp, backend=backend)
    try:
        yield
    finally:
        destroy_model_parallel()


def vllm_config(rank: int, num_ranks: int, max_tokens: int, moe_backend: str = "auto") -> Any:
    """Of an engine that spreads experts over data parallel ranks, which is what gives each rank
    tokens of its own."""
    from vllm.config import ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.config.kernel import KernelConfig

    return VllmConfig(
        parallel_config=ParallelConfig(
            data_parallel_size=num_ranks,
            data_parallel_rank=rank,
            enable_expert_parallel=num_ranks > 1,
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=max_tokens,
            max_num_batched_tokens=max_tokens,
            max_num_seqs=1,
            is_encoder_decoder=False,
        ),
        kernel_config=KernelConfig(moe_backend=moe_backend),
    )


class VllmLayer:
    """One rank's part of a layer that vLLM runs by one of its kernels. With several ranks, vLLM
    gathers all ranks' tokens before it, and adds and scatters the results behind it.

    layer: weights of the rank's own experts, in the format of `shape`, one of CHECKPOINTS. Must be
    made inside `vllm_groups`. Raises AbsentError if vLLM does not have the kernel here.
    """

    def __init__(
        self,
        backend: Backend,
        shape: MoEShape,
        layer: Layer,
        clamp: float | None,
        device: torch.device,
    ) -> None:
        if shape.weights not in backend.weights:
            raise AbsentError(f"it is timed with {', '.join(backend.weights)} weights only")
        require(backend)
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

        checkpoint = CHECKPOINTS[shape.weights]
        _require_workspace(device)
        rank, num_ranks = dist.get_rank(), shape.num_ranks
        self.max_tokens = shape.num_max_tokens_per_rank
        self.config = vllm_config(rank, num_ranks, self.max_tokens, backend.option)
        try:
            with set_current_vllm_config(self.config), torch.device(device):
                runner = FusedMoEFactory(
                    num_experts=shape.num_experts,
                    top_k=shape.num_topk,
                    hidden_size=shape.hidden,
                    intermediate_size=shape.intermediate_hidden,
                    params_dtype=torch.bfloat16,
                    quant_config=checkpoint.quantization(backend),
                    swiglu_limit=clamp,
                    prefix="model.layers.0.mlp.experts",
                )
                self.experts = runner.routed_experts
                for name, tensor in checkpoint.tensors(layer).items():
                    getattr(self.experts, name).data.copy_(tensor)
                self.experts.quant_method.process_weights_after_loading(self.experts)
        except (ImportError, NotImplementedError, ValueError) as error:
            raise AbsentError(f"{type(error).__name__}: {error}".splitlines()[0]) from error

    @contextmanager
    def step(self, tokens_of_ranks: list[int]) -> Iterator[None]:
        """What vLLM knows while it runs a model once; calls must be inside."""
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import get_forward_context, set_forward_context

        own = tokens_of_ranks[dist.get_rank()]
        across = torch.tensor(tokens_of_ranks, dtype=torch.int32)
        with (
            set_current_vllm_config(self.config),
            set_forward_context(None, self.config, num_tokens=own, num_tokens_across_dp=across),
            torch.inference_mode(),
        ):
            metadata = get_forward_context().dp_metadata
            if metadata is None:
                yield
                return
            with metadata.sp_local_sizes(1, use_ep=True):
                yield

    def __call__(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """x: bfloat16 [tokens, hidden]. topk_idx: int32, topk_weights: float32 [tokens, topk]."""
        y: torch.Tensor = self.experts.forward_modular(x, topk_weights, topk_idx)
        return y


NUM_BATCHES = 2  # that vLLM overlaps
# Two batches: the SMs that dispatch and combine have, beside the experts of the other batch.
SMS_BESIDE_EXPERTS = 32
BATCH_TIMEOUT_S = 60
ROOM = 1.25  # of the rows that come to the busiest rank, which an engine does not know


class VllmLayerOverAllToAll:
    """A VllmLayer's experts between dispatch and combine of our all-to-all for many tokens, in
    place of vLLM's all-gather and reduce-scatter; weights are shared with it.

    in_two_batches: the halves of the tokens overlap as vLLM's `--enable-dbo` overlaps them.
    """

    def __init__(
        self, layer: VllmLayer, shape: MoEShape, device: torch.device, *, in_two_batches: bool
    ) -> None:
        self.layer = layer
        self.in_two_batches = in_two_batches
        self._shape = shape
        self._device = device
        self._kernels: dict[int, tuple[deep_moe.AllToAll, Any]] = {}  # by a call's tokens
        self._travelling = torch.cuda.Stream(device) if in_two_batches else None

    def step(self, tokens_of_ranks: list[int]) -> Any:
        return self.layer.step(tokens_of_ranks)

    def __call__(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """As of VllmLayer. The first call with so many tokens makes their all-to-all, so all ranks
        have equally many."""
        is_split = self.in_two_batches and x.shape[0] >= NUM_BATCHES
        kernel = self._kernel(topk_idx.tensor_split(NUM_BATCHES if is_split else 1))
        method = self.layer.experts.quant_method
        vllms, method.moe_kernel = method.moe_kernel, kernel
        try:
            if is_split:
                return self._overlapped(x, topk_idx, topk_weights)
            return self.layer(x, topk_idx, topk_weights)
        finally:
            method.moe_kernel = vllms

    def _kernel(self, batches: Sequence[torch.Tensor]) -> Any:
        from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel

        from deep_moe.integrations.vllm.all_to_all import format_of_experts
        from deep_moe.integrations.vllm.many_tokens import ThroughputPrepareAndFinalize

        num_tokens = sum(map(len, batches))
        if num_tokens not in self._kernels:
            shape, experts = self._shape, self.layer.experts.quant_method.moe_kernel.fused_experts
            rows = max(most_rows(topk_idx, shape) for topk_idx in batches)
            # Tensors that are made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                transport = deep_moe.AllToAll(
                    dist.group.WORLD,
                    len(batches[0]),  # as many as any has
                    shape.hidden,
                    shape.num_experts,
                    shape.num_topk,
                    math.ceil(ROOM * rows),
                    expert_alignment=1,
                    token_format=format_of_experts(
                        experts.quant_config, is_deferred=experts.expects_unquantized_inputs
                    ),
                    num_sms=SMS_BESIDE_EXPERTS if self.in_two_batches else None,
                    device=self._device,
                )
                steps = ThroughputPrepareAndFinalize(transport)
            self._kernels[num_tokens] = transport, FusedMoEKernel(steps, experts)
        return self._kernels[num_tokens][1]

    def _overlapped(self, *call: torch.Tensor) -> torch.Tensor:
        """A thread for each batch, of which one runs at a time: vLLM's contexts hand over."""
        from vllm.forward_context import get_forward_context, override_forward_context
        from vllm.v1.worker.ubatching import make_ubatch_contexts

        batches = list(zip(*(tensor.tensor_split(NUM_BATCHES) for tensor in call), strict=True))
        made: list[Any] = [None] * NUM_BATCHES
        all_are_there = Barrier(NUM_BATCHES + 1)
        contexts = make_ubatch_contexts(
            NUM_BATCHES,
            torch.cuda.current_stream(self._device),
            self._travelling,
            [get_forward_context()] * NUM_BATCHES,
            all_are_there,
        )

        def run(batch: int) -> None:
            torch.cuda.set_device(self._device)
            try:
                with torch.inference_mode(), contexts[batch]:
                    made[batch] = self.layer(*batches[batch])
            except Exception as error:
                made[batch] = error

        threads = [Thread(target=run, args=(i,), daemon=True) for i in range(NUM_BATCHES)]
        with override_forward_context(None):
            for thread in threads:
                thread.start()
            all_are_there.wait()
            contexts[0].cpu_wait_event.set()
            for thread in threads:
                thread.join(BATCH_TIMEOUT_S)  # one that failed does not hand over any more
        for one in made:
            if not isinstance(one, torch.Tensor):
                raise one or RuntimeError(f"a batch was not ready within {BATCH_TIMEOUT_S} s")
        return torch.cat(made)

    def close(self) -> None:
        for transport, _ in self._kernels.values():
            transport.close()
        self._kernels.clear()


def most_rows(topk_idx: torch.Tensor, shape: MoEShape) -> int:
    """Rows that come to the rank that gets the most."""
    owner = topk_idx[topk_idx >= 0] // shape.num_experts_per_rank
    rows = torch.bincount(owner.flatten(), minlength=shape.num_ranks)
    dist.all_reduce(rows)
    return int(rows.max())


@dataclass(frozen=True)
class Checkpoint:
    """How vLLM takes weights of a format. quantization: what a checkpoint says of its experts.
    tensors: a layer's, by the names of vLLM's parameters."""

    quantization: Callable[[Backend], Any]
    tensors: Callable[[Layer], dict[str, torch.Tensor]]


def _mxfp4(backend: Backend) -> Any:
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config, Mxfp4MoEMethod
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp8Dynamic

    # It is asked of a model's config, of which there is none here.
    mxfp4._user_moe_activation_override = lambda: None

    class Config(Mxfp4Config):
        def _make_moe_method(self, moe: Any) -> Any:
            # Which on Hopper vLLM turns into FP8 with a scale per 128 values.
            return Mxfp4MoEMethod(moe, kMxfp8Dynamic if backend.is_declared else None)

    return Config()


def _mxfp4_tensors(layer: Layer) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, own in (("w13", layer.l1), ("w2", layer.l2)):
        width = own.weight.shape[2] // 16  # a scale for 32 values, two of which are a byte
        tensors[f"{name}_weight"] = own.weight.view(torch.uint8)
        tensors[f"{name}_weight_scale"] = unpack_ue8m0(own.sf)[..., :width].view(torch.uint8)
    return tensors


def _nvfp4(backend: Backend) -> Any:
    """As ModelOpt writes them, beside BF16 tokens: Hopper has no products of NVFP4."""
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    return ModelOptNvFp4Config("W4A16_NVFP4", is_checkpoint_nvfp4_serialized=True)


def _nvfp4_tensors(layer: Layer) -> dict[str, torch.Tensor]:
    """vLLM has one factor for gate and up: what up's is larger by, the second linear layer gets,
    which is the same as long as nothing is clamped."""
    assert layer.l1.global_sf is not None and layer.l2.global_sf is not None  # noqa: PT018
    gate, up = layer.l1.global_sf.unbind(1)
    return {
        "w13_weight": layer.l1.weight.view(torch.uint8),
        "w13_weight_scale": layer.l1.sf,
        "w13_weight_scale_2": torch.stack([gate, gate], 1),
        "w2_weight": layer.l2.weight.view(torch.uint8),
        "w2_weight_scale": layer.l2.sf,
        "w2_weight_scale_2": layer.l2.global_sf[:, 0] * (up / gate),
    }


INT4_GROUP = 32


def _int4(backend: Backend) -> Any:
    """As compressed-tensors writes them."""
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": {**weights, "group_size": INT4_GROUP}}
    return compressed_tensors.CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {**group, "input_activations": None}},
            "ignore": [],
        }
    )


def _int4_tensors(layer: Layer) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, own in (("w13", layer.l1), ("w2", layer.l2)):
        # Two codes are a byte, the even one in the low half: eight of them are a word as theirs.
        tensors[f"{name}_weight_packed"] = own.weight.contiguous().view(torch.int32)
        tensors[f"{name}_weight_scale"] = own.sf
    return tensors


def _mxfp8(backend: Backend) -> Any:
    """As ModelOpt writes them; on Hopper vLLM's kernels take BF16 tokens beside them."""
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config

    return ModelOptMxFp8Config(True, None, [])


def _mxfp8_tensors(layer: Layer) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, own in (("w13", layer.l1), ("w2", layer.l2)):
        width = own.weight.shape[2] // GROUP_SIZE
        tensors[f"{name}_weight"] = own.weight
        tensors[f"{name}_weight_scale"] = unpack_ue8m0(own.sf)[..., :width].view(torch.uint8)
    return tensors


CHECKPOINTS = {
    "mxfp4": Checkpoint(_mxfp4, _mxfp4_tensors),
    "nvfp4": Checkpoint(_nvfp4, _nvfp4_tensors),
    "int4": Checkpoint(_int4, _int4_tensors),
    "mxfp8": Checkpoint(_mxfp8, _mxfp8_tensors),
}


def _require_workspace(device: torch.device) -> None:
    from vllm.v1.worker import workspace

    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(device, num_ubatches=NUM_BATCHES)
