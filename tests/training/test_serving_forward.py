"""`forward="serving"`: the bits of the call that serves, the gradients of training."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_moe
from deep_moe.weights.layers import ExpertWeights

from ..fused.conftest import RunRanks, run_ranks
from .plain_layer import Layer, assert_equal_bits, random_like

__all__ = ["run_ranks"]  # a fixture

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS = 128, 96, 4, 3, 7  # 96 is padded to 128
PAIRS = [
    ("bf16", "bf16", "sm_90a"),
    ("fp8", "mxfp8", "sm_90a"),
    ("fp8", "fp8_token", "sm_90a"),
    ("nvfp4", "bf16", "sm_90a"),
    ("mxfp4", "mxfp8", "sm_100a"),
]


def buffer_of(
    weights: str = "bf16", token_format: str | None = None, group: Any = None, **changes: Any
) -> deep_moe.SymmBuffer:
    sizes = {
        "num_experts": EXPERTS,
        "num_max_tokens_per_rank": 8,
        "num_topk": TOPK,
        "hidden": HIDDEN,
        "intermediate_hidden": INTERMEDIATE,
    }
    return deep_moe.get_symm_buffer_for_mega_moe(
        group, **{**sizes, **changes}, weights=weights, token_format=token_format, device="cpu"
    )


def layer_of(**kind: Any) -> Layer:
    sizes = {"num_tokens": TOKENS, "num_topk": TOPK, "num_experts": EXPERTS}
    return Layer.random(**{**sizes, "hidden": HIDDEN, "intermediate": INTERMEDIATE, **kind})


def module_of(layer: Layer, **options: Any) -> deep_moe.MoELayer:
    """With the layer's weights."""
    t = layer.tensors
    num_experts = t["w2"].shape[0]  # type: ignore[union-attr]
    module = deep_moe.MoELayer(
        HIDDEN,
        INTERMEDIATE,
        num_experts,
        fuse_w1_w3=t["w3"] is None,
        biases=t.get("b1") is not None,
        **options,
    )
    module.load_state_dict({name: t[name] for name in module.state_dict()})
    return module


def served(
    layer: Layer, weights: ExpertWeights, buffer: deep_moe.SymmBuffer, arch: str
) -> torch.Tensor:
    """The call of an engine that has loaded these weights."""
    form = {"weights": buffer.shape.weights, "token_format": buffer.shape.token_format}
    laid_out = deep_moe.transform_weights_for_mega_moe(*weights, arch, **form)
    t: dict[str, Any] = layer.tensors
    biases = {}
    if buffer.shape.biases:
        l1_bias = torch.cat([t["b1"], t["b3"]], 1)
        both = deep_moe.transform_biases_for_mega_moe(l1_bias, t["b2"], arch, **form)
        biases = {"l1_bias": both.l1, "l2_bias": both.l2}
    x, topk_weights = t["x"].detach(), t["topk_weights"].detach()
    deep_moe.prepare_inputs(x, layer.topk_idx, topk_weights, buffer, arch=arch)
    y = torch.empty_like(x)
    deep_moe.mega_moe(y, laid_out, buffer, arch=arch, **biases)
    return y


@pytest.mark.parametrize(("weights", "token_format", "arch"), PAIRS)
def test_the_output_has_the_bits_of_serving_and_the_gradients_those_of_training(
    weights: str, token_format: str, arch: str
) -> None:
    """With and without W1 and W3 in one tensor, with and without biases, after a call that had
    other weights."""
    has_biases = arch == "sm_90a" and weights != "bf16"
    buffer = buffer_of(weights, token_format, biases=has_biases)
    layer = layer_of(fused=weights == "fp8", biases=has_biases)
    form = {"forward": "serving", "sym_buffer": buffer, "arch": arch}
    before = layer(**form).detach()
    with torch.no_grad():
        for name in ("w1", "w2"):
            layer.tensors[name].data.mul_(-1.25)  # type: ignore[union-attr]  # counts no version
    module = module_of(layer, arch=arch)
    expected = served(layer, module.serving_weights(weights, token_format), buffer, arch)
    found = layer.run(**form)
    assert torch.equal(found["out"], expected)
    assert not torch.equal(found["out"], before)
    trained = layer.run(recompute=True, arch=arch)
    del found["out"], trained["out"]
    assert_equal_bits(found, trained)


def test_a_tokens_output_does_not_depend_on_the_other_tokens() -> None:
    """So that a token has the same bits when it is generated and when it is trained on."""
    buffer = buffer_of("fp8")
    layer = layer_of()
    module = module_of(layer, forward="serving", sym_buffer=buffer, arch="sm_90a")
    t: dict[str, Any] = layer.tensors
    with torch.no_grad():
        together = module(t["x"], layer.topk_idx, t["topk_weights"])
        for token in (0, TOKENS - 1):
            own = slice(token, token + 1)
            alone = module(t["x"][own], layer.topk_idx[own], t["topk_weights"][own])
            assert torch.equal(alone, together[own])


