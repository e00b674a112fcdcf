"""What the benchmark of engines' kernels has vLLM do: its own classes load the weights, gather and
scatter tokens, and call a kernel. Here that one is PyTorch's, in Marlin's place."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.engines import parse_arguments, run_rank
from benchmarks.vllm_layer import BACKENDS, AbsentError, VllmLayer, vllm_config, vllm_groups
from deep_moe.formats.block_scaled import pack_ue8m0
from deep_moe.trial.rank_processes import run_on_ranks
from deep_moe.trial.synthetic import Layer
from deep_moe.weights.layers import LayerWeights
from deep_moe.weights.mxfp4.quantizing import dequantize_mxfp4

vllm = pytest.importorskip("vllm", reason="make test-serving installs it")

WORDS = ["--experts", "4", "--topk", "2", "--hidden", "256", "--intermediate", "128"]
WORDS += ["--calls", "1", "--rounds", "1", "--warmup", "0", "--commit", "abc", "--tokens", "2", "5"]
WORDS += ["--model", "deepseek-v4-flash", "--engines", "marlin", "triton", "cutlass"]
WORDS += ["--transports", "vllm", "all_to_all", "two_batches"]


def put_in_marlins_place() -> None:
    """A kernel that a CPU can run, for weights as they are loaded."""
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.quantization import mxfp4

    class Experts(MarlinExperts):
        @staticmethod
        def _supports_current_device() -> bool:
            return True

        def moe_problem_size(self, *arguments: Any) -> tuple[int, int, int, int, int]:
            return mk.FusedMoEExpertsModular.moe_problem_size(self, *arguments)

        def apply(
            self,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            *others: Any,
            expert_map: torch.Tensor | None = None,
            **more: Any,
        ) -> None:
            limit = self.quant_config.gemm1_clamp_limit
            assert limit == 10.0
            output.zero_()
            for (token, slot), expert in zip(
                torch.cartesian_prod(*map(torch.arange, topk_ids.shape)).tolist(),
                topk_ids.flatten().tolist(),
                strict=True,
            ):
                own = expert if expert_map is None else int(expert_map[expert])
                if own < 0:
                    continue
                first, second = (
                    dequantize_mxfp4(w[own], pack_ue8m0(scale[own])).float()
                    for w, scale in (
                        (w1.view(torch.int8), self.w1_scale),
                        (w2.view(torch.int8), self.w2_scale),
                    )
                )
                gate, up = (first @ hidden_states[token].float()).chunk(2)
                h = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
                output[token] += (topk_weights[token, slot] * (second @ h)).bfloat16()

    mxfp4.select_deepseek_v4_mxfp4_moe_backend = lambda moe: (
        mxfp4.Mxfp4MoeBackend.MARLIN,
        Experts,
    )
    mxfp4.convert_weight_to_mxfp4_moe_kernel_format = lambda layer, **given: (
        *(given[name].data for name in ("w13_weight", "w2_weight")),
        *(given[name].data for name in ("w13_weight_scale", "w2_weight_scale")),
        None,
        None,
    )


def give_a_cpu_vllms_collectives() -> None:
    """Which vLLM has for GPUs only; of equally many tokens on all ranks."""
    from vllm.distributed.device_communicators.base_device_communicator import (
        DeviceCommunicatorBase,
    )

    def all_gatherv(self: Any, tensors: list[torch.Tensor], dim: int, sizes: list[int]) -> Any:
        assert (dim, len(set(sizes))) == (0, 1)
        gathered = []
        for tensor in tensors:
            parts = [torch.empty_like(tensor) for _ in sizes]
            torch.distributed.all_gather(parts, tensor.contiguous(), group=self.device_group)
            gathered.append(torch.cat(parts))
        return gathered

    def reduce_scatterv(self: Any, rows: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        assert dim == 0
        sums = rows.clone()
        torch.distributed.all_reduce(sums, group=self.device_group)
        return sums.split(sizes)[self.rank_in_group]

    DeviceCommunicatorBase.all_gatherv = all_gatherv
    DeviceCommunicatorBase.reduce_scatterv = reduce_scatterv


class _Stream:
    """Of a CPU, on which everything is in order."""

    def __init__(self, *_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...


def give_a_cpu_streams() -> None:
    """That vLLM's two batches change between; a thread begins on the first."""
    from vllm.v1.worker import ubatching

    first, now = _Stream(), threading.local()
    cuda: Any = torch.cuda
    cuda.Stream, torch.Event = _Stream, _Stream  # type: ignore[misc, assignment]
    cuda.set_stream = lambda stream: setattr(now, "stream", stream)
    ubatching.current_stream = lambda: getattr(now, "stream", first)
    cuda.current_stream = lambda *_: ubatching.current_stream()
    cuda.set_device = lambda _: None


