"""FSDP2 that gathers weights as E4M3: the bits of FSDP2 that gathers BF16, never stale ones."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import deep_moe
from deep_moe.training import gathered_weights
from deep_moe.training.gathered_weights import GatherableWeight, GatheredWeight
from deep_moe.training.plain_steps import PlainSteps

from ..fused.conftest import RunRanks, run_ranks
from .test_wrapped import NUM_EXPERTS, NUM_RANKS, SIZE, layer_of, loss

__all__ = ["run_ranks"]  # a fixture

WEIGHTS = ("w1", "w3", "w2")
Step = Callable[[torch.nn.Module], None]


def wide_policy(reduce_dtype: torch.dtype | None = torch.float32) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)


class Model(torch.nn.Module):
    """Two layers, each of which FSDP2 gathers by itself, and adapters that it does not."""

    def __init__(
        self,
        *,
        is_wide: bool = False,
        is_frozen: bool = False,
        checkpoints: bool = False,
        keeps: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layer_of(**options) for _ in range(2))
        self.adapter = torch.nn.Parameter(torch.full((SIZE,), 1.5).bfloat16())
        self.checkpoints = checkpoints
        if is_frozen:
            self.layers.requires_grad_(False)
        policy = MixedPrecisionPolicy()
        if is_wide:
            self.float()
            policy = wide_policy()
        for layer in self.layers:
            fully_shard(layer, mp_policy=policy, reshard_after_forward=not keeps)
        fully_shard(self, mp_policy=policy)

    def forward(self, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        x = x * self.adapter
        for layer in self.layers:
            x = (
                checkpoint(layer, x, *routing, use_reentrant=False)
                if self.checkpoints
                else layer(x, *routing)
            )
        return x


def by_optimizer(model: torch.nn.Module, make: Callable[..., torch.optim.Optimizer]) -> None:
    make([p for p in model.parameters() if p.requires_grad]).step()


def in_place(model: torch.nn.Module) -> None:
    """As optimizers that know nothing of shards do, without a version that is counted."""
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        parameter.to_local().data.mul_(-0.5)


ADAMW, SGD = partial(torch.optim.AdamW, lr=0.01), partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("update", "num_transposed", "options"),
    [
        (partial(by_optimizer, make=partial(ADAMW, fused=True)), 0, {}),
        (
            partial(by_optimizer, make=partial(SGD, foreach=True)),
            0,
            {"is_wide": True, "fuse_w1_w3": True, "biases": True, "fuse_wgrad_accumulation": True},
        ),
        (in_place, 0, {"precision": "fp8_dgrad", "quantize_kept": True}),
        # Linear1 once more in the backward pass, from codes for data gradients.
        (partial(by_optimizer, make=partial(SGD, foreach=False)), 2, {"recompute": True}),
        (partial(by_optimizer, make=ADAMW), 3, {"checkpoints": True}),
        # Data gradients from codes of the forward pass.
        (partial(by_optimizer, make=ADAMW), 3, {"keeps": True}),
        (partial(by_optimizer, make=ADAMW), 0, {"is_frozen": True}),
    ],
)  # fmt: skip
def test_steps_have_the_bits_of_gathered_bf16(
    run_ranks: RunRanks,
    monkeypatch: pytest.MonkeyPatch,
    update: Step,
    num_transposed: int,
    options: dict[str, Any],
) -> None:
    """Outputs, gradients and shards, and ranks quantize their own experts only."""
    options = {"precision": "fp8_wgrad", **options}
    shapes: list[int] = []
    transposed: list[str] = []
    quantize, transpose = PlainSteps.quantize_weights, gathered_weights.transposed_weights

    def quantizing(steps: PlainSteps, weights: torch.Tensor) -> Any:
        shapes.append(len(weights))
        return quantize(steps, weights)

    def transposing(weights: Any) -> Any:
        transposed.append("")
        return transpose(weights)

    def steps(rank: int, **more: bool) -> list[torch.Tensor]:
        model = Model(**options, **more)
        found = []
        for number in range(2):
            out = loss(model, rank, number)
            out.backward()
            found.append(out.detach())
            for parameter in model.parameters():
                if parameter.requires_grad:
                    found.append(parameter.grad.full_tensor())  # type: ignore[union-attr]
            update(model)
            model.zero_grad()
            found += [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
        return found

    def work(rank: int) -> tuple[set[int], int]:
        expected = steps(rank)
        monkeypatch.setattr(PlainSteps, "quantize_weights", quantizing)
        monkeypatch.setattr(gathered_weights, "transposed_weights", transposing)
        found = steps(rank, quantize_gathered=True)
        assert len(found) == len(expected)
        assert all(a.equal(b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))
        return set(shapes), len(transposed)

    expected = ({NUM_EXPERTS // NUM_RANKS}, 2 * 2 * num_transposed)
    assert run_ranks(NUM_RANKS, work) == [expected] * NUM_RANKS


def test_half_the_bytes_travel(run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = GatherableWeight.fsdp_pre_all_gather
    sent: list[int] = []

    def counting(weight: Any, *given: Any) -> Any:
        tensors, metadata = gather(weight, *given)
        sent.append(sum(tensor.nbytes for tensor in tensors))
        return tensors, metadata

    # PyTorch looks at the number of parameters.
    def counted(self, mesh, outer_size, outer_stride, module, mp_policy):
        return counting(self, mesh, outer_size, outer_stride, module, mp_policy)

    def work(rank: int) -> list[int]:
        monkeypatch.setattr(GatherableWeight, "fsdp_pre_all_gather", counted)
        layer = layer_of(precision="fp8_wgrad", quantize_gathered=True)
        fully_shard(layer)
        loss(layer, rank, 0).backward()
        return sent

    num_values = NUM_EXPERTS // NUM_RANKS * SIZE * SIZE
    num_bytes = num_values + num_values // 128**2 * 4
    assert run_ranks(NUM_RANKS, work) == [[num_bytes] * len(WEIGHTS)] * NUM_RANKS


def test_accumulated_gradients_and_one_rank(run_ranks: RunRanks) -> None:
    """Passes that gather once; and without anybody to gather from."""

    def work(rank: int) -> None:
        mesh = dist.device_mesh.init_device_mesh(
            "cpu", (NUM_RANKS, 1), mesh_dim_names=("dp", "one")
        )
        for of in (mesh["dp"], mesh["one"], mesh):
            found = []
            for quantize_gathered in (False, True):
                layer = layer_of(precision="fp8_wgrad", quantize_gathered=quantize_gathered)
                fully_shard(layer, mesh=of)
                for number in range(3):
                    layer.set_requires_gradient_sync(number == 2)  # type: ignore[operator]
                    layer.set_reshard_after_backward(number == 2)  # type: ignore[operator]
                    loss(layer, rank, number).backward()
                found.append([p.grad.full_tensor() for p in layer.parameters()])  # type: ignore[union-attr]
            assert all(a.equal(b) for a, b in zip(*found, strict=True))

    run_ranks(NUM_RANKS, work)


def test_state_dicts_are_those_of_the_layer_alone(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Whole, saved in shards by torch.distributed.checkpoint, or assigned to a layer that was made
    on the device meta; loaded with the option and without."""

    def work(rank: int) -> None:
        alone = layer_of(precision="fp8_wgrad")
        expected = loss(alone, rank, 0)
        layer = layer_of(precision="fp8_wgrad", quantize_gathered=True)
        fully_shard(layer)
        options = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(layer, options=options)
        if rank == 0:
            assert {name: type(value) for name, value in state.items()} == dict.fromkeys(
                WEIGHTS, torch.Tensor
            )
            assert all(torch.equal(value, getattr(alone, name)) for name, value in state.items())
        dcp.save(get_model_state_dict(layer), checkpoint_id=tmp_path)
        for quantize_gathered in (False, True):
            with torch.device("meta"):
                other = layer_of(precision="fp8_wgrad", quantize_gathered=quantize_gathered)
            fully_shard(other, reshard_after_forward=True)
            other.to_empty(device="cpu")
            dcp.load(get_model_state_dict(other), checkpoint_id=tmp_path)
            assert loss(other, rank, 0).equal(expected)
            shards = {
                name: distribute_tensor(value.detach(), other.w1.device_mesh, [Shard(0)])  # type: ignore[attr-defined]
                for name, value in alone.named_parameters()
            }
            with torch.no_grad():
                for weight in other.parameters():
                    weight.zero_()
            assert not loss(other, rank, 0)
            other.load_state_dict(shards, assign=True)
            is_gatherable = isinstance(other.w1.to_local(), GatherableWeight)  # type: ignore[attr-defined]
            assert is_gatherable == quantize_gathered
            assert loss(other, rank, 0).equal(expected)

    run_ranks(NUM_RANKS, work)


