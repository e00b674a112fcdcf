"""The worked examples in the docstrings of heuristics, formats, buffers, checkpoints and stand-ins
hold."""

import doctest
import importlib
import pkgutil

import pytest

import deep_moe.heuristics

MODULES = [
    f"deep_moe.heuristics.{module.name}"
    for module in pkgutil.iter_modules(deep_moe.heuristics.__path__)
]


OTHERS = [
    "deep_moe.checkpoint.experts",
    "deep_moe.checkpoint.files",
    "deep_moe.checkpoint.layer",
    "deep_moe.compat.deep_gemm",
    "deep_moe.formats.block_scaled",
    "deep_moe.formats.mx",
    "deep_moe.weights",
    "deep_moe.weights.layers",
    "deep_moe.weights.transform",
    "deep_moe.weights.mxfp4.quantizing",
    "deep_moe.weights.mxfp4.sm90",
    "deep_moe.weights.fp8.sm90",
    "deep_moe.weights.bf16.sm90",
    "deep_moe.targets.choosing",
    "deep_moe.targets.registry",
    "deep_moe.tokens",
    "deep_moe.fused.buffer",
]


@pytest.mark.parametrize("name", [*MODULES, *OTHERS])
def test_examples_hold(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize(
    "name",
    [
        "deep_moe.heuristics.choices",
        "deep_moe.heuristics.presets",
        "deep_moe.heuristics.shape",
        "deep_moe.heuristics.sm100",
        "deep_moe.heuristics.sm90",
        "deep_moe.heuristics.symm_buffer_layout",
        "deep_moe.heuristics.tmem_layout",
        *OTHERS,
    ],
)
def test_the_worked_cases_are_there(name):
    assert doctest.testmod(importlib.import_module(name)).attempted > 0
