"""Random small layers through the emulated kernel, each judged by the bounds of its reference.

`python -m tests.trial.random_layers ARCH` runs 2,000 of them and prints what it saw, with
`--hopper` with Hopper's sums.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from deep_moe.activations import Activation, Swiglu
from deep_moe.cli.layer_options import LayerOptions
from deep_moe.formats.numerics import FP32_SUM_BITS, Numerics
from deep_moe.heuristics import MoEShape
from deep_moe.targets import TARGETS, target_of
from deep_moe.trial.bounds import reference_bounds
from deep_moe.trial.calls import run_emulated_ranks
from deep_moe.trial.comparison import Comparison, compare
from deep_moe.trial.synthetic import random_layer, random_tokens

# Few shapes, so that many layers share a compiled kernel: ranks, experts, top-k, hidden,
# intermediate, and the clamp. Layers of little more than one k-block have the fewest candidates and
# rows of many experts the most roundings.
_SHAPES = (
    (1, 4, 2, 256, 128, None),
    (1, 2, 1, 128, 256, None),
    (1, 8, 8, 512, 256, None),
    (1, 3, 3, 384, 384, 0.5),
    (2, 4, 2, 512, 128, 10.0),
    (1, 2, 2, 1024, 128, None),
)
_MAX_TOKENS = 4
_OVERRIDES = {"sm100": {"block_m": 16}, "sm90": {"block_m": 8}}  # for each kernel


@dataclass(frozen=True)
class Seen:
    """Of some layers."""

    num_layers: int
    num_values: int
    num_different: int  # values that do not equal the reference's
    wrong: list[int]  # numbers of the layers with wrong values


def numerics_of(arch: str) -> Numerics:
    return target_of(arch).weights_of().numerics


def of_one_shape(count: int) -> list[int]:
    """Numbers of layers that share a compiled kernel, if they have the same activation."""
    numbers = (number for number in itertools.count() if sizes_of(number) is _SHAPES[1])
    return list(itertools.islice(numbers, count))


def sizes_of(number: int) -> tuple[int, int, int, int, int, float | None]:
    return random.Random(number).choice(_SHAPES)


def judged_layer(
    number: int,
    arch: str,
    *,
    activation: Activation | None = None,
    hopper_fp8_sums: bool = False,
) -> list[Comparison]:
    """The layer with that number, rank by rank. activation: instead of its SwiGLU."""
    choose = random.Random(number)
    num_ranks, num_experts, num_topk, hidden, intermediate, clamp = choose.choice(_SHAPES)
    applied = Swiglu() if clamp is None else Swiglu(clamp)
    if activation is not None:
        applied = activation
    sizes = (num_ranks, num_experts, num_topk, hidden, intermediate, _MAX_TOKENS)
    shape = MoEShape(*sizes, has_gate=applied.has_gate)
    layer = random_layer(shape, seed=number)
    inputs = [
        random_tokens(shape, choose.randint(1, _MAX_TOKENS), seed=number + rank * 1_000_003)
        for rank in range(num_ranks)
    ]
    (outputs,) = run_emulated_ranks(
        shape,
        layer,
        [inputs],
        arch=arch,
        num_sms=2,
        activation=applied,
        overrides=_OVERRIDES[target_of(arch).kernel],
        checked=False,
        hopper_fp8_sums=hopper_fp8_sums,
    )
    numerics = numerics_of(arch)
    sum_bits = numerics.sum_bits if hopper_fp8_sums else FP32_SUM_BITS
    return [
        compare(
            output.y,
            reference_bounds(
                *layer.operands(own),
                numerics=numerics,
                sum_bits=sum_bits,
                activation=applied,
            ),
        )
        for own, output in zip(inputs, outputs, strict=True)
    ]


def judge_layers(
    numbers: Sequence[int],
    arch: str,
    *,
    activation: Activation | None = None,
    hopper_fp8_sums: bool = False,
) -> Seen:
    num_values = num_different = 0
    wrong = []
    for number in numbers:
        comparisons = judged_layer(
            number, arch, activation=activation, hopper_fp8_sums=hopper_fp8_sums
        )
        num_values += sum(c.num_values for c in comparisons)
        num_different += sum(c.num_values - c.num_equal for c in comparisons)
        if not all(c.is_right for c in comparisons):
            wrong.append(number)
    return Seen(len(numbers), num_values, num_different, wrong)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("arch", choices=TARGETS)
    parser.add_argument("--hopper", action="store_true")
    parser.add_argument("--activation", help="instead of SwiGLU")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000)
    arguments = parser.parse_args(words)
    activation = LayerOptions(activation=arguments.activation).applied()
    numbers = range(arguments.first, arguments.first + arguments.count)
    for start in range(0, len(numbers), 100):
        seen = judge_layers(
            numbers[start : start + 100],
            arguments.arch,
            activation=activation if arguments.activation else None,
            hopper_fp8_sums=arguments.hopper,
        )
        print(json.dumps({"first": numbers[start], **vars(seen)}), flush=True)


if __name__ == "__main__":
    main()
