"""Runs the cases on this machine's GPUs and writes what came out, for the emulator to agree with.

    python -m tests.hardware_layer.record --out tests/hardware_layer/recordings

A case of two ranks runs on two GPUs, or on one that both share. `--emulated` tries the same without
a GPU; such files are not for keeping.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import deep_moe
from deep_moe.fused.buffer import SymmBuffer
from deep_moe.fused.emulated_ranks import EmulatedRanks
from deep_moe.jit import find_headers
from deep_moe.jit.nvrtc import compiler_version
from deep_moe.targets import MegaMoEConfig, choose_config
from deep_moe.trial.calls import fill_inputs
from tests.hardware_layer.cases import CASES, RecordedCase
from tests.layer.rank_layer import make_buffer
from tests.layer.rank_pool import Place, Rank, RankPool

ARCH = "sm_90a"
_NOT_WRITTEN = 0xFFFFFFFF

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class RankPart:
    """What one rank's memory holds after a call.

    y: bfloat16 bits [tokens, hidden]. contributions: [topk, tokens, hidden], the same, before they
    are added. sources: rank, token and slot of each row that its experts worked on; l1_output and
    l1_scales: Linear1's output for them, bytes [rows, intermediate] and words
    [rows, intermediate/128].
    """

    y: np.ndarray
    contributions: np.ndarray
    sources: np.ndarray
    l1_output: np.ndarray
    l1_scales: np.ndarray


def prime(buffer: SymmBuffer) -> None:
    """Before the call: what it does not write can be told afterwards, and is the same anywhere."""
    for name, byte in (("token_src_metadata", 0xFF), ("l2_tokens", 0), ("l2_token_sf", 0)):
        segment = buffer.layout[name]
        buffer.memory.tensor[segment.offset : segment.end].fill_(byte)
    buffer.memory.synchronize()


def read_part(buffer: SymmBuffer, y: torch.Tensor) -> RankPart:
    """After the call."""

    def segment(name: str, dtype: Any) -> np.ndarray:
        entry = buffer.layout[name]
        raw = buffer.memory.tensor[entry.offset : entry.end].cpu().numpy()
        return raw.view(dtype).reshape(entry.shape)

    sources = segment("token_src_metadata", np.uint32)
    (rows,) = (sources[:, 0] != _NOT_WRITTEN).nonzero()
    return RankPart(
        y.cpu().view(torch.int16).numpy().view(np.uint16),
        segment("combine", np.uint16)[:, : y.shape[0]].copy(),
        sources[rows],
        segment("l2_tokens", np.uint8)[rows],
        segment("l2_token_sf", np.uint32)[:, rows].T.copy(),
    )


def run_rank(rank: Rank, case: RecordedCase) -> RankPart:
    """One rank's part of a case on its GPU."""
    buffer = make_buffer(rank, case.shape)
    l1, l2 = (
        tuple(tensor.to(rank.device) for tensor in pair)
        for pair in case.layer().of_rank(rank.idx, rank.num_ranks)
    )
    weights = deep_moe.transform_weights_for_mega_moe(l1, l2)
    tokens = case.rank_tokens(rank.idx)
    prime(buffer)
    fill_inputs(buffer, tokens)
    y = torch.empty((tokens.num_tokens, case.hidden), dtype=torch.bfloat16, device=rank.device)
    rank.barrier()
    deep_moe.fp8_fp4_mega_moe(y, *weights, buffer, **case.options)
    rank.synchronize()
    buffer.raise_if_failed()
    part = read_part(buffer, y)
    rank.barrier()
    return part


def run_emulated(case: RecordedCase, *, hopper_fp8_sums: bool = True) -> list[RankPart]:
    """All ranks in the emulator."""
    shape = case.shape
    layer = case.layer()
    weights = [
        deep_moe.transform_weights_for_mega_moe(*layer.of_rank(rank, shape.num_ranks), arch=ARCH)
        for rank in range(shape.num_ranks)
    ]
    ys = [torch.empty(n, case.hidden, dtype=torch.bfloat16) for n in case.tokens]
    with EmulatedRanks(shape.num_ranks, **shape.buffer_arguments) as ranks:
        for rank, buffer in enumerate(ranks.buffers):
            prime(buffer)
            fill_inputs(buffer, case.rank_tokens(rank))
        ranks.call(
            ys,
            weights,
            arch=ARCH,
            checked=False,
            hopper_fp8_sums=hopper_fp8_sums,
            **case.options,
        )
        return [read_part(buffer, y) for buffer, y in zip(ranks.buffers, ys, strict=True)]


