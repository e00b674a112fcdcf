"""Times kernels beside each other: of other headers, or with other fields of the config.

    python -m benchmarks.in_turn --kernel now --kernel "before include=../before/include"
    python -m benchmarks.in_turn --kernel now --kernel "wide block_m=152" --tokens 2048 4096

This is how a change to the kernel is measured. Machines differ by 3 to 5 %, and what other calls
left in a buffer may cost energy. So all kernels run in one process and, but for those with a pool
of their own, in one buffer, in rounds whose order alternates. A round gives the median of --calls
calls, of the slowest rank; printed are the median of the rounds, the fastest and the slowest.
Between two calls the GPU rests for a millisecond, as in benchmarks.mega_moe; then rounds of calls
of up to 2 ms differ by less than a percent. With --warm-seconds, each round of a kernel begins with
calls without rests, which drive the GPU to its power limit: its clock needs longer than a round to
come back from there, and rounds differ by several percent.

A kernel is a name and words behind it: include=FOLDER, whose headers are taken instead of this
checkout's, pool_tokens=ROWS, a buffer of its own with so many rows of the pool, token_format=NAME,
a layer of its own beside such tokens, with scales that its kernel applies, and FIELD=NUMBER. All
are called by this checkout's host side: headers that belong to another one do not compile. All with
tokens of one format must give the same bits, and the first one's are compared with the reference
(some tokens of each rank).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import typer

from deep_moe.activations import Swiglu
from deep_moe.cli.layer_options import LayerOptions
from deep_moe.cli.options import parse_overrides
from deep_moe.fused import loaded_kernels
from deep_moe.fused.bounded_cache import BoundedCache
from deep_moe.fused.buffer import SymmBuffer
from deep_moe.fused.call_plan import CallCaches
from deep_moe.heuristics import PRESETS, MoEShape
from deep_moe.jit import headers
from deep_moe.targets import target_of_device
from deep_moe.tokens import TOKEN_FORMATS, token_format
from deep_moe.trial.comparison import compare
from deep_moe.trial.real_size import ROUTINGS, rank_tokens
from deep_moe.trial.synthetic import Tokens
from deep_moe.trial.timing import TimedLayer, machine, timed
from deep_moe.weights import DEFAULT_WEIGHTS, WEIGHTS

from .mega_moe import SIZES, run_on_gpus
from .problem import checked_sample, rank_weights

CHECKED_TOKENS = 8  # on each rank
INCLUDE = "include="
POOL_TOKENS = "pool_tokens="
TOKEN_FORMAT = "token_format="


class Kernel:
    """What is timed under one name, and what calls keep of it."""

    def __init__(self, text: str) -> None:
        """text: the option's. Raises ValueError or typer.BadParameter for a word that cannot be.

        >>> kernel = Kernel("wide block_m=152 num_stages=4")
        >>> kernel.name, kernel.include, kernel.overrides, kernel.num_pool_tokens
        ('wide', None, {'block_m': 152, 'num_stages': 4}, None)
        """
        self.name, *words = text.split()
        fields, folders, pools, formats = [], [], [], []
        for word in words:
            if word.startswith(INCLUDE):
                folders.append(word.removeprefix(INCLUDE))
            elif word.startswith(POOL_TOKENS):
                pools.append(int(word.removeprefix(POOL_TOKENS)))
            elif word.startswith(TOKEN_FORMAT):
                formats.append(token_format(word.removeprefix(TOKEN_FORMAT)).name)
            else:
                fields.append(word)
        self.include = Path(folders[-1]).resolve() if folders else None
        self.num_pool_tokens = pools[-1] if pools else None
        self.token_format = formats[-1] if formats else None
        self.overrides = parse_overrides(fields)
        self._library = headers.find_library()
        if self.include is not None:
            if not (self.include / "deep_moe").is_dir():
                raise ValueError(f"include must be a folder that holds deep_moe; got {folders[-1]}")
            digest = headers.tree_digest(self.include)
            self._library = headers.HeaderFolder(self.include, f"deep_moe {digest}")
        self._caches = CallCaches()
        self._launchers: BoundedCache[Any, Any] = BoundedCache(64)

    def shape(self, shape: MoEShape) -> MoEShape:
        """Of its layer."""
        token_format = self.token_format or shape.token_format
        return replace(shape, num_pool_tokens=self.num_pool_tokens, token_format=token_format)

    @contextmanager
    def in_use(self, buffer: SymmBuffer) -> Iterator[None]:
        """Calls with this buffer run this kernel: what they would look up is this kernel's own."""
        loaded_kernels.built_kernel.cache_clear()
        with (
            patch.object(headers, "find_library", lambda: self._library),
            patch.object(loaded_kernels, "_launchers", self._launchers),
            patch.object(buffer, "caches", self._caches),
        ):
            yield
        loaded_kernels.built_kernel.cache_clear()


