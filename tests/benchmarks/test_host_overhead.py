"""The benchmark of host time, and with its stand-in for a GPU, the path of a GPU's calls."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import deep_moe
from benchmarks.host_overhead import (
    SHAPE,
    Layers,
    UndrivenGpu,
    UndrivenLauncher,
    gpu_path_on_cpu,
    line,
    main,
    summary,
)
from deep_moe.jit.kernel_args import PrepareInputsArgs, kernel_args


class StreamGpu(UndrivenGpu):
    """Work goes to a stream that tests choose."""

    stream = 0

    def current_stream(self) -> int:
        return self.stream


@pytest.fixture
def layers() -> Iterator[Layers]:
    with gpu_path_on_cpu(StreamGpu()):
        yield Layers(SHAPE, 2, torch.device("cpu"))


def launcher_of(layers: Layers, i: int = 0):
    return layers.arguments(i)[0].launcher


def test_every_path_is_timed_without_a_gpu(tmp_path, capsys) -> None:
    file = tmp_path / "host.json"
    arguments = ["--without-gpu", "--layers", "3", "--calls", "4", "--batches", "2"]
    assert main([*arguments, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    printed = capsys.readouterr().out
    assert report["machine"]["gpu"] is None
    assert {"mega_moe", "prepare_inputs", "part: launch"} <= set(report["results"])
    for name, result in report["results"].items():
        assert 0 < result["min_us"] <= result["median_us"] <= result["p90_us"]
        assert name in printed


def test_a_summary_is_in_microseconds() -> None:
    seconds = [1e-6 * us for us in (30, 10, 20, 50, 40)]
    assert summary(seconds) == pytest.approx({"median_us": 30, "p90_us": 50, "min_us": 10})
    assert "30.0 us" in line("mega_moe", seconds)


def test_a_call_is_one_launch_with_its_own_arguments_and_stream(layers: Layers) -> None:
    launcher = launcher_of(layers)
    for i, stream in ((0, 0), (1, 0x1000), (0, 0x2000)):
        layers.gpu.stream = stream  # as `with torch.cuda.stream` changes it
        before = launcher.num_launches
        layers.call(i)
        assert launcher.num_launches == before + 1
        args, num_ctas, launched_on = launcher.last
        assert isinstance(args, kernel_args("sm90"))
        assert (num_ctas, launched_on) == (132, stream)
        assert args.y == layers.ys[i].data_ptr()
        assert args.l1_weight_blocks == layers.weights[i].l1.weight.data_ptr()
        assert args.num_tokens == 64


def test_an_argument_that_is_refused_launches_nothing(layers: Layers) -> None:
    layers.call(0)
    launcher = launcher_of(layers)
    before = launcher.num_launches
    y, (l1, l2) = layers.ys[0], layers.weights[0]
    with pytest.raises(ValueError, match="y must be contiguous"):
        deep_moe.fp8_fp4_mega_moe(y.T.contiguous().T, l1, l2, layers.buffer)
    with pytest.raises(
        ValueError, match="arch must be sm_90a, that of cpu, or None; got 'sm_100a'"
    ):
        deep_moe.fp8_fp4_mega_moe(y, l1, l2, layers.buffer, arch="sm_100a")
    with pytest.raises(TypeError, match=r"l2_weights\[0\] must be torch.int8"):
        deep_moe.fp8_fp4_mega_moe(y, l1, (l2.weight.float(), l2.sf), layers.buffer)
    layers.buffer.memory.status.code = 1  # an earlier call ran into its time limit
    with pytest.raises(deep_moe.MegaMoETimeoutError):
        layers.call(0)
    assert launcher.num_launches == before


def test_inputs_are_prepared_by_one_launch_from_the_tensors_of_the_call(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[tuple[Any, int, int]] = []
    monkeypatch.setattr(UndrivenLauncher, "launch", lambda _, *launch: launches.append(launch))
    layers.gpu.stream = 0x3000
    first = layers.x
    for x in (first, first.clone(), first[:5]):
        layers.x = x
        layers.topk_idx = layers.topk_idx[: len(x)]
        layers.topk_weights = layers.topk_weights[: len(x)]
        layers.prepare_inputs()
        args, num_ctas, stream = launches[-1]
        assert isinstance(args, PrepareInputsArgs)
        assert (args.x, args.num_chunks, stream) == (x.data_ptr(), x.numel() // 8, 0x3000)
        assert num_ctas > 0
    assert len(launches) == 3

    in_buffer = layers.buffer.memory.tensor[: first.numel() * 2].view(torch.bfloat16)
    layers.x = in_buffer.view(-1, first.shape[1])[:5]
    with pytest.raises(ValueError, match="x must not lie in the buffer"):
        layers.prepare_inputs()
    with pytest.raises(ValueError, match="arch must be sm_90a, that of cpu, or None; got"):
        deep_moe.prepare_inputs(
            first[:5], layers.topk_idx, layers.topk_weights, layers.buffer, arch="sm_100a"
        )
    assert len(launches) == 3
