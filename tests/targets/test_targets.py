"""Targets: found by name and capability, the only place that knows an architecture, and each whole:
it compiles, runs in the emulator, and rounds as its reference says."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deep_moe.targets
from deep_moe import jit
from deep_moe.activations import ACTIVATIONS
from deep_moe.heuristics import MoEShape
from deep_moe.jit.cpp_structs import member_names
from deep_moe.jit.kernel_args import kernel_args
from deep_moe.targets import (
    TARGETS,
    choose_config,
    target_of,
    target_of_capability,
    target_of_device,
)
from deep_moe.targets.sm90 import SM90A
from deep_moe.tokens import TOKEN_FORMATS
from deep_moe.trial.synthetic import exact_layer, exact_tokens
from deep_moe.weights import WEIGHTS
from deep_moe.weights.mxfp4.sm90 import Sm90Mxfp4
from tests.everyday import parametrize
from tests.kernels.layer_case import LayerCase
from tests.pairs import formats

BELOW_THE_CALLS = ("targets", "fused", "biases", "formats", "activations")
ROOT = Path(__file__).parents[2]
SHAPE = MoEShape(2, 4, 2, 256, 128, 16)


def test_a_target_is_found_by_its_name_and_by_its_gpus_capability() -> None:
    by_capability = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
    for capability, name in by_capability.items():
        assert target_of_capability(capability) is target_of(name) is TARGETS[name]
    assert set(by_capability.values()) == set(TARGETS)
    assert target_of_capability((8, 0)) is None


@pytest.mark.parametrize(("name", "error"), [("sm_80", ValueError), (90, TypeError)])
def test_what_is_no_target_is_refused(name: object, error: type[Exception]) -> None:
    words = re.escape(f"arch must be one of sm_90a, sm_100a, sm_103a; got {name!r}")
    with pytest.raises(error, match=words):
        target_of(name)  # type: ignore[arg-type]
    with pytest.raises(error, match=words):
        choose_config(SHAPE, 4, arch=name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "name"), [((9, 0), "sm_90a"), ((10, 3), "sm_103a"), ((8, 9), None)]
)
def test_a_devices_target(monkeypatch: pytest.MonkeyPatch, capability, name) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    if name is None:
        with pytest.raises(ValueError, match=r"sm_90a \(H100, H200\).*cuda:1 has.*8\.9"):
            target_of_device(torch.device("cuda", 1))
    else:
        assert target_of_device(torch.device("cuda", 1)).name == name


def test_a_format_that_a_target_does_not_have_is_refused_with_both_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(vars(SM90A), "weights", (Sm90Mxfp4(),))
    fp8 = dataclasses.replace(SHAPE, **formats("fp8"))
    with pytest.raises(ValueError, match="weights must be one of mxfp4 on sm_90a; got 'fp8'"):
        choose_config(fp8, 4, arch="sm_90a")
    with pytest.raises(ValueError, match="weights must be one of mxfp4 on sm_90a; got 'fp8'"):
        deep_moe.empty_weights_for_mega_moe(4, 256, 128, arch="sm_90a", weights="fp8")
    assert choose_config(fp8, 4, arch="sm_100a").target_weights.weights == "fp8"
    with pytest.raises(ValueError, match=r"weights must be one of mxfp4, .*; got 'bf17'"):
        dataclasses.replace(SHAPE, weights="bf17")


def test_targets_load_no_torch() -> None:
    modules = "sys, deep_moe.targets, deep_moe.targets.config"
    code = f"import {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_nothing_else_names_an_architecture() -> None:
    folders = ("deep_moe", "heuristics", "jit", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    naming = {
        str(path.relative_to(ROOT))
        for path in files
        if any(
            isinstance(node, ast.Constant) and re.fullmatch(r"sm_?\d+a?", str(node.value))
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert naming == {
        "deep_moe/targets/sm90/target.py",
        "deep_moe/targets/sm100/target.py",
        "benchmarks/chip_clock.py",  # whose probes are Hopper's
        "benchmarks/emulator_speed.py",  # whose kernels use the instructions of each
        "benchmarks/sm100_rival.py",  # whose kernel is Blackwell's
        "deep_moe/trial/small_layers.py",  # one of each
    }


def test_only_its_folder_and_what_stands_above_the_calls_names_a_format() -> None:
    """Checkpoints, adapters and stand-ins translate others' names. "bf16" is a dtype's, too."""
    below = ("heuristics", "jit", *(f"deep_moe/{name}" for name in BELOW_THE_CALLS))
    names = {*WEIGHTS, *TOKEN_FORMATS} - {"bf16"}
    naming = {
        str(path.relative_to(ROOT))
        for folder in below
        for path in (ROOT / folder).rglob("*.py")
        if any(
            isinstance(node, ast.Constant) and node.value in names
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert naming == {"deep_moe/fused/mega_moe.py"}  # what `fp8_fp4_mega_moe` takes


def test_only_its_folder_and_what_stands_above_the_calls_names_an_activation() -> None:
    """The default is `DEFAULT_ACTIVATION`. Adapters translate names of others."""
    words = {*ACTIVATIONS, *(kind.__name__ for kind in ACTIVATIONS.values())}
    folders = ("heuristics", "jit", *(f"deep_moe/{name}" for name in (*BELOW_THE_CALLS, "split")))
    naming = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Constant) and node.value in words)
        or (isinstance(node, ast.alias) and node.name in words)
    }
    own = {f"deep_moe/activations/{name}/__init__.py" for name in ACTIVATIONS}
    registered = "deep_moe/activations/__init__.py"
    assert naming - own == {registered, "heuristics/presets.py"}
    headers = (ROOT / "include/deep_moe").rglob("*.cuh")
    pattern = re.compile(rf"\b({'|'.join(kind.struct for kind in ACTIVATIONS.values())})\b")
    in_code = {
        str(path.relative_to(ROOT / "include/deep_moe"))
        for path in headers
        if any(pattern.search(line.partition("//")[0]) for line in path.read_text().splitlines())
    }
    assert in_code == {f"activations/{name}/activation.cuh" for name in ACTIVATIONS}


@pytest.mark.parametrize("name", TARGETS)
def test_operands_have_the_names_of_the_kernels_arguments(name: str) -> None:
    target = target_of(name)
    for weights in target.weights:
        shape = dataclasses.replace(
            SHAPE, weights=weights.weights, token_format=weights.token_format
        )
        config = choose_config(shape, 4, arch=name)
        made = deep_moe.transform_weights_for_mega_moe(
            *exact_layer(shape, scale_block=weights.scale_block).of_rank(0, 2),
            arch=name,
            weights=weights.weights,
            token_format=weights.token_format,
        )
        expected = weights.tensors(shape).values()
        assert [(t.dtype, tuple(t.shape)) for t in made.tensors] == list(expected)
        operands = weights.operands(config, 1 << 20, made.l1, made.l2)
        members = {*member_names(kernel_args(target.kernel))}
        assert operands.tensor_maps.keys() | operands.addresses.keys() <= members


def test_sm_103a_is_the_kernel_of_sm_100a_under_its_own_name() -> None:
    config = choose_config(SHAPE, 16, arch="sm_103a", num_sms=2)
    # Only what the compiler has to be given differs.
    names = ("num_dispatch_registers", "num_loader_registers", "num_epilogue_registers")
    registers = {name: getattr(config, name) for name in names}
    same = choose_config(SHAPE, 16, arch="sm_100a", num_sms=2, overrides=registers)
    assert config.kernel_fields() == same.kernel_fields()
    assert config != same
    own, other = jit.render_kernel(config), jit.render_kernel(same)
    assert own.replace("sm_103a", "sm_100a") == other
    kernel = jit.build(config)
    assert kernel.manifest["arch"] == "sm_103a"
    assert ".target sm_103a" in kernel.ptx


PAIRS = [
    (name, f"{own.weights} x {own.token_format}")
    for name, target in TARGETS.items()
    for own in target.weights
]


@parametrize(("name", "weights"), PAIRS, everyday=[(name, "mxfp4 x mxfp8") for name in TARGETS])
def test_a_target_runs_in_the_emulator_as_its_reference(name: str, weights: str) -> None:
    shape = dataclasses.replace(SHAPE, **formats(weights))
    own = target_of(name).weights_of(**formats(weights))
    layer = exact_layer(shape, sum_bits=own.numerics.sum_bits, scale_block=own.scale_block)
    case = LayerCase(shape, layer, arch=name)
    tokens = [exact_tokens(shape, count, seed=count) for count in (9, 4)]
    assert all(result.is_exact for result in case.compare_call(tokens, num_sms=2))


@pytest.mark.parametrize("name", TARGETS)
def test_formats_of_a_target_have_as_many_tiles_to_fuzz(name: str) -> None:
    assert len({len(own.fuzz_tiles) for own in target_of(name).weights}) == 1