def test_no_tokens() -> None:
    layer = layer_of(num_tokens=0)
    found = layer.run(forward="serving", sym_buffer=buffer_of(), arch="sm_90a")
    assert found["out"].shape == found["x"].shape == (0, HIDDEN)
    assert not found["w1"].any()
    assert not found["w2"].any()


def test_over_ranks_it_is_one_rank_with_all_experts(run_ranks: RunRanks) -> None:
    """Uneven ranks. Gradients travel over the process group."""
    num_tokens = (5, 2)
    whole = layer_of(num_experts=4)
    expected = whole.run(forward="serving", sym_buffer=buffer_of("fp8"), arch="sm_90a")
    d_out = random_like(expected["out"])

    def work(rank: int) -> dict[str, Any]:
        tokens = slice(sum(num_tokens[:rank]), sum(num_tokens[: rank + 1]))
        experts = slice(2 * rank, 2 * rank + 2)
        tensors = {
            name: None
            if tensor is None
            else tensor[experts if name.startswith("w") else tokens].detach().requires_grad_()
            for name, tensor in whole.tensors.items()
        }
        own = Layer(whole.topk_idx[tokens].contiguous(), tensors)
        buffer = buffer_of("fp8", group=dist.group.WORLD)
        options = {"forward": "serving", "sym_buffer": buffer, "arch": "sm_90a"}
        found = own.run(d_out[tokens], group=dist.group.WORLD, **options)
        return {name: tensor.double().tolist() for name, tensor in found.items()}

    results = run_ranks(2, work)
    for name, value in expected.items():
        shape = value.shape[1:]
        parts = [torch.tensor(own[name], dtype=torch.float64).view(-1, *shape) for own in results]
        found = torch.cat(parts)
        if name == "out":
            assert torch.equal(found, value.double())
        else:  # rows of gradients are rounded once more before they travel
            error = (found - value.double()).norm()
            assert error <= 2 * 2.0**-9 * value.double().norm(), name


def test_copies_share_the_buffer_and_saved_modules_have_none() -> None:
    layer = layer_of()
    module = module_of(layer, forward="serving", sym_buffer=buffer_of(), arch="sm_90a")
    assert copy.deepcopy(module).sym_buffer is module.sym_buffer
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    t: dict[str, Any] = layer.tensors
    call = (t["x"], layer.topk_idx, t["topk_weights"])
    with pytest.raises(RuntimeError, match=r"a buffer is not saved: set layer\.sym_buffer"):
        loaded(*call)
    loaded.sym_buffer = module.sym_buffer
    assert torch.equal(loaded(*call), module(*call))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no buffer": ({"sym_buffer": None}, "sym_buffer must be a SymmBuffer with forward='serving'"),
    "experts": ({"num_experts": 8}, "sym_buffer must be made with num_experts=4.*; got 8"),
    "topk": ({"num_topk": 2}, "sym_buffer must be made with num_topk=3.*; got 2"),
    "hidden": ({"hidden": 256}, "sym_buffer must be made with hidden=128.*; got 256"),
    "intermediate": (
        {"intermediate_hidden": 128},
        "sym_buffer must be made with intermediate_hidden=96.*; got 128",
    ),
    "biases": ({"biases": True}, "sym_buffer must be made with biases=False.*; got True"),
    "shared": ({"num_shared_experts": 1}, "sym_buffer must have no shared experts.*; got 1"),
    "tokens": (
        {"num_max_tokens_per_rank": 6},
        "x must have at most the 6 tokens that sym_buffer takes with forward='serving'; got 7",
    ),
    "precision": ({"precision": "mxfp8"}, "precision must be 'bf16' with forward='serving'"),
    "received": ({"keep_received": True}, "keep_received must be False with forward='serving'"),
    "quantized": ({"quantize_kept": True}, "quantize_kept must be False with forward='serving'"),
    "forward": ({"forward": "served"}, "forward must be 'training' or 'serving'; got 'served'"),
    "training": ({"forward": "training"}, "sym_buffer must be None with forward='training'"),
    "no ranks": ({"max_recv_slots": 8}, "max_recv_slots goes with a group; got 8 and no group"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    changes, words = REFUSED[case]
    options = {"forward": "serving", "arch": "sm_90a"}
    sizes = {
        name: changes[name]
        for name in changes
        if name.startswith("num_") or name in ("hidden", "intermediate_hidden", "biases")
    }
    options |= {name: value for name, value in changes.items() if name not in sizes}
    options.setdefault("sym_buffer", buffer_of(**sizes))
    with pytest.raises((TypeError, ValueError), match=words):
        layer_of()(**options)


def test_float64_and_a_closed_buffer_are_refused() -> None:
    buffer = buffer_of()
    with pytest.raises(TypeError, match=r"x must be torch\.bfloat16 with forward='serving'"):
        layer_of(dtype=torch.float64)(forward="serving", sym_buffer=buffer)
    buffer.close()
    with pytest.raises(Exception, match="closed"):
        layer_of()(forward="serving", sym_buffer=buffer)
