"""What benchmarks/training.py times, in small and on a CPU."""

from __future__ import annotations

import itertools
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import liger_layer, quack_layer, training
from deep_moe.training import kept_weights
from deep_moe.training.plain_steps import PlainSteps

MODEL = training.Model(hidden=128, intermediate=128, num_experts=4, num_topk=2)


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> training.Case:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    return training.Case.random(MODEL, 24, device="cpu")


def test_all_paths_run_and_agree(case: training.Case) -> None:
    paths = training.paths_of(case)
    training.check(case, paths)
    for path in paths.values():
        path()


def test_frozen_paths_are_those_that_quantize(case: training.Case) -> None:
    quantized = training.paths_of(case)
    with ExitStack() as stack:
        frozen = training.frozen_paths(case, list(training.FROZEN_PATHS), stack)
        for name, same in (
            ("frozen", "fp8"),
            ("frozen-dgrad", "fp8-dgrad"),
            ("frozen-wgrad", "fp8-wgrad"),
        ):
            for found, expected in zip(frozen[name](), quantized[same](), strict=True):
                assert torch.equal(found, expected)
        assert all(entry._copies for entry in kept_weights._kept.values())
    assert not kept_weights._kept


def test_frozen_and_fused_paths_accumulate_the_same_gradients(
    case: training.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized: list[int] = []
    make = PlainSteps.quantize_weights_both_ways

    def counting(steps: PlainSteps, weights: torch.Tensor) -> Any:
        quantized.append(1)
        return make(steps, weights)

    monkeypatch.setattr(PlainSteps, "quantize_weights_both_ways", counting)
    gradients: list[list[torch.Tensor | None]] = []
    counts: list[int] = []
    for path in ("fp8-wgrad", "frozen-wgrad", *training.FUSED_PATHS):
        case.accumulating_step(path, num_passes=3)()
        gradients.append([case.w13.grad, case.w2.grad])
        counts.append(len(quantized))
    for sums in gradients[1:]:
        for found, expected in zip(sums, gradients[0], strict=True):
            assert found is not None
            assert expected is not None
            assert found.equal(expected)
    assert counts == [2 * 3, 2 * 3 + 2, 4 * 3 + 2, 4 * 3 + 4]
    case.accumulating_step("ours", num_passes=3)()
    assert case.w2.grad is not None
    assert not case.w2.grad.equal(gradients[0][1])  # type: ignore[arg-type]
    assert case.x.grad is None
    assert not kept_weights._kept


def test_sums_may_be_in_float32(case: training.Case) -> None:
    found = []
    for path in ("fp8-wgrad", "fused-wgrad"):
        case.accumulating_step(path, num_passes=3, has_main_grad=True)()
        assert case.w2.grad is None
        found.append(case.w2.main_grad)  # type: ignore[attr-defined]
    apart, fused = found
    assert apart.dtype == fused.dtype == torch.float32
    assert not fused.equal(apart)  # products are rounded to BF16 where PyTorch adds them
    assert (fused - apart).norm() < 2.0**-8 * apart.norm()


def test_what_cannot_accumulate_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for given, message in (
        (["--accumulate", "0"], "--accumulate must be at least 1; got 0"),
        (["--accumulate", "2", "--paths", "ours", "plain"], "--accumulate has no paths plain"),
        (["--paths", "ours", "fused-wgrad"], "paths fused-wgrad go with --accumulate"),
        (["--main-grad"], "--main-grad goes with --accumulate"),
    ):
        with pytest.raises(SystemExit):
            training.main(given)
        assert message in capsys.readouterr().err


def test_lines_of_steps_of_several_passes() -> None:
    found = {"ms": 9.0, "passes_ms": 7.0, "end_ms": 2.0, "tflops": 5.0, "peak_gib": 0.5}
    entry = {"model": "m", "tokens": 8, "accumulate": 3, "paths": {"frozen": found}}
    assert "9.000 ms (7.000 + 2.000)" in training.lines(entry)


def test_lines_of_a_path_without_graphs() -> None:
    times = {"ms": 3.0, "forward_ms": 1.0, "backward_ms": 2.0}
    found = {**times, **{f"graph_{name}": value for name, value in times.items()}}
    found |= {"tflops": 5.0, "peak_gib": 0.5}
    alone = {name: value for name, value in found.items() if not name.startswith("graph_")}
    entry = {"model": "m", "tokens": 8, "paths": {"fp8": found, "frozen": alone}}
    with_graphs, without = training.lines(entry).splitlines()
    assert with_graphs.count("3.000 ms (1.000 + 2.000)") == 2
    assert without.count("3.000 ms (1.000 + 2.000)") == 1


def test_a_wrong_layer_is_not_timed(case: training.Case) -> None:
    paths = training.paths_of(case)
    other = replace(case, w2=(2 * case.w2).detach().requires_grad_())
    with pytest.raises(RuntimeError, match="ours: out differs from the plain layer's"):
        training.check(case, {**paths, "ours": training.paths_of(other)["ours"]})


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    cu_seqlens_m: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    A_idx: torch.Tensor | None = None,  # noqa: N803
    tuned: bool,
) -> torch.Tensor:
    """What QuACK's calls say that they do, without a GPU, in float32."""
    a, b = a.float(), b.float()
    if cu_seqlens_k is not None:
        columns = a if A_idx is None else a[:, A_idx]
        parts = [columns[:, i:j] @ b[i:j] for i, j in itertools.pairwise(cu_seqlens_k)]
        return torch.stack(parts).bfloat16()
    assert cu_seqlens_m is not None
    rows = a if A_idx is None else a[A_idx]
    spans = zip(itertools.pairwise(cu_seqlens_m), b, strict=True)
    return torch.cat([rows[i:j] @ weight for (i, j), weight in spans]).bfloat16()


