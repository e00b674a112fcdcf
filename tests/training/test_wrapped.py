"""The layer inside what PyTorch puts around models: FSDP2, DDP, gradient checkpointing, adapters,
state dicts and optimizers. Each either trains as the layer alone does, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import deep_moe

from ..fused.conftest import RunRanks, run_ranks
from .plain_layer import Layer, assert_close, assert_equal_bits, random_like

__all__ = ["run_ranks"]  # a fixture

SIZE, NUM_EXPERTS, NUM_TOKENS, NUM_PASSES, NUM_RANKS = 128, 4, 6, 3, 2
PRECISIONS = ("bf16", "mxfp8", "fp8", "fp8_dgrad", "fp8_wgrad")
Gradients = dict[str, torch.Tensor]


def layer_of(**options: Any) -> deep_moe.MoELayer:
    torch.manual_seed(0)
    return deep_moe.MoELayer(SIZE, SIZE, NUM_EXPERTS, **options)


def loss(module: Callable[..., torch.Tensor], rank: int, number: int) -> torch.Tensor:
    """Of a batch of this rank."""
    generator = torch.Generator().manual_seed(NUM_PASSES * rank + number)
    x = torch.randn(NUM_TOKENS, SIZE, generator=generator).bfloat16()
    topk_idx = torch.arange(2 * NUM_TOKENS).view(NUM_TOKENS, 2) % NUM_EXPERTS
    # Numbers that BF16 has, because FSDP2's mixed precision rounds what a module is given.
    topk_weights = torch.rand(NUM_TOKENS, 2, generator=generator).bfloat16().float()
    out = module(x, topk_idx, topk_weights)
    return out.float().square().mean()


def passes_alone(**options: Any) -> Gradients:
    """Means over the ranks, of sums over their passes."""
    layer = layer_of(**options)
    for rank in range(NUM_RANKS):
        for number in range(NUM_PASSES):
            (loss(layer, rank, number) / NUM_RANKS).backward()
    return gradients(layer)


def gradients(module: torch.nn.Module) -> Gradients:
    found = {}
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[name.removeprefix("module.")] = whole.clone()
    return found


def sharded(rank: int, *, is_wide: bool = False, **options: Any) -> torch.nn.Module:
    """After passes, of which the last one brings the ranks' gradients together. is_wide: with
    shards and sums of gradients in float32."""
    layer = layer_of(**options)
    policy = MixedPrecisionPolicy()
    if is_wide:
        layer.float()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(layer, mp_policy=policy)
    for number in range(NUM_PASSES):
        is_last = number == NUM_PASSES - 1
        layer.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        layer.set_reshard_after_backward(is_last)  # type: ignore[operator]
        loss(layer, rank, number).backward()
    return layer


def sharded_in_float32(rank: int, **options: Any) -> torch.nn.Module:
    return sharded(rank, is_wide=True, **options)


def replicated(rank: int, *, has_views: bool = False, **options: Any) -> torch.nn.Module:
    module = DistributedDataParallel(layer_of(**options), gradient_as_bucket_view=has_views)
    for number in range(NUM_PASSES - 1):
        with module.no_sync():
            loss(module, rank, number).backward()
    loss(module, rank, NUM_PASSES - 1).backward()
    return module


def replicated_in_views(rank: int, **options: Any) -> torch.nn.Module:
    return replicated(rank, has_views=True, **options)


@pytest.mark.parametrize("precision", ["bf16", "fp8_wgrad"])
@pytest.mark.parametrize("wrapped", [sharded, sharded_in_float32, replicated, replicated_in_views])
def test_ranks_accumulate_what_one_would(
    run_ranks: RunRanks, wrapped: Callable[..., torch.nn.Module], precision: str
) -> None:
    """With gradients that the backward pass adds up, too, and then to the bit the same."""
    expected = passes_alone(precision=precision)

    def work(rank: int) -> list[str]:
        found = gradients(wrapped(rank, precision=precision))
        added = gradients(wrapped(rank, precision=precision, fuse_wgrad_accumulation=True))
        assert_equal_bits(added, found)
        # Sums and means are rounded to BF16 in other places.
        assert_close(found, expected, 2.0**-7)
        return sorted(found)

    assert run_ranks(NUM_RANKS, work) == [["w1", "w2", "w3"]] * NUM_RANKS


def test_fsdp_trains_the_weights_that_it_gathers(run_ranks: RunRanks) -> None:
    """After steps of an optimizer on shards the layer is one with these weights, whatever it
    quantized before; its state dict is that of the layer alone."""

    def work(rank: int) -> bool:
        layer = layer_of(precision="fp8_wgrad", fuse_wgrad_accumulation=True)
        fully_shard(layer)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
        first = loss(layer, rank, 0).detach()
        for number in range(2):
            loss(layer, rank, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True))
        alone = layer_of(precision="fp8_wgrad")
        objects = [state]
        dist.broadcast_object_list(objects)  # full state dicts are the first rank's
        alone.load_state_dict(objects[0])
        last = loss(layer, rank, 0).detach()
        assert torch.equal(last, loss(alone, rank, 0).detach())
        return not torch.equal(last, first)

    assert run_ranks(NUM_RANKS, work) == [True] * NUM_RANKS


class Outer(torch.nn.Module):
    """What a model's wrapper sees, with a parameter of its own."""

    def __init__(self, layer: deep_moe.MoELayer) -> None:
        super().__init__()
        self.layer, self.bias = layer, torch.nn.Parameter(torch.zeros(SIZE).bfloat16())

    def forward(self, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x + self.bias, *routing)
        return out