def test_without_fsdp_it_is_the_layer_as_always() -> None:
    """Its bits, also after copies, files and steps; files have plain tensors."""
    plain = layer_of(precision="fp8_wgrad")
    layer = layer_of(precision="fp8_wgrad", quantize_gathered=True)
    for each in (plain, layer):
        loss(each, 0, 0).backward()
        torch.optim.AdamW(each.parameters(), lr=0.1, fused=True).step()
    copied = copy.deepcopy(layer)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    loaded = layer_of(precision="fp8_wgrad", quantize_gathered=True)
    loaded.load_state_dict(state)
    assigned = layer_of(precision="fp8_wgrad", quantize_gathered=True)
    assigned.load_state_dict(state, assign=True)
    wide = copy.deepcopy(layer).float().bfloat16()
    expected = loss(plain, 0, 1)
    for each in (layer, copied, saved, loaded, assigned, wide):
        assert [name for name, _ in each.named_parameters()] == list(WEIGHTS)
        assert all(isinstance(parameter, GatherableWeight) for parameter in each.parameters())
        assert loss(each, 0, 1).equal(expected)
    assert copied.w1.grad is not None
    assert copied.w1.grad.equal(plain.w1.grad)  # type: ignore[arg-type]
    with torch.no_grad():
        layer.w1.zero_()
    assert not loss(layer, 0, 1)
    assert loss(copied, 0, 1).equal(expected)


