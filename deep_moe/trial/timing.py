"""How long calls of a layer take: times that all ranks know."""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deep_moe import __version__
from deep_moe.activations import Activation
from deep_moe.biases.per_expert import transform_biases_for_mega_moe
from deep_moe.fused.buffer import get_symm_buffer_for_mega_moe
from deep_moe.fused.call_plan import EMULATED_NUM_SMS, prepare_call
from deep_moe.fused.mega_moe import mega_moe, with_numerics
from deep_moe.fused.options import given_options
from deep_moe.heuristics import MoEShape
from deep_moe.targets import MegaMoEConfig
from deep_moe.weights.transform import transform_weights_for_mega_moe

from .calls import fill_inputs
from .synthetic import Layer, Tokens

SLEEP_CYCLES = 2_000_000  # about a millisecond


class TimedLayer:
    """One rank's part of a layer, and its output."""

    def __init__(
        self, shape: MoEShape, layer: Layer, device: torch.device, *, arch: str | None = None
    ) -> None:
        """layer: weights of the rank's own experts. arch: where it is not the device's."""
        self.shape = shape
        self.arch = arch
        self.buffer = get_symm_buffer_for_mega_moe(
            dist.group.WORLD,
            **shape.buffer_arguments,
            device=device,
        )
        self.weights = transform_weights_for_mega_moe(
            layer.l1, layer.l2, arch=arch, weights=shape.weights, token_format=shape.token_format
        )
        self.biases = None
        if layer.l1_bias is not None and layer.l2_bias is not None:
            self.biases = transform_biases_for_mega_moe(
                layer.l1_bias,
                layer.l2_bias,
                arch,
                weights=shape.weights,
                token_format=shape.token_format,
            )
        self.y = torch.empty(0)

    def fill(self, tokens: Tokens) -> None:
        """Take a rank's tokens for the calls that follow."""
        fill_inputs(self.buffer, tokens)
        self.y = torch.full(
            (tokens.num_tokens, self.shape.hidden),
            torch.nan,
            dtype=torch.bfloat16,
            device=self.buffer.device,
        )

    def __call__(
        self,
        activation: Activation,
        overrides: Mapping[str, int] | None = None,
        stats: torch.Tensor | None = None,
    ) -> None:
        mega_moe(
            self.y,
            self.weights,
            self.buffer,
            stats,
            activation=activation,
            arch=self.arch,
            overrides=dict(overrides or {}),
            l1_bias=self.biases and self.biases.l1,
            l2_bias=self.biases and self.biases.l2,
        )

    def config(
        self, activation: Activation, overrides: Mapping[str, int] | None = None
    ) -> MegaMoEConfig:
        """Of the kernel that a call with these arguments runs on this rank."""
        options = given_options("config", {"arch": self.arch, "overrides": overrides})
        arguments = with_numerics(options, activation)
        plan, _ = prepare_call(
            self.y,
            self.weights.l1,
            self.weights.l2,
            self.buffer,
            {},
            arguments,
            self.biases,
        )
        return plan.config

    def close(self) -> None:
        """All ranks together: none takes its memory away while another still uses it."""
        self.buffer.memory.synchronize()
        dist.barrier()
        self.buffer.close()


def timed(
    call: Callable[[], Any], num_warmup: int, num_calls: int, device: torch.device
) -> tuple[list[list[float]], float]:
    """Seconds of each rank's calls, and microseconds that this host took for one.

    In front of each call there is an all-reduce, so that ranks begin together, and in front of that
    the GPU sleeps, so that the host is never what is measured. On a CPU, where calls run in the
    emulator, it is the host's clock.
    """
    on_gpu = device.type == "cuda"
    token = torch.zeros(1, device=device)
    starts, ends = (
        [torch.cuda.Event(enable_timing=True) for _ in range(num_warmup + num_calls)]
        if on_gpu
        else []
        for _ in range(2)
    )
    host_s = []
    for i in range(num_warmup + num_calls):
        if on_gpu:
            torch.cuda._sleep(SLEEP_CYCLES)
        dist.all_reduce(token)
        if on_gpu:
            starts[i].record()
        before = time.perf_counter()
        call()
        host_s.append(time.perf_counter() - before)
        if on_gpu:
            ends[i].record()
    own = host_s
    if on_gpu:
        torch.cuda.synchronize(device)
        own = [1e-3 * start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]
    mine = torch.tensor(own[num_warmup:], dtype=torch.float64, device=device)
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine)
    return [rank.tolist() for rank in ranks], 1e6 * statistics.median(host_s[num_warmup:])


def machine(device: torch.device, commit: str | None) -> dict[str, Any]:
    """What is measured on, and with. commit: of the sources, where git cannot tell."""
    facts: dict[str, Any] = {"gpu": "emulator", "num_sms": EMULATED_NUM_SMS}
    if device.type == "cuda":
        facts = {
            "gpu": torch.cuda.get_device_name(device),
            "num_sms": torch.cuda.get_device_properties(device).multi_processor_count,
            "driver": first_line(
                "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
            ),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return facts | {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "deep_moe": __version__,
        "commit": commit or source_commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def source_commit() -> str | None:
    """Of a source checkout; None for an installed package, and where git cannot tell."""
    folder = Path(__file__).resolve().parent
    if not (folder.parent / "jit").is_dir():
        return None
    return first_line("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12")


def first_line(*command: str) -> str | None:
    """Of a program's output; None without the program, or if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return None
    lines = result.stdout.splitlines()
    return lines[0].strip() if result.returncode == 0 and lines else None
