"""What `deep-moe run` runs without options: fuzz cases with chosen values, which cover each path,
each format of weights and of tokens on one of the kernels, pairs of calls, uneven and empty ranks,
a small ring and shared experts. Few, so that they take some 20 seconds of a processor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from deep_moe.activations import Swiglu, SwigluOai, SwigluStep

from .adapter_fuzzing import AdapterCase
from .fuzzing import CASES_PER_KERNEL, SMALL_POOL, Case, FuzzCase
from .grouped_fuzzing import GroupedCase
from .product_fuzzing import ProductCase
from .split_fuzzing import SplitCase
from .throughput_fuzzing import ThroughputCase
from .training_fuzzing import TrainingCase

_FUSED: dict[str, Any] = {
    "weights": "mxfp4 x mxfp8",
    "shape": (2, 4, 3, 256, 96),
    "shared experts": 0,
    "tile": 1,
    "turns": "as chosen",
    "biases": "none",
    "activation": Swiglu(),
    "y": "written",
    "chunks": "chosen",
    "pool": None,
    "scales": "the kernel's",
    "inputs": "filled",
    "tokens": "any",
    "slots": "all",
    "values": "numbers",
    "schedule": "random",
}
_SPLIT: dict[str, Any] = {
    **{
        axis: value
        for axis, value in _FUSED.items()
        if axis not in ("y", "chunks", "scales", "inputs")
    },
    "shape": (2, 6, 2, 512, 128),
    "placement": "ranks",
    "kernels": "one",
    "rows": "sent",
    "ids": torch.int64,
    "layout": "by expert",
}
_THROUGHPUT: dict[str, Any] = {**_SPLIT, "alignment": 1, "room": "for all", "rows": "copied"}
_TRAINING: dict[str, Any] = {
    "ranks": 2,
    "shape": (3, 3, 128, 96),
    "steps": "sm_90a",
    "precision": "bf16",
    "w1 and w3": "apart",
    "activation": Swiglu(),
    "biases": None,
    "kept": "as usual",
    "tokens": "any",
    "ids": torch.int64,
    "slots": "unused",
    "gates": "numbers",
    "schedule": "random",
    "sums": "returned",
}
_ADAPTERS: dict[str, Any] = {
    **{axis: _FUSED[axis] for axis in ("weights", "shape", "slots", "values", "schedule")},
    "same tokens": "none",
    "calls": "several",
    "expected": "unknown",
    "ids": torch.int64,
    "routing weights": "in turn",
    "tokens": "none, 1 or most",
}
# Of experts whose tokens are there already: rows that a small ring has to hold one after another.
_GROUPED: dict[str, Any] = {
    "weights": "mxfp4 x mxfp8",
    "shape": (4, 384, 128),
    "tile": 1,
    "biases": "none",
    "pool": None,
    "layout": "by expert",
    "rows": "any",
    "seed": 0,
}
_PRODUCT: dict[str, Any] = {
    "columns": 136,
    "values": 1152,  # more than the stages hold
    "experts": 5,
    "layout": "by expert",
    "rows": "any",
    "scales": "by row",
    "numbers": "exact",
}
# Of several ranks rows come by the all-to-all; of one they are sorted and gathered here.
_ALONE: dict[str, Any] = {"ranks": "one", "biases": torch.float32}
_PREPARED = {"inputs": "prepared"}  # by a kernel, with no wait between the calls
_RING = {"pool": SMALL_POOL, "tokens": "many"}
_EMPTY = {"tokens": "one rank has none"}
_ALL = {"tokens": "one rank has all"}
_BIASED = {"biases": "both layers"}
_LIMITED = {"activation": SwigluOai(limit=24.0)}


def _cases() -> Iterator[Case]:
    # Each its own, so that two workers share them.
    numbers = itertools.count(0, CASES_PER_KERNEL)

    def fused(arch: str, weights: str, **values: Any) -> Case:
        return FuzzCase(next(numbers), arch, {**_FUSED, "weights": weights, **values})

    def training(**values: Any) -> Case:
        return TrainingCase(next(numbers), {**_TRAINING, **values})

    yield fused(
        "sm_100a", "mxfp4 x mxfp8", **_RING, **{"shared experts": 1}, chunks="of several sizes"
    )
    yield training()
    yield fused("sm_90a", "fp8 x fp8_128", **_RING, values="NaN", chunks="of several sizes")
    yield fused("sm_100a", "bf16 x bf16", **_EMPTY, slots="all to one expert", y="added to")
    yield fused(
        "sm_90a", "mxfp4 x mxfp8", **_PREPARED, **_EMPTY, **{"shared experts": 3, "tile": 2}
    )
    yield fused("sm_90a", "nvfp4 x bf16", **_ALL, **_BIASED, tile=3)
    yield fused("sm_100a", "nvfp4 x nvfp4", **_PREPARED, values="NaN", tile=2, **_LIMITED)
    yield fused(
        "sm_100a",
        "fp8 x fp8_token",
        **_PREPARED,
        **_BIASED,
        slots="named twice",
        scales="fewest",
    )
    yield fused("sm_100a", "mxfp8 x mxfp8", **_ALL, slots="unused")
    yield fused("sm_90a", "int4 x bf16", **_PREPARED, tile=2, slots="unused", scales="fewest")
    yield SplitCase(
        next(numbers),
        "sm_100a",
        {
            **_SPLIT,
            "weights": "bf16 x bf16",
            **_ALL,
            "kernels": "two",
            "placement": "experts",
            "rows": "fetched",
            **_LIMITED,
        },
    )
    yield ThroughputCase(
        next(numbers),
        "sm_90a",
        {**_THROUGHPUT, "weights": "bf16 x bf16", **_EMPTY, "rows": "written there"},
    )
    yield GroupedCase(
        next(numbers), "sm_90a", {**_GROUPED, "weights": "fp8 x fp8_128", "rows": "few"}
    )
    yield AdapterCase(
        next(numbers),
        "sm_100a",
        {
            **_ADAPTERS,
            "weights": "fp8 x fp8_token",
            "shape": (4, 8, 2, 256, 128),
            "same tokens": "pairs",
            "routing weights": torch.float32,
            "ids": "in turn",
            "expected": "known",
        },
    )
    yield training(precision="mxfp8", kept="received tokens only", **_EMPTY)
    yield training(
        **_ALONE,
        sums="main_grad",
        precision="fp8",
        kept="quantized",
        activation=SwigluStep(0.5),
        shape=(3, 2, 256, 160),
    )
    yield training(**_ALONE, shape=(40, 4, 128, 64), slots="named twice")
    yield ProductCase(next(numbers), {**_PRODUCT, "layout": "in any order", "scales": "by column"})


SMALL_LAYERS = tuple(_cases())


def words_of(case: Case) -> str:
    """What is special about a case."""
    usual = {
        "fused": _FUSED,
        "split": _SPLIT,
        "throughput": _THROUGHPUT,
        "grouped": _GROUPED,
        "adapters": _ADAPTERS,
        "training": _TRAINING,
        "product": _PRODUCT,
    }
    words = [str(case.values.get("weights") or case.values.get("precision", "fp8"))]
    words += [
        f"{axis}: {value}"
        for axis, value in case.values.items()
        if axis not in ("weights", "precision", "shape", "tile") and value != usual[case.path][axis]
    ]
    return ", ".join(words)
