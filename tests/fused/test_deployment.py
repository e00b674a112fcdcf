"""Which kernels a deployment needs, and that they are built once."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import deep_moe.fused.deployment
from benchmarks.host_overhead import Layers, UndrivenGpu, gpu_path_on_cpu
from deep_moe.activations import Swiglu
from deep_moe.cli import app
from deep_moe.fused import loaded_kernels
from deep_moe.fused.bounded_cache import BoundedCache
from deep_moe.fused.call_plan import prepare_call
from deep_moe.fused.config_chooser import ConfigChooser
from deep_moe.fused.deployment import ChosenConfigs, deployment_configs
from deep_moe.heuristics import PRESETS, MoEShape, preset_shape
from deep_moe.heuristics.choices import (
    MAX_TILE_ROWS,
    ROWS_UNIT,
    load_key,
)
from deep_moe.jit.kernel_args import RECEIVED_UNEVENLY
from deep_moe.targets import MegaMoEConfig, choose_config, target_of
from tests.pairs import formats, usual_pairs


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.parametrize("num_max_tokens", [1, 7, 700])
def test_every_number_of_tokens_is_in_the_range_of_its_config(model: str, num_max_tokens: int):
    shape = preset_shape(model, num_ranks=8, num_max_tokens_per_rank=num_max_tokens)
    found = deployment_configs(lambda n: choose_config(shape, n), num_max_tokens)
    for first, last, config in found:
        for num_tokens in range(first, last + 1):
            assert choose_config(shape, num_tokens) == config
    assert [last for _, last, _ in found[:-1]] == [first - 1 for first, _, _ in found[1:]]
    assert (found[0][0], found[-1][1]) == (0, num_max_tokens)


# Small experts get few tokens, large ones many; with a shared expert every number counts; the table
# of an H200 has measurements of the one of DeepSeek-V4's shape.
CHOSEN: list[tuple[str, str, dict[str, Any]]] = [
    ("sm_90a", "mxfp4", {}),
    ("sm_90a", "fp8", {"num_topk": 16}),
    ("sm_90a", "bf16", {"num_experts": 16}),
    ("sm_90a", "mxfp4", {"num_shared_experts": 1}),
    ("sm_100a", "mxfp4", {"num_topk": 16}),
    ("sm_100a", "fp8", {"num_experts": 512}),
]


@pytest.mark.parametrize("gpu", [None, "NVIDIA H200"])
@pytest.mark.parametrize(("arch", "weights", "changes"), CHOSEN)
def test_what_is_chosen_at_once_is_what_each_call_would_choose(arch, weights, changes, gpu):
    most = 1024
    sizes = {"num_experts": 192, "num_topk": 6, **changes}
    shape = MoEShape(
        num_ranks=4 if sizes["num_experts"] % 4 == 0 else 1,
        num_max_tokens_per_rank=most,
        hidden=4096,
        intermediate_hidden=2048,
        weights=weights,
        **sizes,
    )
    choose = ConfigChooser(shape, arch, 132, Swiglu(), True, False, (), False, gpu)
    num_choices = 0

    def counted(num_tokens: int, is_uneven: bool) -> MegaMoEConfig:
        nonlocal num_choices
        num_choices += 1
        return choose(num_tokens, is_uneven)

    chosen = ChosenConfigs(counted, most, choose.key)
    assert num_choices <= 2 * (most + 1)
    for num_tokens in range(most + 1):
        for is_uneven in (False, True):
            assert chosen(num_tokens, is_uneven) == choose(num_tokens, is_uneven)


def test_most_numbers_of_tokens_are_not_chosen_for_again():
    """Choosing for 8192 tokens took seconds, while an engine waits."""
    shape = preset_shape("deepseek-v4-flash", num_ranks=1, num_max_tokens_per_rank=8192)
    choose = ConfigChooser(shape, "sm_90a", 132, Swiglu(), True, False, (), False, None)
    assert len({choose.key(num_tokens) for num_tokens in range(8193)}) < 1600
    shape = preset_shape("deepseek-v4-pro", num_ranks=8, num_max_tokens_per_rank=8192)
    assert len({load_key(shape, num_tokens) for num_tokens in range(8193)}) < 600


def test_means_are_compared_with_rows_that_keys_tell_apart():
    """`load_key` forgets everything else about a large mean."""
    rows = {block_m for pair in target_of("sm_90a").weights for block_m, _ in pair.kind.tiles}
    assert len(rows) > 20
    assert {block_m % ROWS_UNIT for block_m in rows} == {0}
    assert max(rows) <= MAX_TILE_ROWS


@pytest.mark.slow
@pytest.mark.parametrize("weights", usual_pairs("sm_90a"))
def test_a_large_deployment_gets_what_each_of_its_calls_would_choose(weights: str):
    shape = preset_shape("deepseek-v4-pro", num_ranks=8, num_max_tokens_per_rank=8192)
    shape = replace(shape, **formats(weights))
    choose = ConfigChooser(shape, "sm_90a", 132, Swiglu(), True, False, (), False, "NVIDIA H200")
    chosen = ChosenConfigs(choose, 8192, choose.key)
    for num_tokens in range(8193):
        for is_uneven in (False, True):
            assert chosen(num_tokens, is_uneven) == choose(num_tokens, is_uneven)


def test_neighbouring_configs_differ():
    shape = preset_shape("deepseek-v3", num_ranks=8, num_max_tokens_per_rank=512)
    found = deployment_configs(lambda n: choose_config(shape, n), 512)
    assert all(one != other for (_, _, one), (_, _, other) in pairwise(found))
    assert len(found) > 3


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_no_call_behind_a_warmup_has_to_compile(arch: str, monkeypatch: pytest.MonkeyPatch):
    """However many tokens it has, and whatever its experts received, and how evenly."""
    most, num_topk = 96, 2
    shape = MoEShape(1, 4, num_topk, 256, 128, most)
    gpu = UndrivenGpu(target_of(arch))
    warmed: set[MegaMoEConfig] = set()

    def build(configs: list[tuple[int, int, MegaMoEConfig]], **_: object) -> list[object]:
        warmed.update(config for _, _, config in configs)
        return []

    monkeypatch.setattr(deep_moe.fused.deployment, "build_deployment", build)
    sizes = {"ranks": 1, "experts": 4, "topk": num_topk, "hidden": 256, "intermediate": 128}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    words += ["--max-tokens", str(most), "--arch", arch, "--num-sms", str(gpu.num_sms)]
    result = CliRunner().invoke(app, ["warmup", *words])
    assert result.exit_code == 0, result.output

    asked: set[MegaMoEConfig] = set()
    monkeypatch.setattr(loaded_kernels, "_launchers", BoundedCache(1024))
    monkeypatch.setattr(loaded_kernels, "built_kernel", asked.add)
    with gpu_path_on_cpu(gpu):
        layers = Layers(shape, 1, torch.device("cpu"))
        status, (l1, l2) = layers.buffer.memory.status, layers.weights[0]
        for num_tokens in range(most + 1):
            for received in range(0, num_topk * most + 1, 5):
                for flag in (0, RECEIVED_UNEVENLY):
                    status.received = received | flag
                    prepare_call(layers.ys[0][:num_tokens], l1, l2, layers.buffer, {}, {})
    assert len(asked) > 1
    assert asked <= warmed, asked - warmed
