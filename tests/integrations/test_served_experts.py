"""A layer as engines serve it: its memory stays, its experts may move."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.activations import Swiglu, SwigluOai
from deep_moe.compat.deep_gemm.operands import packed_weights
from deep_moe.errors import DeepMoEError, MegaMoETimeoutError, RequantizationWarning
from deep_moe.formats.block_scaled import unpack_ue8m0
from deep_moe.heuristics.router import Router
from deep_moe.integrations import served_experts
from deep_moe.integrations.served_experts import ServedExperts, arch_on
from deep_moe.integrations.shared_buffers import LayerSizes
from deep_moe.integrations.switch import read_token_format
from deep_moe.integrations.token_format import served_token_format
from deep_moe.integrations.unsupported import UnsupportedError
from deep_moe.trial.rank_processes import run_on_ranks
from deep_moe.weights import weight_format
from tests.everyday import parametrize
from tests.pairs import formats

SIZES = LayerSizes(4, 2, 256, 128, "mxfp4", "mxfp8")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    served_experts.buffers.close()


def source(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As engines hold MXFP4: bytes of two values, and a byte for 32."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape in ((4, 256, 256), (4, 256, 128)):
        values, sf = deep_moe.quantize_mxfp4(torch.randn(shape, generator=generator))
        made.append((values.view(torch.uint8), unpack_ue8m0(sf)))
    return made


def served(arch: str, seed: int = 0, most: int = 8, sizes: LayerSizes = SIZES) -> ServedExperts:
    layer = ServedExperts(sizes, Swiglu(), None, CPU, most, arch)
    layer.load(*source(seed))
    return layer


def call(layer: ServedExperts, ids: torch.Tensor) -> torch.Tensor:
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    y = torch.empty_like(x)
    layer.run(y, x, ids, torch.full((3, 2), 0.5))
    return y


IDS = torch.tensor([[0, 1], [2, 3], [3, -1]])


def logits_and_x(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 256, generator=generator).bfloat16()
    return torch.randn(num_tokens, 4, generator=generator), x


def test_tokens_that_were_routed_are_not_prepared_again(monkeypatch):
    layer = served("sm_90a")
    logits, x = logits_and_x(3)
    y, expected = torch.empty_like(x), torch.empty_like(x)
    weights, ids = layer.route(x, logits, Router())
    assert torch.equal(ids, logits.topk(2)[1])
    given = ids.clone(), weights.clone()
    with monkeypatch.context() as patch:
        patch.setattr(served_experts, "prepare_inputs", None)
        layer.run(y, x, ids, weights)
    layer.run(expected, x, *given)
    assert torch.equal(y, expected)
    assert bool(y.any())


@pytest.mark.parametrize("between", ["another layer", "other tokens", "a call"])
def test_what_lies_in_the_buffer_is_refused_when_other_tokens_are_there(between):
    layer, other = served("sm_90a"), served("sm_90a", seed=1)
    assert layer.buffer() is other.buffer()
    logits, x = logits_and_x(3)
    weights, ids = layer.route(x, logits, Router())
    y = torch.empty_like(x)
    if between == "another layer":
        other.route(x, logits, Router())
    elif between == "other tokens":
        layer.route(x.clone(), logits, Router())
    else:
        layer.run(y, x, ids.clone(), weights.clone())
    with pytest.raises(DeepMoEError, match="other tokens were prepared since"):
        layer.run(y, x, ids, weights)


def test_routing_no_tokens():
    layer = served("sm_90a")
    logits, x = logits_and_x(0)
    weights, ids = layer.route(x, logits, Router())
    assert ids.shape == weights.shape == (0, 2)
    layer.run(torch.empty_like(x), x, ids, weights)


@parametrize("arch", ["sm_90a", "sm_100a"], everyday=["sm_90a"])
def test_weights_that_replace_others_lie_where_those_lay(arch):
    layer = served(arch)
    addresses = [tensor.data_ptr() for tensor in layer.tensors()]
    before = call(layer, IDS)
    layer.load(*source(1))
    assert [tensor.data_ptr() for tensor in layer.tensors()] == addresses
    after = call(layer, IDS)
    assert not torch.equal(before, after)
    assert torch.equal(after, call(served(arch, seed=1), IDS))


def of_one(source_weights: list, expert_idx: int) -> list:
    return [tuple(t[expert_idx : expert_idx + 1] for t in pair) for pair in source_weights]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)])
def test_one_expert_or_one_of_its_layers_is_replaced(arch, given):
    layer, old, new = served(arch), source(0), source(1)
    addresses = [tensor.data_ptr() for tensor in layer.tensors()]
    one = of_one(new, 2)
    writes = [weight._version for weight, _ in layer.weights]
    layer.replace_expert(2, *(pair if own else None for pair, own in zip(one, given, strict=True)))
    assert [tensor.data_ptr() for tensor in layer.tensors()] == addresses
    is_written = [
        weight._version != before for (weight, _), before in zip(layer.weights, writes, strict=True)
    ]
    assert is_written == list(given)
    expected = [tuple(tensor.clone() for tensor in pair) for pair in old]
    for own, pair, new_pair in zip(given, expected, new, strict=True):
        for tensor, new_tensor in zip(pair, new_pair, strict=True):
            tensor[2] = new_tensor[2] if own else tensor[2]
    from_the_start = ServedExperts(SIZES, Swiglu(), None, CPU, 8, arch)
    from_the_start.load(*expected)
    for tensor, other in zip(layer.tensors(), from_the_start.tensors(), strict=True):
        assert torch.equal(tensor, other)


def test_an_expert_whose_new_weights_are_none_keeps_the_old_ones():
    layer = served("sm_90a")
    before = [tensor.clone() for tensor in layer.tensors()]
    l1, l2 = of_one(source(1), 2)
    bad = (l2[0], l2[1].clone())
    bad[1][0, -1, :2] = torch.tensor([90, 140])  # too far apart for one row; found behind l1
    with pytest.raises(DeepMoEError, match=r"weights that replace others .* l2_weights"):
        layer.replace_expert(2, l1, bad)
    for tensor, old in zip(layer.tensors(), before, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_experts_may_be_permuted_in_what_the_kernel_reads(arch):
    layer = served(arch)
    expected = call(layer, IDS)
    order = torch.tensor([2, 0, 3, 1])  # place i now holds expert order[i]
    for tensor in layer.tensors():
        assert tensor.is_contiguous()
        assert tensor.shape[0] == 4
        tensor.copy_(tensor[order].clone())
    place = order.argsort()
    assert torch.equal(call(layer, torch.where(IDS < 0, IDS, place[IDS])), expected)


def test_a_rank_without_tokens_calls_too():
    layer = served("sm_100a")
    y = torch.empty(0, 256, dtype=torch.bfloat16)
    layer.run(y, y, torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2))


def test_layers_share_one_buffer():
    assert served("sm_100a").buffer() is served("sm_100a", seed=1).buffer()


@pytest.mark.parametrize(("weights", "size"), [("mxfp4", 200), ("fp8", 160), ("bf16", 200)])
@pytest.mark.parametrize("name", ["hidden", "intermediate_hidden"])
def test_sizes_that_are_not_served_are_refused_when_it_is_made(weights, name, size):
    sizes = SIZES._replace(**{name: size}, **formats(weights))
    with pytest.raises(UnsupportedError, match=f"^{name} must be .* multiple of .*; got {size}"):
        ServedExperts(sizes, Swiglu(), None, CPU, 8)


def interleaved(rows: torch.Tensor) -> torch.Tensor:
    """Of gate before up, rows in turn."""
    return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)


@parametrize("arch", ["sm_90a", "sm_100a"], everyday=["sm_100a"])
def test_experts_like_those_of_gpt_oss(arch):
    """Biases, rows of gate and up in turn, sizes that the kernel pads: as the public call has it.
    Experts are permuted, and other weights go into the same memory."""
    hidden, intermediate = 160, 96
    sizes = LayerSizes(4, 2, hidden, intermediate, "mxfp4", "mxfp8", biases=True)
    activation = SwigluOai(limit=2.0)

    def layer_of(seed: int) -> tuple[Any, Any, Any]:
        generator = torch.Generator().manual_seed(seed)
        bytes_of = [
            (
                torch.randint(256, (4, rows, columns // 2), generator=generator).byte(),
                torch.randint(120, 128, (4, rows, columns // 32), generator=generator).byte(),
            )
            for rows, columns in ((2 * intermediate, hidden), (hidden, intermediate))
        ]
        biases = tuple(
            torch.randn(4, rows, generator=generator).bfloat16()
            for rows in (2 * intermediate, hidden)
        )
        return *bytes_of, biases

    def load(served_layer: ServedExperts, seed: int) -> None:
        (w1, sf1), l2, (b1, b2) = layer_of(seed)
        l1 = interleaved(w1), interleaved(sf1)
        served_layer.load(l1, l2, (interleaved(b1), b2), is_interleaved=True)

    def run(served_layer: ServedExperts, ids: torch.Tensor) -> torch.Tensor:
        x = torch.randn(3, hidden, generator=torch.Generator().manual_seed(5)).bfloat16()
        y = torch.empty_like(x)
        served_layer.run(y, x, ids, torch.full((3, 2), 0.5))
        return y

    layer = ServedExperts(sizes, activation, None, CPU, 8, arch)
    load(layer, 0)
    addresses = [tensor.data_ptr() for tensor in layer.tensors()]
    load(layer, 1)
    assert [tensor.data_ptr() for tensor in layer.tensors()] == addresses
    assert len(addresses) == 6
    result = run(layer, IDS)

    l1, l2, biases = layer_of(1)
    pairs = [packed_weights("l", pair) for pair in (l1, l2)]
    other = ServedExperts(sizes, activation, None, CPU, 8, arch)
    transformed = deep_moe.transform_weights_for_mega_moe(*pairs, arch)
    own_biases = deep_moe.transform_biases_for_mega_moe(*biases, arch, weights="mxfp4")
    other.weights, other.biases = transformed, own_biases
    assert torch.equal(result, run(other, IDS))
    assert not torch.equal(result, run(layer, IDS.roll(1, 0)))

    order = torch.tensor([2, 0, 3, 1])
    for tensor in layer.tensors():
        tensor.copy_(tensor[order].clone())
    place = order.argsort()
    assert torch.equal(run(layer, torch.where(IDS < 0, IDS, place[IDS])), result)


@parametrize("arch", ["sm_90a", "sm_100a"], everyday=["sm_90a"])
def test_bf16_experts(arch):
    """They have no scales, and their tokens are not quantized."""
    generator = torch.Generator().manual_seed(3)
    l1, l2 = (
        (torch.randn(shape, generator=generator) / 16).bfloat16()
        for shape in ((4, 256, 256), (4, 256, 128))
    )
    layer = ServedExperts(
        SIZES._replace(weights="bf16", token_format="bf16"), Swiglu(), None, CPU, 8, arch
    )
    layer.load(l1, l2)
    assert len(layer.tensors()) == 2
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    expected = torch.zeros(3, 256)
    for token, ids in enumerate(IDS.tolist()):
        for expert in ids:
            if expert >= 0:
                gate, up = (l1[expert].float() @ x[token].float()).chunk(2)
                h = torch.nn.functional.silu(gate) * up
                expected[token] += 0.5 * (l2[expert].float() @ h)
    assert torch.allclose(call(layer, IDS).float(), expected, rtol=0.02, atol=0.02)


def test_fp8_experts_are_rounded_anew_only_if_that_is_asked_for(monkeypatch):
    sizes = SIZES._replace(weights="fp8")
    generator = torch.Generator().manual_seed(4)
    source = [
        weight_format("fp8").quantize(torch.randn(shape, generator=generator), (128, 128))
        for shape in ((4, 256, 256), (4, 256, 128))
    ]

    def loaded(arch: str) -> ServedExperts:
        layer = ServedExperts(sizes, Swiglu(), None, CPU, 8, arch)
        layer.load(*source)
        return layer

    with pytest.raises(UnsupportedError, match=r"expert 0: .* must be a power of two"):
        loaded("sm_100a")
    monkeypatch.setenv("DEEP_MOE_REQUANTIZE", "1")
    layer = loaded("sm_100a")
    with pytest.warns(RequantizationWarning) as told:
        expected = deep_moe.transform_weights_for_mega_moe(
            *source, "sm_100a", **formats("fp8"), requantize=True
        )
    assert layer.weights is not None
    for own, of_call in zip(layer.weights, expected, strict=True):
        for tensor, other in zip(own, of_call, strict=True):
            assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))
    assert layer.relative_error is not None
    # Of the worst expert; there it is of all of them.
    assert layer.relative_error >= max(one.message.relative_error for one in told)
    assert 0.01 < layer.relative_error < 0.05
    assert layer.rounding_words == (
        f", weights rounded anew, by up to {layer.relative_error:.1%} of a layer's size"
    )
    assert loaded("sm_90a").rounding_words == ""  # which applies such scales as they are
    monkeypatch.setenv("DEEP_MOE_REQUANTIZE", "yes")
    with pytest.raises(ValueError, match=r"DEEP_MOE_REQUANTIZE must be 0 .* or 1 .* got 'yes'"):
        loaded("sm_90a")


def test_mxfp4_experts_with_tokens_in_bf16():
    """Nothing but weights is quantized. They are replaced and permuted as others are."""
    sizes = SIZES._replace(token_format=served_token_format("mxfp4", "bf16", "sm_90a", CPU))
    assert sizes.token_format == "bf16"
    layer = served("sm_90a", sizes=sizes)
    l1, l2 = (
        deep_moe.dequantize_mxfp4(*packed_weights("l", pair), torch.float32) for pair in source(0)
    )
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(5)).bfloat16().float()
    expected = torch.zeros(3, 256)
    for token, ids in enumerate(IDS.tolist()):
        for expert in ids:
            if expert >= 0:
                gate, up = (l1[expert] @ x[token]).chunk(2)
                expected[token] += 0.5 * (l2[expert] @ (torch.nn.functional.silu(gate) * up))
    before = call(layer, IDS)
    assert (before.float() - expected).norm() < 0.005 * expected.norm()
    order = torch.tensor([2, 0, 3, 1])
    for tensor in layer.tensors():
        tensor.copy_(tensor[order].clone())
    place = order.argsort()
    assert torch.equal(call(layer, torch.where(IDS < 0, IDS, place[IDS])), before)
    layer.load(*source(1))
    assert torch.equal(call(layer, IDS), call(served("sm_90a", seed=1, sizes=sizes), IDS))


def test_tokens_may_be_chosen(monkeypatch):
    monkeypatch.delenv("DEEP_MOE_TOKEN_FORMAT", raising=False)
    assert read_token_format() is None
    for name in ("nvfp4", "mxfp8", "fp8_128", "fp8_token", "bf16"):
        monkeypatch.setenv("DEEP_MOE_TOKEN_FORMAT", name)
        assert read_token_format() == name
    for name in ("fp8", "fp8_128_pow2"):
        monkeypatch.setenv("DEEP_MOE_TOKEN_FORMAT", name)
        allowed = "mxfp8 or fp8_128 or fp8_token or nvfp4 or bf16"
        words = f"DEEP_MOE_TOKEN_FORMAT must be {allowed}; got '{name}'"
        with pytest.raises(ValueError, match=words):
            read_token_format()


@pytest.mark.parametrize(
    ("weights", "chosen", "arch", "expected"),
    [
        ("mxfp4", None, "sm_100a", "mxfp8"),
        ("mxfp4", "mxfp8", "sm_100a", "mxfp8"),
        ("mxfp4", "bf16", "sm_90a", "bf16"),
        ("mxfp4", "bf16", "sm_103a", "bf16"),
        ("nvfp4", None, "sm_100a", "nvfp4"),
        ("nvfp4", "bf16", "sm_100a", "bf16"),
        ("fp8", "fp8_128", "sm_90a", "fp8_128"),
        ("fp8", "fp8_token", "sm_90a", "fp8_token"),
        ("bf16", None, "sm_100a", "bf16"),
        # It says nothing of weights that no target takes beside such tokens.
        ("fp8", "bf16", "sm_100a", "mxfp8"),
        ("mxfp4", "fp8_128", "sm_100a", "mxfp8"),
        ("bf16", "mxfp8", "sm_90a", "bf16"),
    ],
)
def test_the_tokens_beside_experts(weights, chosen, arch, expected):
    assert served_token_format(weights, chosen, arch, CPU) == expected


@pytest.mark.parametrize(
    ("weights", "chosen", "arch", "words"),
    [
        ("fp8", "fp8_128", "sm_103a", "only sm_90a .*, not sm_103a"),
        ("fp8", "fp8_128", None, "only sm_90a has a kernel, not sm_100a"),
    ],
)
def test_tokens_that_a_target_has_no_kernel_for(weights, chosen, arch, words):
    with pytest.raises(
        UnsupportedError, match=f"{weights} experts beside {chosen} tokens .*{words}"
    ):
        served_token_format(weights, chosen, arch, CPU)


def test_float_scales_of_tokens_are_the_buffers():
    """As an engine quantizes tokens for FP8 experts of its own."""
    generator = torch.Generator().manual_seed(0)
    blocks, numbers = [], []
    for shape in ((4, 256, 256), (4, 256, 128)):
        weight = (torch.randn(shape, generator=generator) / 16).to(torch.float8_e4m3fn)
        blocks.append((weight, torch.ones(4, shape[1] // 128, shape[2] // 128)))
        numbers.append(weight.float())
    sizes = SIZES._replace(weights="fp8", token_format="fp8_128")
    layer = ServedExperts(sizes, Swiglu(), None, CPU, 8, "sm_90a")
    layer.load(*blocks)
    assert layer.buffer().x_sf.dtype == torch.float32
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(5)).bfloat16().float()
    expected = torch.zeros(3, 256)
    for token, experts in enumerate(IDS.tolist()):
        for expert in (each for each in experts if each >= 0):
            gate, up = (numbers[0][expert] @ x[token]).chunk(2)
            expected[token] += 0.5 * (numbers[1][expert] @ (torch.nn.functional.silu(gate) * up))
    difference = (call(layer, IDS).float() - expected).norm()
    assert difference < 0.05 * expected.norm()


def test_a_pool_may_be_bounded():
    """Buffers by their own sizes: the bounded one is smaller."""
    few = served("sm_100a", most=512).buffer()
    sizes = SIZES._replace(num_pool_tokens=384)
    layer = ServedExperts(sizes, Swiglu(), None, CPU, 512, "sm_100a")
    layer.load(*source(0))
    assert layer.buffer().shape.num_pool_tokens == 384
    assert layer.buffer().nbytes < few.nbytes
    with pytest.raises(UnsupportedError, match=r"num_pool_tokens must be .*multiple of 384"):
        ServedExperts(SIZES._replace(num_pool_tokens=385), Swiglu(), None, CPU, 512)


WHOLE = LayerSizes(4, 2, 256, 128, "fp8", "fp8_token")


def row_scaled(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape in ((4, 256, 256), (4, 256, 128)):
        values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        made.append((values, torch.rand(shape[:2], generator=generator) / 16))
    return made


def _one_scale(device: torch.device, scales: list[list[float | None]]) -> None:
    """scales: of each rank, for what is served and for what replaces it."""
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    layer = ServedExperts(WHOLE, Swiglu(), group, device, 8, "sm_90a")
    own = slice(2 * rank, 2 * rank + 2)
    layer.load(*(tuple(tensor[own] for tensor in pair) for pair in row_scaled(0)))
    layer.has_static_scales = True
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(rank)).bfloat16()
    weights, before = torch.full((3, 2), 0.5), None
    for of_ranks, meet in zip(scales, (layer.prepare, layer.renew, layer.renew), strict=False):
        mine = of_ranks[rank]
        layer.local_token_scale = None if mine is None else torch.tensor([mine])
        if None in of_ranks and of_ranks != [None, None]:
            with pytest.raises(UnsupportedError, match="only some ranks' experts have scales"):
                meet()
            return
        meet()
        if None in of_ranks:
            assert layer.token_scale is None
            return
        assert layer.token_scale is not None
        assert layer.token_scale.tolist() == [max(of_ranks)]  # type: ignore[type-var]
        assert before in (None, layer.token_scale.data_ptr())
        before = layer.token_scale.data_ptr()
        y, expected = torch.empty_like(x), torch.empty_like(x)
        layer.run(y, x, IDS, weights)
        buffer = layer.buffer()
        deep_moe.prepare_inputs(
            x, IDS, weights, buffer, token_scale=layer.token_scale, arch="sm_90a"
        )
        deep_moe.mega_moe(
            expected, layer.whole_weights(), buffer, activation=Swiglu(), arch="sm_90a"
        )
        assert torch.equal(y, expected)
        assert y.any()


@pytest.mark.parametrize(
    "scales", [[[0.25, 0.5], [0.125, 0.0625]], [[None, None]], [[0.25, None]], [[None, 0.25]]]
)
def test_tokens_of_all_ranks_have_one_scale(scales):
    run_on_ranks(_one_scale, 2, "cpu", scales)


def test_a_rank_that_dies_is_named(tmp_path):
    """Not in the call before, and within the timeout, so that an engine ends its requests."""
    said = tmp_path / "said"
    run_on_ranks(_serve_until_a_rank_dies, 2, "cpu", said)
    assert "missing: rank 1" in said.read_text()


def _serve_until_a_rank_dies(device: torch.device, said: Path) -> None:
    group = torch.distributed.group.WORLD
    rank = torch.distributed.get_rank()
    layer = ServedExperts(SIZES, Swiglu(), group, device, 8, "sm_90a")
    own = slice(2 * rank, 2 * rank + 2)
    layer.load(*(tuple(tensor[own] for tensor in pair) for pair in source(0)))
    x, weights = torch.ones(3, 256).bfloat16(), torch.full((3, 2), 0.5)
    layer.run(torch.empty_like(x), x, IDS, weights)
    torch.distributed.barrier()
    if rank == 1:
        os._exit(0)
    # Instead of the minutes that the emulator may take.
    served_experts.mega_moe = partial(deep_moe.mega_moe, timeout_s=3)
    with pytest.raises(MegaMoETimeoutError) as error:
        layer.run(torch.empty_like(x), x, IDS, weights)
    said.write_text(str(error.value))
    os._exit(0)  # the group has lost a rank and cannot be left


def test_weights_that_are_none_are_refused_and_later_an_error():
    l1, l2 = source(0)
    bad = (l1[0], l1[1].clone())
    bad[1][2, 0, 0] = 255  # NaN
    layer = ServedExperts(SIZES, Swiglu(), None, CPU, 8, "sm_100a")
    with pytest.raises(UnsupportedError, match="expert 2: "):
        layer.load(bad, l2)
    layer.load(l1, l2)
    with pytest.raises(DeepMoEError, match=r"weights that replace others .* expert 2: "):
        layer.load(bad, l2)


def test_where_the_kernel_runs(monkeypatch):
    gpu = torch.device("cuda", 0)
    assert arch_on(CPU, "sm_90a") == "sm_90a"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert arch_on(gpu, None) is None
    monkeypatch.setattr(torch.version, "hip", "7.0")  # whose GPUs have such numbers, too
    with pytest.raises(UnsupportedError, match="no NVIDIA GPU"):
        arch_on(gpu, None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UnsupportedError, match=r"capability 8\.0, only for H100, H200; "):
        arch_on(gpu, None)
    for device in (CPU, torch.device("xpu")):
        with pytest.raises(UnsupportedError, match="no NVIDIA GPU"):
            arch_on(device, None)


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_a_kernel_that_nobody_has_run_is_taken_only_if_it_is_asked_for(capability, monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for value in ("", "0"):
        monkeypatch.setenv("DEEP_MOE_SM100", value)
        with pytest.raises(UnsupportedError, match=r"in the emulator only; DEEP_MOE_SM100=1 runs"):
            arch_on(gpu, None)
    monkeypatch.setenv("DEEP_MOE_SM100", "1")
    assert arch_on(gpu, None) is None
    monkeypatch.setenv("DEEP_MOE_SM100", "yes")
    with pytest.raises(ValueError, match=r"DEEP_MOE_SM100 must be 0 .* or 1 .* got 'yes'"):
        arch_on(gpu, None)


@pytest.mark.parametrize("arch", [None, "sm_90a", "sm_100a"])
@pytest.mark.parametrize("weights", ["mxfp4", "fp8", "bf16"])
def test_more_experts_than_a_rank_takes_are_refused_when_it_is_made(weights, arch):
    token_format = formats(weights)["token_format"]
    sizes = SIZES._replace(num_experts=513, weights=weights, token_format=token_format)
    with pytest.raises(UnsupportedError, match="num_experts must be at most 512 per rank"):
        ServedExperts(sizes, Swiglu(), None, CPU, 8, arch)
    ServedExperts(sizes._replace(num_experts=512), Swiglu(), None, CPU, 8, arch)


def test_calls_are_refused_between_weights_that_failed_and_others():
    layer, (l1, l2) = served("sm_90a"), source(1)
    bad = (l1[0], l1[1].clone())
    bad[1][2, 0, 0] = 255  # NaN, behind two experts that are laid out
    with pytest.raises(DeepMoEError, match="weights that replace others"):
        layer.load(bad, l2)
    with pytest.raises(DeepMoEError, match="has not got all of its weights"):
        call(layer, IDS)
    layer.load(l1, l2)
    assert torch.equal(call(layer, IDS), call(served("sm_90a", seed=1), IDS))


def test_ranks_without_a_common_buffer_are_told_before_weights_are_given_up(monkeypatch):
    def unlinked(*_: Any, **__: Any) -> None:
        raise ValueError("group must be ranks whose GPUs are linked by NVLink")

    layer = served("sm_100a")
    monkeypatch.setattr(served_experts.buffers, "buffer", unlinked)
    with pytest.raises(UnsupportedError, match=r"^group must be ranks whose GPUs are linked"):
        layer.prepare()


def test_a_work_space_that_a_sleeping_engine_forgot_begins_anew():
    """What vLLM's sleep mode leaves of one rank's memory is anything."""
    layer = served("sm_90a")
    before = call(layer, IDS)
    buffer = layer.buffer()
    buffer.memory.tensor[: buffer.layout.mark("control_bytes")].fill_(0x5A)
    layer.load(*source(0))
    layer.renew()
    assert torch.equal(call(layer, IDS), before)


@parametrize("arch", ["sm_90a", "sm_100a"], everyday=["sm_100a"])
@pytest.mark.parametrize("num_experts", [1, 4])
def test_what_checkpoints_have_cannot_be_copied_over_the_kernels_layout(
    arch: str, num_experts: int
) -> None:
    """On some targets the layout of a layer has as many rows and columns as the checkpoint's."""
    sizes = LayerSizes(num_experts, 1, 256, 128, "bf16", "bf16")
    layer = ServedExperts(sizes, Swiglu(), None, CPU, 8, arch)
    given = torch.randn(num_experts, 256, 256).bfloat16(), torch.randn(num_experts, 256, 128)
    layer.load(given[0], given[1].bfloat16())
    for tensor, own in zip(given, layer.tensors(), strict=True):
        assert own.data_ptr() in [weights.weight.data_ptr() for weights in layer.whole_weights()]
        for source in (tensor, tensor[0], tensor[:, :1]):
            with pytest.raises(RuntimeError):
                own.copy_(source)