def gated(
    a: torch.Tensor, b: torch.Tensor, *, activation: str, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    assert activation == "swiglu"
    linear1 = gemm(a, b, **options)
    gate, up = linear1[:, ::2], linear1[:, 1::2]
    return linear1, torch.nn.functional.silu(gate) * up


def dgated(
    a: torch.Tensor,
    b: torch.Tensor,
    linear1: torch.Tensor,
    *,
    activation: str,
    colvec_scale: torch.Tensor,
    colvec_reduce: bool,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert activation == "swiglu"
    assert colvec_reduce
    d_activated = gemm(a, b, **options).float()
    pairs = linear1.detach().float().requires_grad_()
    with torch.enable_grad():
        activated = torch.nn.functional.silu(pairs[:, ::2]) * pairs[:, 1::2]
    weights = colvec_scale.unsqueeze(1)
    (d_linear1,) = torch.autograd.grad(activated, pairs, d_activated * weights)
    weighted = (activated.detach() * weights).bfloat16()
    return d_linear1.bfloat16(), weighted, (activated.detach() * d_activated).sum(1)


PRODUCTS = quack_layer.Products(gemm, gated, dgated)


def test_the_librarys_layer_agrees(case: training.Case) -> None:
    paths = training.paths_of(case) | training.quack_paths(case, PRODUCTS)
    assert set(training.QUACK_PATHS) < set(paths)
    training.check(case, paths)


def test_a_wrong_result_of_the_library_is_not_timed(case: training.Case) -> None:
    def doubled(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        return 2 * gemm(*tensors, **options)

    wrong = replace(PRODUCTS, gemm=doubled)
    paths = training.paths_of(case) | training.quack_paths(case, wrong)
    with pytest.raises(RuntimeError, match="quack: out differs from the plain layer's"):
        training.check(case, paths)


def ligers_calls(state: list[tuple[torch.Tensor, ...]], scale: float = 1.0) -> liger_layer.Calls:
    """What liger's calls say that they do, without a GPU, in float32. state: what waits for a
    backward pass in the symmetric memory, most of it one."""

    def forward(x: torch.Tensor, topk_idx: torch.Tensor, *tensors: Any) -> tuple[Any, ...]:
        *matrices, num_experts, num_topk, team = tensors
        assert (topk_idx.dtype, matrices[0].dtype) == (torch.int32, torch.bfloat16)
        assert all(tensor.is_contiguous() for tensor in (x, topk_idx, *matrices))
        assert (num_experts, num_topk, team) == (MODEL.num_experts, MODEL.num_topk, 7)
        assert not state
        leaves = [tensor.detach().float().requires_grad_() for tensor in (x, *matrices)]
        tokens, topk_weights, gate, up, down = leaves
        with torch.enable_grad():
            slots = []
            for slot in range(num_topk):
                experts = topk_idx[:, slot].long()
                gates = torch.einsum("th,tih->ti", tokens, gate[experts])
                ups = torch.einsum("th,tih->ti", tokens, up[experts])
                activated = torch.nn.functional.silu(gates) * ups
                y = torch.einsum("ti,thi->th", activated, down[experts])
                slots.append(topk_weights[:, slot, None] * y)
            out = torch.stack(slots).sum(0)
        state.append((out, *leaves))
        return out.detach().bfloat16(), "meta", "meta", "meta", "slots", "tiles", 64

    def backward(d_out: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
        assert given[:5] == ("meta", "meta", "slots", "tiles", "meta")
        assert given[-4:] == (MODEL.num_experts, MODEL.num_topk, 7, 64)
        out, *leaves = state[-1]
        found = torch.autograd.grad(out, leaves, d_out.float(), retain_graph=True)
        d_x, d_weights, d_gate, d_up, d_down = (scale * gradient.bfloat16() for gradient in found)
        return d_x, d_gate, d_up, d_down, d_weights

    def pop(team: int) -> None:
        assert team == 7
        state.pop()

    return liger_layer.Calls(forward, backward, pop, 7)


def test_ligers_layer_agrees_and_leaves_nothing_behind(case: training.Case) -> None:
    state: list[tuple[torch.Tensor, ...]] = []
    paths = training.paths_of(case) | {"liger": training.liger_path(case, ligers_calls(state))}
    errors = training.check(case, paths)
    assert 0 < errors["liger"] < training.LIGER_ALLOWED_ERROR
    paths["liger"]()
    assert not state


def test_wrong_gradients_of_ligers_are_not_timed(case: training.Case) -> None:
    calls = ligers_calls([], scale=1.1)
    paths = training.paths_of(case) | {"liger": training.liger_path(case, calls)}
    with pytest.raises(RuntimeError, match="liger: x differs from the plain layer's by 0"):
        training.check(case, paths)


def test_ligers_memory_is_for_the_layer_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of its library's calls, which a CPU cannot make."""
    made: list[Any] = []
    library = SimpleNamespace(
        MoEConfig=SimpleNamespace,
        configure=lambda *, device, moe: made.append((device, moe)),
        nvshmem=SimpleNamespace(
            resolve_team=lambda group: 7,
            pool_clear_all=lambda: made.append("clear"),
            finalize=lambda: made.append("finalize"),
        ),
        tvm_ffi=SimpleNamespace(
            moe_fused_fwd_bf16="forward", moe_fused_bwd_bf16="backward", moe_pop_fwd="pop"
        ),
    )
    monkeypatch.setitem(sys.modules, "liger_cute_kernels", library)
    for name in liger_layer.ENVIRONMENT:
        monkeypatch.setenv(name, "")  # so that what the runtime sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    device = torch.device("cuda", 1)
    sizes = {"num_tokens": 24, "hidden": 128, "num_experts": 8, "num_topk": 2}
    with liger_layer.runtime(device), liger_layer.configured(device, **sizes) as calls:
        assert calls == liger_layer.Calls("forward", "backward", "pop", 7)  # type: ignore[arg-type]
        assert os.environ["NVSHMEM_DISABLE_NVLS"] == "1"
    wanted = {"max_tokens": 24, "hidden_size": 128, "num_experts": 8, "top_k": 2}
    wanted |= {"num_hosts": 1, "gpus_per_host": 2}
    assert made == [(device, SimpleNamespace(**wanted)), "clear", "finalize"]


@pytest.mark.parametrize(("capability", "has_fp8"), [((9, 0), True), ((10, 0), False)])
def test_fp8_is_timed_where_there_are_products(capability: tuple[int, int], has_fp8: bool) -> None:
    paths = training.default_paths(capability)
    fp8_paths = {"fp8", "fp8-dgrad", "fp8-wgrad", "frozen", "frozen-dgrad", "frozen-wgrad"}
    assert fp8_paths & set(paths) == (fp8_paths if has_fp8 else set())
    assert set(paths) | fp8_paths == set(training.PATHS)


def test_passes_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that each event reads, and that each pass moves on by its own number."""
    now = 0.0

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Any) -> float:
            return float(other.at - self.at)

    def passes(ms: float) -> None:
        nonlocal now
        now += ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    step = training.Step(lambda: passes(2.0), lambda _: passes(5.0))
    found = training.times({"ours": step}, 3)["ours"]
    assert found == {"ms": 7.0, "forward_ms": 2.0, "backward_ms": 5.0}


def test_weights_are_stored_as_the_library_wants_them() -> None:
    w13 = torch.arange(2 * 3 * 8).view(2, 3, 8)  # columns 0 to 3 are W1's
    stored = quack_layer.interleaved(w13)
    assert stored.shape == (2, 8, 3)
    assert stored[0, :, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert quack_layer.separated(stored).equal(w13)


def test_products_are_counted_for_both_passes(case: training.Case) -> None:
    """Six products, each over gate and up, or half as large over down."""
    forward = 2 * 48 * 128 * (2 * 128) + 2 * 48 * 128 * 128
    assert case.flop == 3 * forward


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert training.main([]) == 1
    assert "needs a GPU" in capsys.readouterr().err