def _run(device: torch.device, arguments: Any) -> None:
    import sys

    put_in_marlins_place()
    give_a_cpu_vllms_collectives()
    give_a_cpu_streams()
    sys.modules["flashinfer"] = None  # type: ignore[assignment]
    run_rank(device, arguments)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_vllm_runs_the_layer_that_is_timed(tmp_path: Path, num_ranks: int) -> None:
    path = tmp_path / "report.json"
    run_on_ranks(
        _run, num_ranks, "cpu", parse_arguments([*WORDS, "--json", str(path)]), start_method="spawn"
    )
    report = json.loads(path.read_text())
    assert report["vllm"] == vllm.__version__
    assert set(report["absent"]) == {"cutlass"}
    assert report["absent"]["cutlass"].startswith("flashinfer cannot be imported")
    for result in report["results"]:
        assert result["failed"] == {}
        vllms = [
            f"{name}{transport}"
            for name in ("marlin", "triton")
            for transport in ("", "_all_to_all", "_two_batches")
        ]
        assert set(result["paths"]) == {"deep_moe", "deep_moe_bf16", *vllms}
        assert all(result["paths"][name]["distance"] < 1e-4 for name in vllms)


E, H, I = 2, 256, 128  # noqa: E741


def drawn(weights: str, num_rows: int, num_columns: int, num_matrices: int) -> LayerWeights:
    """Codes of four bits or E4M3, and scales."""
    if weights == "mxfp8":
        values = torch.randn(E, num_rows, num_columns).to(torch.float8_e4m3fn)
        exponents = torch.randint(115, 125, (E, num_rows, num_columns // 32), dtype=torch.uint8)
        return LayerWeights(values, pack_ue8m0(exponents))
    packed = torch.randint(-128, 128, (E, num_rows, num_columns // 2), dtype=torch.int8)
    if weights == "int4":
        return LayerWeights(packed, torch.rand(E, num_rows, num_columns // 32).bfloat16() + 1)
    sf = (torch.rand(E, num_rows, num_columns // 16) + 1).to(torch.float8_e4m3fn)
    return LayerWeights(packed, sf, torch.tensor([[0.5, 0.75]] * E)[:, :num_matrices])


def _take(device: torch.device, weights: str) -> None:
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as wna16,
    )

    def marlin(backend: Any) -> Any:
        return lambda **_: (backend, MarlinExperts)

    modelopt.select_nvfp4_moe_backend = marlin(NvFp4MoeBackend.MARLIN)
    modelopt.select_mxfp8_moe_backend = marlin(Fp8MoeBackend.MARLIN)
    wna16.select_wna16_moe_backend = marlin(WNA16MoEBackend.MARLIN)
    for method in (
        modelopt.ModelOptNvFp4FusedMoE,
        modelopt.ModelOptMxFp8FusedMoE,
        wna16.CompressedTensorsWNA16MoEMethod,
    ):
        method.process_weights_after_loading = lambda *_: None
    shape: Any = SimpleNamespace(
        weights=weights,
        num_ranks=1,
        num_experts=E,
        num_topk=1,
        hidden=H,
        intermediate_hidden=I,
        num_max_tokens_per_rank=8,
    )
    layer = Layer(drawn(weights, 2 * I, H, 2), drawn(weights, H, I, 1))
    with vllm_groups(vllm_config(0, 1, 8), 0, 1, 0, "gloo"):
        with pytest.raises(AbsentError, match="it is timed with mxfp4 weights only"):
            VllmLayer(BACKENDS["triton"], shape, layer, 10.0, device)
        loaded = VllmLayer(BACKENDS["marlin"], shape, layer, 10.0, device).experts
    assert loaded.swiglu_limit == 10.0
    if weights == "int4":
        # The code of column k of a row: bits 4 (k % 8) and up of word k / 8, plus 8.
        words = loaded.w13_weight_packed[1, 3].tolist()
        codes = layer.l1.weight.view(torch.uint8)[1, 3].tolist()
        for k in (0, 1, 5, 6, 100, H - 1):
            assert words[k // 8] >> 4 * (k % 8) & 15 == codes[k // 2] >> 4 * (k % 2) & 15
        assert torch.equal(loaded.w2_weight_scale, layer.l2.sf)
        return
    if weights == "mxfp8":
        assert torch.equal(loaded.w13_weight.float(), layer.l1.weight.float())
        assert torch.equal(pack_ue8m0(loaded.w13_weight_scale), layer.l1.sf)
        assert torch.equal(pack_ue8m0(loaded.w2_weight_scale), layer.l2.sf)
        return
    assert torch.equal(loaded.w2_weight.view(torch.int8), layer.l2.weight)
    assert torch.equal(loaded.w13_weight_scale.float(), layer.l1.sf.float())
    assert loaded.w13_weight_scale_2.tolist() == [[0.5, 0.5]] * E
    assert loaded.w2_weight_scale_2.tolist() == [0.5 * 0.75 / 0.5] * E


@pytest.mark.parametrize("weights", ["nvfp4", "int4", "mxfp8"])
def test_vllm_takes_weights_of_other_formats(weights: str) -> None:
    run_on_ranks(_take, 1, "cpu", weights, start_method="spawn")
