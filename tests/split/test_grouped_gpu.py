"""Grouped experts on a GPU: what the emulator's tests say, there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from deep_moe import GroupedExperts
from deep_moe.errors import MegaMoEError
from deep_moe.split.grouped_experts import token_formats_for
from deep_moe.targets import target_of_device
from deep_moe.trial.comparison import compare
from deep_moe.trial.grouped_calls import Case, random_case
from deep_moe.weights import WEIGHTS

if TYPE_CHECKING:
    from deep_moe.weights import WeightsName

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
COUNTS = (37, 0, 300, 66)
NUM_ROWS = 320


def case_here(weights: WeightsName = "mxfp4", **more: Any) -> Case:
    target = target_of_device(torch.device("cuda"))
    if weights not in {own.weights for own in target.weights}:
        pytest.skip(f"there is no kernel for {weights} weights on {target.name}")
    return random_case(target.name, COUNTS, weights, hidden=1024, intermediate_hidden=512, **more)


def on_gpu(case: Case, counts: tuple[int, ...] = COUNTS) -> dict[str, Any]:
    x, scales = case.padded(NUM_ROWS)
    given = case.weights()
    weights = given.pop("weights")
    biases = {name: bias.cuda() for name, bias in given.items()}
    return {
        "x": x.cuda(),
        "scales": None if scales is None else scales.cuda(),
        "expert_count": torch.tensor(counts, dtype=torch.int32, device="cuda"),
        "weights": weights.with_tensors([tensor.cuda() for tensor in weights.tensors]),
        **biases,
    }


def experts_of(case: Case) -> GroupedExperts:
    return case.experts(arch=None, device="cuda", num_pool_tokens=case.shape.num_pool_tokens)


def rows_of(y: torch.Tensor) -> torch.Tensor:
    return torch.cat([part[:count] for part, count in zip(y.cpu(), COUNTS, strict=True)])


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_rows_are_right(weights: WeightsName, biases: bool) -> None:
    case = case_here(weights, biases=biases)
    with experts_of(case) as experts:
        arguments = on_gpu(case)
        ys = [experts(**arguments) for _ in range(3)]
        torch.cuda.synchronize()
        experts.check()
    assert compare(rows_of(ys[0]), case.bounds(on_gpu=True)).is_right
    assert torch.equal(rows_of(ys[0]), rows_of(ys[2]))


def test_float_scales_of_any_size() -> None:
    arch = target_of_device(torch.device("cuda")).name
    if "fp8_128" not in token_formats_for("fp8", arch):
        pytest.skip(f"there is no kernel for them on {arch}")
    case = case_here("fp8", token_format="fp8_128")
    with experts_of(case) as experts:
        y = experts(**on_gpu(case))
        torch.cuda.synchronize()
        experts.check()
    assert compare(rows_of(y), case.bounds(on_gpu=True)).is_right


def test_a_small_pool_is_used_again() -> None:
    whole = case_here()
    bounded = replace(whole, shape=replace(whole.shape, num_pool_tokens=768))
    with experts_of(whole) as one, experts_of(bounded) as other:
        arguments = on_gpu(whole)
        y, again = one(**arguments), other(**arguments)
        torch.cuda.synchronize()
    assert torch.equal(rows_of(y), rows_of(again))


def test_a_graph_with_other_counts() -> None:
    case = case_here()
    arguments = on_gpu(case)
    with experts_of(case) as experts:
        y = experts(**arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        out = torch.zeros_like(y)
        with torch.cuda.graph(graph):
            experts(**arguments, out=out)
        arguments["expert_count"].zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert not out.any()
        arguments["expert_count"].copy_(torch.tensor(COUNTS))
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(rows_of(out), rows_of(y))


def test_counts_that_do_not_fit_are_an_error_at_the_next_call() -> None:
    case = case_here()
    with experts_of(case) as experts:
        experts(**on_gpu(case, (37, 0, 330, 66)))
        torch.cuda.synchronize()
        with pytest.raises(MegaMoEError, match="must name rows of x; those of local expert 2"):
            experts(**on_gpu(case))
        experts.reset()
        assert compare(rows_of(experts(**on_gpu(case))), case.bounds(on_gpu=True)).is_right