def by_token(case: RecordedCase, parts: Sequence[RankPart]) -> Arrays:
    """The parts in the order of tokens, which does not depend on who came first. Unused slots are
    zero. Of rank r: y<r> [tokens, hidden], contributions<r> [tokens, topk, hidden],
    l1_output<r> [tokens, topk, intermediate], l1_scales<r> [tokens, topk, intermediate/128]."""
    arrays: Arrays = {}
    for rank, part in enumerate(parts):
        slots = (case.tokens[rank], case.num_topk)
        used = case.rank_tokens(rank).topk_idx.numpy() >= 0
        contributions = part.contributions.transpose(1, 0, 2).copy()
        contributions[~used] = 0
        arrays[f"y{rank}"] = part.y
        arrays[f"contributions{rank}"] = contributions
        arrays[f"l1_output{rank}"] = np.zeros((*slots, case.intermediate_hidden), np.uint8)
        arrays[f"l1_scales{rank}"] = np.zeros((*slots, case.intermediate_hidden // 128), np.uint32)
    for part in parts:
        for (rank, token, slot), values, scales in zip(
            part.sources.tolist(), part.l1_output, part.l1_scales, strict=True
        ):
            arrays[f"l1_output{rank}"][token, slot] = values
            arrays[f"l1_scales{rank}"][token, slot] = scales
    return arrays


def write(folder: Path, case: RecordedCase, arrays: Arrays, provenance: dict[str, Any]) -> Path:
    """One file with the arrays, and what they were made with as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case.name}.npz"
    about = json.dumps({**provenance, "case": case.name, "inputs_sha256": case.digest()})
    np.savez_compressed(path, about=np.array(about), **arrays)
    return path


def read(path: Path) -> tuple[Arrays, dict[str, Any]]:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    return arrays, json.loads(str(arrays.pop("about")))


def provenance(config: MegaMoEConfig, commit: str | None, place: Place) -> dict[str, Any]:
    """What a recording was made with."""
    return {
        "gpu": torch.cuda.get_device_name() if place.is_gpu else "emulator",
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "ranks_share_a_gpu": place is Place.SHARED_GPUS,
        "compiler": compiler_version(),
        "headers": find_headers().library.identity,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit or first_line("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config": {
            name: str(value) if value == float("inf") else value
            for name, value in config.to_dict().items()
        },
    }


def first_line(*command: str) -> str | None:
    """Of a program's output; None without the program, or if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return None
    lines = result.stdout.splitlines()
    return lines[0].strip() if result.returncode == 0 and lines else None


def config_of(case: RecordedCase, place: Place) -> MegaMoEConfig:
    """Rank 0's kernel."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count if place.is_gpu else None
    return choose_config(case.shape, case.tokens[0], arch=ARCH, num_sms=num_sms, **case.options)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for one file per case")
    parser.add_argument("--case", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--emulated", action="store_true", help="without a GPU, to try it")
    arguments = parser.parse_args(words)
    chosen = [case for case in CASES if arguments.case is None or case.name in arguments.case]
    pools: dict[tuple[Place, int], RankPool] = {}
    try:
        for case in chosen:
            num_ranks = case.shape.num_ranks
            if arguments.emulated:
                place = Place.CPU
                parts = run_emulated(case)
            else:
                shared = torch.cuda.device_count() < num_ranks
                place = Place.SHARED_GPUS if shared else Place.GPUS
                key = (place, num_ranks)
                if key not in pools:
                    pools[key] = RankPool(num_ranks, place)
                parts = pools[key].run(run_rank, case)
            about = provenance(config_of(case, place), arguments.commit, place)
            path = write(arguments.out, case, by_token(case, parts), about)
            print(f"{path}: {path.stat().st_size} bytes", flush=True)
    finally:
        for pool in pools.values():
            pool.close()


if __name__ == "__main__":
    main()