def test_data_that_is_set_is_multiplied() -> None:
    layer = layer_of(precision="fp8_wgrad", quantize_gathered=True)
    with deep_moe.frozen_weights(layer):
        assert loss(layer, 0, 0)
        layer.w2.data = 0 * layer.w2.data
        assert not loss(layer, 0, 0)
    with pytest.raises(TypeError, match=r"data of a weight with quantize_gathered must stay \(4, "):
        layer.w2.data = torch.zeros(1)


def test_frozen_weights_are_quantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(precision="fp8_wgrad", quantize_gathered=True)
    calls = []
    original = PlainSteps.quantize_weights_both_ways

    def counting(steps: PlainSteps, weights: torch.Tensor) -> Any:
        calls.append(weights)
        return original(steps, weights)

    monkeypatch.setattr(PlainSteps, "quantize_weights_both_ways", counting)
    with deep_moe.frozen_weights(layer):
        outputs = [loss(layer, 0, 0) for _ in range(3)]
        assert len(calls) == len(WEIGHTS)
    assert outputs[0].equal(outputs[2])


@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "fp8"])
def test_precisions_that_need_more_than_codes_are_refused(precision: str) -> None:
    with pytest.raises(ValueError, match="precision must be 'fp8_dgrad' or 'fp8_wgrad' with quant"):
        layer_of(precision=precision, quantize_gathered=True)


def of_odd_experts() -> deep_moe.MoELayer:
    return deep_moe.MoELayer(SIZE, SIZE, 3, precision="fp8_wgrad", quantize_gathered=True)


def by_columns(layer: deep_moe.MoELayer) -> None:
    fully_shard(layer, shard_placement_fn=lambda _: Shard(1))


def in_float32(layer: deep_moe.MoELayer) -> None:
    fully_shard(layer.float())


@pytest.mark.parametrize(
    ("layer", "shard", "words"),
    [
        (of_odd_experts, fully_shard, "num_experts .* multiple of the ranks .*; got 3 .* 2 ranks"),
        (None, by_columns, r"shard_placement_fn must give Shard\(0\), whole experts"),
        (None, in_float32, r"parameters must be gathered in torch\.bfloat16 .* got torch\.float32"),
    ],
)  # fmt: skip
def test_shards_that_cannot_be_quantized_are_refused_on_every_rank(
    run_ranks: RunRanks, layer: Any, shard: Callable[[Any], Any], words: str
) -> None:
    def work(rank: int) -> None:
        made = (layer or partial(layer_of, precision="fp8_wgrad", quantize_gathered=True))()
        shard(made)
        with pytest.raises((TypeError, ValueError), match=words):
            loss(made, rank, 0)

    run_ranks(NUM_RANKS, work)


def test_gathered_codes_are_for_products_only(run_ranks: RunRanks) -> None:
    def work(rank: int) -> None:
        layer = layer_of(precision="fp8_wgrad", quantize_gathered=True)
        fully_shard(layer, reshard_after_forward=False)
        loss(layer, rank, 0)
        assert isinstance(layer.w1, GatheredWeight)
        with pytest.raises(RuntimeError, match="was gathered with quantize_gathered, as E4M3"):
            layer.w1 + 1
        weights = (layer.w1, layer.w3, layer.w2)
        layer.reshard()  # type: ignore[operator]
        x, routing = torch.ones(2, SIZE).bfloat16(), (torch.zeros(2, 1).long(), torch.ones(2, 1))
        with pytest.raises(ValueError, match=r"w3 must have a storage .* where FSDP has freed it"):
            deep_moe.moe(x, *routing, *weights, precision="fp8_wgrad")
        layer.precision = "bf16"
        with pytest.raises(ValueError, match="precision must be 'fp8_dgrad' or 'fp8_wgrad' where"):
            loss(layer, rank, 0)

    run_ranks(NUM_RANKS, work)