def main() -> None:
    arguments = parse_arguments()
    run_on_gpus(run_rank, arguments.ranks, arguments)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernel", action="append", default=[], help="'NAME WORD ...', see above")
    parser.add_argument("--model", choices=sorted(PRESETS), default="deepseek-v4-pro")
    for option, field in SIZES.items():
        parser.add_argument(f"--{option}", type=int, help=f"{field}, instead of the model's")
    parser.add_argument("--weights", choices=WEIGHTS, default=DEFAULT_WEIGHTS)
    parser.add_argument("--token-format", choices=TOKEN_FORMATS, help="default: the weights' own")
    parser.add_argument("--tokens", nargs="+", type=int, default=[512], help="per rank")
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--calls", type=int, default=24, help="of each kernel in a round")
    parser.add_argument(
        "--warm-seconds", type=float, default=0.0, help="of calls without rests before them"
    )
    parser.add_argument("--clamp", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--json", type=Path, help="where results are written, after each size")
    arguments = parser.parse_args(words)
    names = [text.split()[0] for text in arguments.kernel if text.split()]
    if not names or len(set(names)) != len(arguments.kernel):
        parser.error(f"--kernel must be given, each with a name of its own; got {arguments.kernel}")
    for text in arguments.kernel:
        try:
            Kernel(text)
        except (ValueError, typer.BadParameter) as error:
            parser.error(f"--kernel {text!r}: {error}")
    if min(arguments.rounds, arguments.calls, arguments.ranks, *arguments.tokens) < 1:
        parser.error("--rounds, --calls, --ranks and --tokens must be at least 1")
    return arguments


def run_rank(device: torch.device, arguments: argparse.Namespace) -> None:
    """One process: all sizes."""
    report: dict[str, Any] = {
        "machine": machine(device, arguments.commit),
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "results": [],
    }
    rank = dist.get_rank()
    options = LayerOptions(
        model=arguments.model,
        weights=arguments.weights,
        token_format=arguments.token_format,
        activation="swiglu",
        **{option: getattr(arguments, option) for option in SIZES},
    )
    most = max(arguments.tokens)
    shape = options.shape(
        dist.get_world_size(), most, arch=target_of_device(device).name, is_fused=False
    )
    kernels = [Kernel(text) for text in arguments.kernel]
    shapes = {kernel.name: kernel.shape(shape) for kernel in kernels}
    layers: dict[MoEShape, TimedLayer] = {}
    for own in dict.fromkeys(shapes.values()):
        weights = rank_weights(own, rank, arguments.seed, device)
        layers[own] = TimedLayer(own, weights, device)
        del weights
    for num_tokens in arguments.tokens:
        tokens: dict[str, Tokens] = {
            own.token_format: rank_tokens(
                own, num_tokens, rank, arguments.seed, device, routing=arguments.routing
            )
            for own in layers
        }
        for own, layer in layers.items():
            layer.fill(tokens[own.token_format])
        runs = [(kernel, layers[shapes[kernel.name]]) for kernel in kernels]
        check(runs, arguments, tokens)
        us = times(runs, arguments)
        result = {
            "tokens_per_rank": num_tokens,
            "us": {name: statistics.median(rounds) for name, rounds in us.items()},
            "us_of_rounds": us,
        }
        report["results"].append(result)
        if rank == 0:
            print(line(num_tokens, us), flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    for layer in layers.values():
        layer.close()


Runs = Sequence[tuple[Kernel, TimedLayer]]


def check(runs: Runs, arguments: argparse.Namespace, tokens: Mapping[str, Tokens]) -> None:
    """One call of each kernel, which compiles it; RuntimeError if a result is not what it should
    be. tokens: by their format."""
    first: dict[str, tuple[str, torch.Tensor]] = {}  # by format: a kernel's name, and its result
    for kernel, layer in runs:
        buffer = layer.buffer
        layer.y.fill_(torch.nan)
        with kernel.in_use(buffer):
            layer(Swiglu(arguments.clamp), kernel.overrides)
        buffer.memory.synchronize()
        buffer.raise_if_failed()
        form = layer.shape.token_format
        if form not in first:
            first[form] = kernel.name, layer.y.clone()
            checked_sample(
                layer.shape,
                tokens[form],
                layer.y,
                CHECKED_TOKENS,
                arguments.seed,
                Swiglu(arguments.clamp),
            )
            continue
        name, expected = first[form]
        if not torch.equal(layer.y.view(torch.int16), expected.view(torch.int16)):
            raise RuntimeError(
                f"{kernel.name} gives other results than {name}: {compare(layer.y, expected)}"
            )


def times(runs: Runs, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds by kernel, for each round."""
    us: dict[str, list[float]] = {kernel.name: [] for kernel, _ in runs}
    num_warm_calls = {}
    for round_idx in range(arguments.rounds):
        for kernel, layer in runs if round_idx % 2 == 0 else runs[::-1]:
            device = layer.buffer.device
            call = partial(layer, Swiglu(arguments.clamp), kernel.overrides)
            with kernel.in_use(layer.buffer):
                if kernel.name not in num_warm_calls:
                    # All ranks must make as many calls, so it goes by what all of them know.
                    seconds = slowest(timed(call, 1, 3, device)[0])
                    num_warm_calls[kernel.name] = math.ceil(arguments.warm_seconds / seconds)
                for _ in range(num_warm_calls[kernel.name]):
                    call()
                layer.buffer.memory.synchronize()
                ranks, _ = timed(call, 1, arguments.calls, device)
            us[kernel.name].append(1e6 * slowest(ranks))
    return us


def slowest(ranks: Sequence[Sequence[float]]) -> float:
    """
    >>> slowest([[1.0, 2.0, 9.0], [3.0, 4.0, 4.0]])
    4.0
    """
    return max(statistics.median(calls) for calls in ranks)


def line(num_tokens: int, us: dict[str, list[float]]) -> str:
    """Beside the first kernel.

    >>> line(8, {"now": [10.0, 12.0, 11.0], "old": [12.0, 12.1, 12.2]})
    '    8 tokens/rank  now 11.0 us (10.0 to 12.0)  old 12.1 us (12.0 to 12.2, +10.0%)'
    """
    medians = {name: statistics.median(rounds) for name, rounds in us.items()}
    first, *_ = medians.values()
    parts = []
    for i, (name, rounds) in enumerate(us.items()):
        off = f", {medians[name] / first - 1:+.1%}" if i else ""
        parts.append(f"{name} {medians[name]:.1f} us ({min(rounds):.1f} to {max(rounds):.1f}{off})")
    return "  ".join([f"{num_tokens:5d} tokens/rank", *parts])


if __name__ == "__main__":
    main()
