"""What `deep-moe run` runs without options: fuzz cases with chosen values, which cover each format
and path, pairs of calls, uneven and empty ranks, a small ring and a shared expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deep_moe.activations import GeluTanh, Relu2, Situ, Swiglu, SwigluOai, SwigluStep

from .adapter_fuzzing import AdapterCase
from .fuzzing import SMALL_POOL, Case, FuzzCase
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
_TRAINED: tuple[dict[str, Any], ...] = (
    {},
    {"precision": "fp8", "kept": "quantized", "tokens": "one rank has none"},
    {"precision": "mxfp8", "kept": "received tokens only", "biases": torch.bfloat16},
    {**_ALONE, "slots": "named twice", "activation": Situ(beta=1.0, linear_beta=2.0)},
    {
        **_ALONE,
        "sums": "main_grad",
        "precision": "fp8",
        "kept": "quantized",
        "activation": SwigluStep(0.5),
        "shape": (3, 2, 256, 160),
    },
    {**_ALONE, "precision": "mxfp8", "kept": "nothing", "activation": GeluTanh()},
    {**_ALONE, "shape": (40, 4, 128, 64), "slots": "all", "activation": Swiglu(clamp=0.75)},
)
_PREPARED = {"inputs": "prepared"}  # by a kernel, with no wait between the calls
_RING = {"pool": SMALL_POOL, "tokens": "many"}
_EMPTY = {"tokens": "one rank has none"}
_ALL = {"tokens": "one rank has all"}
_BIASED = {"biases": "both layers"}
_WIDE = {"shape": (2, 6, 2, 384, 512)}
_LIMITED = {"activation": SwigluOai(limit=24.0)}


def _cases() -> Iterator[Case]:
    def fused(arch: str, weights: str, **values: Any) -> Case:
        return FuzzCase(0, arch, {**_FUSED, "weights": weights, **values})

    def split(arch: str, weights: str, **values: Any) -> Case:
        return SplitCase(0, arch, {**_SPLIT, "weights": weights, **values})

    def throughput(arch: str, weights: str, **values: Any) -> Case:
        return ThroughputCase(0, arch, {**_THROUGHPUT, "weights": weights, **values})

    def adapters(arch: str, weights: str, **values: Any) -> Case:
        return AdapterCase(0, arch, {**_ADAPTERS, "weights": weights, **values})

    yield fused(
        "sm_100a", "mxfp4 x mxfp8", **_RING, **{"shared experts": 1}, chunks="of several sizes"
    )
    yield fused(
        "sm_100a", "fp8 x mxfp8", **_PREPARED, slots="unused", scales="fewer", **_BIASED, **_LIMITED
    )
    yield fused("sm_100a", "bf16 x bf16", **_EMPTY, slots="all to one expert", y="added to")
    yield fused(
        "sm_90a", "mxfp4 x mxfp8", **_PREPARED, **_EMPTY, **{"shared experts": 3, "tile": 2}
    )
    yield fused("sm_90a", "fp8 x mxfp8", **_RING, **_BIASED, tile=3, scales="fewest")
    yield fused(
        "sm_90a", "fp8 x fp8_128", slots="named twice", values="NaN", chunks="of several sizes"
    )
    yield fused("sm_90a", "fp8 x fp8_token", **_PREPARED, y="added to")
    yield fused("sm_90a", "fp8 x fp8_token", **_PREPARED, **_WIDE, activation=Relu2())
    yield fused("sm_90a", "bf16 x bf16", tile=3, slots="all to one expert", **_WIDE)
    yield fused("sm_90a", "mxfp4 x bf16", **_RING, tile=2, turns="of one m-block", y="added to")
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
    yield fused("sm_100a", "mxfp4 x bf16", **_RING, tile=2, y="added to")
    yield fused("sm_100a", "nvfp4 x bf16", **_EMPTY, **_BIASED, tile=3)
    yield fused("sm_100a", "int4 x bf16", **_PREPARED, values="NaN", tile=1, **_LIMITED)
    yield fused("sm_90a", "mxfp8 x bf16", **_RING, tile=0)
    yield split("sm_90a", "mxfp4 x mxfp8", slots="named twice", **_EMPTY)
    yield split(
        "sm_100a",
        "bf16 x bf16",
        **_ALL,
        kernels="two",
        placement="experts",
        rows="fetched",
        **_LIMITED,
    )
    yield throughput("sm_90a", "bf16 x bf16", **_ALL, slots="unused", room="for what comes")
    yield throughput("sm_100a", "mxfp4 x mxfp8", **_EMPTY, rows="written there", alignment=32)
    yield GroupedCase(0, "sm_90a", {**_GROUPED, "weights": "fp8 x fp8_128", "rows": "few"})
    yield GroupedCase(
        1, "sm_100a", {**_GROUPED, "pool": SMALL_POOL, "layout": "one behind the other"}
    )
    yield adapters("sm_90a", "mxfp4 x mxfp8")
    yield adapters(
        "sm_100a",
        "fp8 x fp8_token",
        shape=(4, 8, 2, 256, 128),
        **{"same tokens": "pairs", "routing weights": torch.float32},
        ids="in turn",
        expected="known",
    )
    for values in _TRAINED:
        yield TrainingCase(1, {**_TRAINING, **values})
    yield ProductCase(0, {**_PRODUCT, "layout": "in any order", "scales": "by column"})
    yield ProductCase(1, {**_PRODUCT, "rows": "beyond the ends", "numbers": "of any size"})


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