def test_averages_over_other_experts_are_refused_by_name(run_ranks: RunRanks) -> None:
    """Ranks that share out experts, within DDP and FSDP2 over the same ranks. Over a rank by
    itself, and where DDP leaves the experts alone, they train."""

    def work(rank: int) -> None:
        own = dist.new_subgroups(1)[0]
        world = dist.group.WORLD
        words = r"group must have one rank at most in common with {} .* got both over \[0, 1\]"
        outer = DistributedDataParallel(Outer(layer_of(group=world)))
        with pytest.raises(ValueError, match=words.format("the process group of Distributed.*,")):
            loss(outer, rank, 0)
        for wrap in (lambda layer: layer, Outer):
            with pytest.raises(ValueError, match=words.format("the mesh of fully_shard,")):
                fully_shard(wrap(layer_of(group=world)))

        alone = Outer(layer_of(group=world))
        expected = loss(alone, rank, 0)
        assert (
            loss(DistributedDataParallel(Outer(layer_of(group=world)), process_group=own), rank, 0)
            == expected
        )
        ignoring = Outer(layer_of(group=world))
        names = [name for name, _ in ignoring.named_parameters() if name.startswith("layer.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, names)
        assert loss(DistributedDataParallel(ignoring), rank, 0) == expected
        sharded_alone = layer_of(group=world)
        fully_shard(sharded_alone, mesh=DeviceMesh.from_group(own, "cpu"))
        assert loss(sharded_alone, rank, 0) == expected

    run_ranks(NUM_RANKS, work)


def test_dtensors_are_refused_by_name(run_ranks: RunRanks) -> None:
    def work(rank: int) -> None:
        layer = layer_of()
        fully_shard(layer)
        x = torch.ones(2, SIZE).bfloat16()
        given = (x, torch.zeros(2, 1).long(), torch.ones(2, 1), layer.w1, layer.w3, layer.w2)
        with pytest.raises(TypeError, match=r"w1 must be a plain tensor, .*; got DTensor"):
            deep_moe.moe(*given)
        with (
            pytest.raises(TypeError, match=r"w1 must be a plain tensor, .*; got DTensor"),
            deep_moe.frozen_weights(layer),
        ):
            pass

    run_ranks(NUM_RANKS, work)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_checkpointed_layers_have_the_same_bits(
    precision: str, is_frozen: bool, use_reentrant: bool
) -> None:
    layer = layer_of(precision=precision)

    def step(*, checkpoints: bool) -> Gradients:
        layer.zero_grad()
        x = torch.randn(NUM_TOKENS, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
        topk_idx = torch.arange(2 * NUM_TOKENS).view(NUM_TOKENS, 2) % NUM_EXPERTS
        given = (x.requires_grad_(), topk_idx, torch.full((NUM_TOKENS, 2), 0.5))
        out = (
            checkpoint(layer, *given, use_reentrant=use_reentrant) if checkpoints else layer(*given)
        )
        out.float().square().sum().backward()
        assert x.grad is not None
        return {"x": x.grad, **gradients(layer)}

    expected = step(checkpoints=False)
    if is_frozen and precision != "bf16":
        with deep_moe.frozen_weights(layer):
            found = step(checkpoints=True)
    else:
        found = step(checkpoints=True)
    assert_equal_bits(found, expected)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["process group", "all-to-all"])
def test_over_a_group_it_is_the_same(group: dist.ProcessGroup, kind: str) -> None:
    """With checkpoints, and with gradients that the backward pass adds up."""
    shared: Any = group
    if kind == "all-to-all":
        shared = deep_moe.AllToAll(None, NUM_TOKENS, SIZE, NUM_EXPERTS, 2, 64, expert_alignment=8)
    layers = [layer_of(precision="fp8_wgrad", group=shared) for _ in range(2)]
    layers.append(layer_of(precision="fp8_wgrad", group=shared, fuse_wgrad_accumulation=True))

    def checkpointed(*given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(layers[1], *given, use_reentrant=False)
        return out

    for call in (layers[0], checkpointed, layers[2]):
        for number in range(2):
            loss(call, 0, number).backward()
    expected, *others = map(gradients, layers)
    for found in others:
        assert_equal_bits(found, expected)


def adapted(layer: Layer, a: torch.Tensor, b: torch.Tensor, *, plain: bool) -> torch.Tensor:
    """An adapter beside frozen experts, another one in front of them."""
    x = layer.tensors["x"]
    assert x is not None
    tensors = {name: t if t is None else t.detach() for name, t in layer.tensors.items()}
    tensors["x"] = x + x @ a @ b
    inner = Layer(layer.topk_idx, tensors, layer.options)
    return (inner.plain() if plain else inner()) + x @ a @ b


def low_rank(layer: Layer, a: torch.Tensor, b: torch.Tensor, *, plain: bool) -> torch.Tensor:
    """Adapters within the experts' weights, which stay as they are."""
    tensors = {name: t if t is None else t.detach() for name, t in layer.tensors.items()}
    w1 = tensors["w1"]
    assert w1 is not None
    tensors["w1"] = w1 + a @ b[:, : w1.shape[2]]
    inner = Layer(layer.topk_idx, tensors, layer.options)
    return inner.plain() if plain else inner()


@pytest.mark.parametrize("adapters", [adapted, low_rank])
@pytest.mark.parametrize("fused", [False, True])
def test_adapters_train_while_experts_are_frozen(
    adapters: Callable[..., torch.Tensor], fused: bool
) -> None:
    layer = Layer.random(hidden=16, intermediate=16, dtype=torch.float64, fused=fused, biases=True)
    generator = torch.Generator().manual_seed(3)
    shapes = ((16, 2), (2, 16 if adapters is adapted or not fused else 32))
    a, b = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    )
    found = []
    for plain in (True, False):
        out = adapters(layer, a, b, plain=plain)
        inputs = {"a": a, "b": b}
        made = torch.autograd.grad(out, list(inputs.values()), random_like(out))
        found.append(dict(zip(inputs, made, strict=True)))
    assert_close(found[1], found[0], 1e-12)


def test_frozen_experts_of_a_group_make_no_gradients(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are sent again all the same, as other ranks may want gradients."""
    from deep_moe.training import experts

    def refused(*_: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    def work(rank: int) -> bool:
        layer = layer_of(group=dist.group.WORLD, biases=True)
        if rank == 0:
            layer.requires_grad_(False)
            monkeypatch.setattr(experts, "grouped_weight_gradient", refused)
            monkeypatch.setattr(experts, "expert_sums", refused)
        x = torch.ones(3, SIZE).bfloat16().requires_grad_()
        layer(x, torch.arange(3).unsqueeze(1), torch.ones(3, 1)).sum().backward()
        assert x.grad is not None
        assert x.grad.any()
        return layer.w1.grad is None

    assert run_ranks(NUM_RANKS, work) == [True, False]


def test_a_layer_that_is_made_on_the_meta_device_can_be_filled() -> None:
    with torch.device("meta"):
        layer = deep_moe.MoELayer(SIZE, SIZE, NUM_EXPERTS)
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    assert torch.equal(loss(layer, 0, 0), loss(layer_of(), 0, 0))


def by_grad(layer: deep_moe.MoELayer) -> None:
    def of(parameters: Any) -> torch.Tensor:
        x, routing = torch.ones(2, SIZE).bfloat16(), (torch.zeros(2, 1).long(), torch.ones(2, 1))
        return torch.func.functional_call(layer, parameters, (x, *routing)).sum()

    torch.func.grad(of)(dict(layer.named_parameters()))


def by_vmap(layer: deep_moe.MoELayer) -> None:
    def of(x: torch.Tensor) -> torch.Tensor:
        return layer(x, torch.zeros(2, 1).long(), torch.ones(2, 1))

    torch.vmap(of)(torch.ones(3, 2, SIZE).bfloat16())


@pytest.mark.parametrize("transform", [by_grad, by_vmap])
def test_transforms_are_refused_by_name(transform: Callable[..., None]) -> None:
    with pytest.raises(TypeError, match=r"x must be a plain tensor: .* torch\.func"):
        transform(layer_of())


def test_autocast_rounds_nothing_for_the_layer() -> None:
    layer = layer_of()
    x, routing = torch.ones(2, SIZE), (torch.zeros(2, 1).long(), torch.ones(2, 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(TypeError, match=r"x must be torch\.bfloat16 .*; got torch\.float32"):
            layer(x, *routing)
        assert layer(x.bfloat16(), *routing).dtype == torch.bfloat16
