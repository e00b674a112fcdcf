"""transformers runs models whose experts are the kernel's, here emulated."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import deep_moe
import deep_moe.integrations.transformers as adapter
from deep_moe.activations import Situ, Swiglu, SwigluOai
from deep_moe.errors import DeepMoEError
from deep_moe.formats.block_scaled import ue8m0_to_float, unpack_ue8m0
from deep_moe.integrations.transformers.layer import ExpertsLayer, own_tensors
from deep_moe.integrations.transformers.taken import loan_of
from deep_moe.trial.rank_processes import run_on_ranks
from tests.everyday import parametrize
from tests.pairs import formats

from .conftest import counting

transformers = pytest.importorskip("transformers", minversion="5.16.1")

NUM_NEW_TOKENS = 6
EXPERTS = [f"model.layers.{i}.mlp.experts" for i in range(2)]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    adapter.register()
    yield
    adapter.close_buffers()


def load(checkpoint: Path, experts: str = "deep_moe", **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint,
        dtype=options.pop("dtype", torch.bfloat16),
        experts_implementation=experts,
        **options,
    ).eval()


@pytest.fixture(scope="module")
def eager(checkpoint: Path) -> Any:
    """The same quantized weights, multiplied by transformers in bfloat16."""
    return load(checkpoint, "eager")


def greedy(model: Any, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that follow, and the logits that each was chosen by [tokens, vocabulary]."""
    result = model.generate(
        prompt,
        max_new_tokens=NUM_NEW_TOKENS,
        min_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return result.sequences[:, prompt.shape[1] :], torch.cat(result.logits).float()


def laid_out(module: Any) -> ExpertsLayer | None:
    """What the kernel has of a module's experts, if it has taken them."""
    loan = loan_of(own_tensors(module))
    return None if loan is None else loan.content


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).norm() / expected.norm())


PROMPT = counting(torch.tensor([[21]]), 5)
ANSWER = counting(torch.tensor([[26]]), NUM_NEW_TOKENS)


@parametrize("arch", ["sm_90a", "sm_100a"], everyday=["sm_90a"])
def test_it_generates_what_the_eager_path_generates(checkpoint, eager, arch):
    adapter.register(arch=arch)
    model = load(checkpoint)
    assert adapter.prepare(model) == dict.fromkeys(EXPERTS, "deep_moe")
    expected, expected_logits = greedy(eager, PROMPT)
    tokens, logits = greedy(model, PROMPT)
    assert tokens.tolist() == expected.tolist() == ANSWER.tolist()
    # So near that it is no chance, and not the same: the kernel's activations are FP8.
    assert 0 < relative_error(logits, expected_logits) < 0.12


def random_call(num_tokens: int, num_experts: int = 8, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, 256, generator=generator).bfloat16()
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    weights, idx = scores.softmax(-1).topk(2)
    return [x, idx, weights]


def called_directly(
    l1: Any,
    l2: Any,
    x: Any,
    idx: Any,
    weights: Any,
    activation: Any,
    *,
    arch: str = "sm_100a",
    form: str = "mxfp4",
    requantize: bool = False,
) -> torch.Tensor:
    """By the public API, without the adapter. form: of weights, or a pair."""
    pair = formats(form)
    buffer = deep_moe.get_symm_buffer_for_mega_moe(None, 8, 32, 2, 256, 128, **pair, device="cpu")
    transformed = deep_moe.transform_weights_for_mega_moe(
        l1, l2, arch, **pair, requantize=requantize
    )
    deep_moe.prepare_inputs(x, idx, weights, buffer, arch=arch)
    y = torch.empty_like(x)
    deep_moe.mega_moe(y, transformed, buffer, activation=activation, arch=arch)
    return y


def gpu_experts(**options: Any) -> Any:
    """The module that transformers has for quantized experts on GPUs, without values."""
    from transformers.integrations.finegrained_fp8 import (
        ALL_FP8_EXPERTS_FUNCTIONS,
        FP8Experts,
    )
    from transformers.integrations.moe import use_experts_implementation

    for name in options:
        if name not in signature(FP8Experts.__init__).parameters:
            pytest.skip(f"FP8Experts of this version of transformers has no {name}")

    class Experts(FP8Experts):
        pass

    use_experts_implementation(Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    config = transformers.DeepseekV4Config(
        hidden_size=256, moe_intermediate_size=128, n_routed_experts=8, num_experts_per_tok=2
    )
    config._experts_implementation = "deep_moe"
    return Experts(config, **options)


@pytest.fixture
def fp4_experts() -> Any:
    """Makes a module of FP4 experts, and its weights as pairs."""

    def make(scale_dtype: torch.dtype) -> tuple[Any, Any, Any]:
        scale_fmt = "float" if scale_dtype == torch.float32 else "ue8m0"
        module = gpu_experts(expert_dtype="fp4", scale_fmt=scale_fmt)
        generator = torch.Generator().manual_seed(1)
        pairs = []
        for name in ("gate_up_proj", "down_proj"):
            rows, packed = getattr(module, name).shape[1:]
            values = torch.randn(8, rows, 2 * packed, generator=generator) * 0.1
            weight, sf = deep_moe.quantize_mxfp4(values)
            pairs.append((weight, sf))
            scales = unpack_ue8m0(sf)
            if scale_dtype == torch.float32:
                scales = ue8m0_to_float(scales, torch.float32)
            elif scale_dtype != torch.uint8:
                scales = scales.view(scale_dtype)
            for key, tensor in ((name, weight), (f"{name}_scale_inv", scales)):
                setattr(module, key, torch.nn.Parameter(tensor.clone(), requires_grad=False))
        return module, *pairs

    return make


@pytest.fixture
def fp8_experts() -> Any:
    """Makes a module of FP8 experts, and its weights as pairs. is_power: scales that every target
    applies; otherwise those of DeepSeek-V3's checkpoints, which SM90's kernel applies."""

    def make(*, is_power: bool) -> tuple[Any, Any, Any]:
        module = gpu_experts(block_size=(128, 128))
        generator = torch.Generator().manual_seed(2)
        pairs = []
        for name in ("gate_up_proj", "down_proj"):
            weight, sf = getattr(module, name), getattr(module, f"{name}_scale_inv")
            values = torch.randn(weight.shape, generator=generator).to(torch.float8_e4m3fn)
            scales = torch.exp2(torch.randint(-5, -2, sf.shape, generator=generator).float())
            if not is_power:
                scales = scales * 1.3
            for key, tensor in ((name, values), (f"{name}_scale_inv", scales)):
                setattr(module, key, torch.nn.Parameter(tensor.clone(), requires_grad=False))
            pairs.append((values, scales))
        return module, *pairs

    return make


@pytest.mark.parametrize(
    ("arch", "is_power"), [("sm_90a", True), ("sm_90a", False), ("sm_100a", True)]
)
def test_fp8_experts_are_taken_as_they_are(fp8_experts, arch, is_power):
    adapter.register(arch=arch)
    module, l1, l2 = fp8_experts(is_power=is_power)
    x, idx, weights = random_call(5)
    y = module(x, idx, weights)
    activation = Swiglu(module.limit)
    expected = called_directly(l1, l2, x, idx, weights, activation, arch=arch, form="fp8")
    assert torch.equal(y, expected)
    assert laid_out(module) is not None
    adapter.release(torch.nn.ModuleDict({"experts": module}))
    for name, (weight, sf) in (("gate_up_proj", l1), ("down_proj", l2)):
        given = getattr(module, name).view(torch.uint8)
        assert torch.equal(given, weight.view(torch.uint8))
        assert torch.equal(getattr(module, f"{name}_scale_inv"), sf)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("activation_scheme", ["dynamic", "static"])
def test_fp8_experts_with_a_scale_for_each_matrix(arch, activation_scheme):
    """Tokens get scales of their own, whatever the checkpoint has for them."""
    adapter.register(arch=arch)
    module = gpu_experts(block_size=None, activation_scheme=activation_scheme)
    generator = torch.Generator().manual_seed(3)
    pairs = []
    for name in ("gate_up_proj", "down_proj"):
        weight, sf = getattr(module, name), getattr(module, f"{name}_scale_inv")
        values = torch.randn(weight.shape, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.rand(sf.shape, generator=generator) * 0.1 + 0.01
        for key, tensor in ((name, values), (f"{name}_scale_inv", scales)):
            setattr(module, key, torch.nn.Parameter(tensor.clone(), requires_grad=False))
        pairs.append((values, scales.squeeze(2)))
    x, idx, weights = random_call(5)
    y = module(x, idx, weights)
    expected = called_directly(
        *pairs, x, idx, weights, Swiglu(module.limit), arch=arch, form="fp8 x fp8_token"
    )
    assert torch.equal(y, expected)
    adapter.release(torch.nn.ModuleDict({"experts": module}))
    for name, (weight, sf) in zip(("gate_up_proj", "down_proj"), pairs, strict=True):
        given = getattr(module, name).view(torch.uint8)
        assert torch.equal(given, weight.view(torch.uint8))
        assert torch.equal(getattr(module, f"{name}_scale_inv").squeeze(2), sf)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_fp8_experts_with_a_scale_for_32_values_are_mxfp8(arch, scale_fmt):
    adapter.register(arch=arch)
    module = gpu_experts(block_size=(1, 32), scale_fmt=scale_fmt)
    generator = torch.Generator().manual_seed(4)
    pairs, given = [], {}
    for name in ("gate_up_proj", "down_proj"):
        weight, sf = getattr(module, name), getattr(module, f"{name}_scale_inv")
        values = torch.randn(weight.shape, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.randint(120, 125, sf.shape, generator=generator, dtype=torch.uint8)
        own = ue8m0_to_float(scales, torch.float32) if scale_fmt == "float" else scales
        given |= {name: values, f"{name}_scale_inv": own.view(sf.dtype)}
        pairs.append((values, scales))
    for key, tensor in given.items():
        setattr(module, key, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    x, idx, weights = random_call(5)
    y = module(x, idx, weights)
    form = "mxfp8 x bf16" if arch == "sm_90a" else "mxfp8 x mxfp8"
    expected = called_directly(*pairs, x, idx, weights, Swiglu(module.limit), arch=arch, form=form)
    assert torch.equal(y, expected)
    adapter.release(torch.nn.ModuleDict({"experts": module}))
    for name, tensor in given.items():
        assert torch.equal(getattr(module, name).view(torch.uint8), tensor.view(torch.uint8))


def test_fp8_with_other_scales_is_rounded_if_asked(fp8_experts):
    module, l1, l2 = fp8_experts(is_power=False)
    model = torch.nn.ModuleDict({"experts": module})
    (reason,) = adapter.prepare(model).values()
    assert reason.startswith("transformers: expert 0: ")
    adapter.release(model)
    adapter.register(quantize=True)
    x, idx, weights = random_call(5)
    with pytest.warns(deep_moe.RequantizationWarning):
        y = module(x, idx, weights)
    with pytest.warns(deep_moe.RequantizationWarning):
        expected = called_directly(
            l1, l2, x, idx, weights, Swiglu(module.limit), form="fp8", requantize=True
        )
    assert torch.equal(y, expected)
    assert torch.equal(module.down_proj_scale_inv, l2[1])  # they stay: nothing else has room


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32, torch.uint8])
def test_fp4_experts_are_taken_as_they_are(fp4_experts, scale_dtype):
    module, l1, l2 = fp4_experts(scale_dtype)
    x, idx, weights = random_call(5)
    idx[1, 0], idx[2, 1] = -1, 8  # no expert; transformers' mark of another rank's
    y = module(x, idx, weights)
    idx[2, 1] = -1
    assert torch.equal(y, called_directly(l1, l2, x, idx, weights, Swiglu(module.limit)))
    assert module.gate_up_proj.shape == l1[0].shape
    assert laid_out(module) is not None


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
def test_released_experts_are_what_they_were(fp4_experts, scale_dtype):
    module, *_ = fp4_experts(scale_dtype)
    before = {name: tensor.clone() for name, tensor in module.named_parameters()}
    model = torch.nn.ModuleDict({"experts": module})
    y = module(*random_call(3))
    assert laid_out(module) is not None
    adapter.release(model)
    assert laid_out(module) is None
    after = dict(module.named_parameters())
    assert {name: t.dtype for name, t in after.items()} == {n: t.dtype for n, t in before.items()}
    for name, tensor in before.items():
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert set(model.state_dict()) == {f"experts.{name}" for name in before}
    assert torch.equal(module(*random_call(3)), y)  # and may be taken again


def test_a_released_model_can_be_saved(checkpoint, eager, tmp_path):
    model = load(checkpoint)
    adapter.prepare(model)
    adapter.release(model)
    for name, tensor in eager.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.slow
def test_any_numbers_of_tokens(fp4_experts, monkeypatch):
    """None, more than the buffer holds, and more than one call takes."""
    from deep_moe.integrations.transformers import experts

    monkeypatch.setattr(experts, "MAX_CHUNK", 40)
    module, l1, l2 = fp4_experts(torch.float32)
    for num_tokens in (0, 7, 33, 90):
        x, idx, weights = random_call(num_tokens, seed=num_tokens)
        y = module(x, idx, weights)
        parts = [
            called_directly(l1, l2, x[rows], idx[rows], weights[rows], Swiglu(module.limit))
            for rows in (slice(i, i + 10) for i in range(0, num_tokens, 10))
        ]
        assert torch.equal(y, torch.cat([x[:0], *parts]))


def test_ranks_call_as_often_as_the_one_with_most_tokens(monkeypatch):
    from deep_moe.integrations.transformers import experts

    reduced = {dist.ReduceOp.MAX: max, dist.ReduceOp.MIN: min, dist.ReduceOp.SUM: sum}

    def all_reduce(own: torch.Tensor, op: Any, group: Any) -> None:
        own.fill_(reduced[op]([int(own), 64, 0]))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    assert experts._most_tokens(7, None, torch.device("cpu")) == 7
    assert experts._most_tokens(7, Any, torch.device("cpu")) == 64


def test_more_tokens_than_were_announced(fp4_experts):
    adapter.register(max_tokens_per_rank=4)
    module, *_ = fp4_experts(torch.float32)
    module(*random_call(4))
    with pytest.raises(ValueError, match=r"at most max_tokens_per_rank \(4\) tokens.* got 5"):
        module(*random_call(5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_of_tokens(fp4_experts, dtype):
    module, *_ = fp4_experts(torch.float32)
    x, idx, weights = random_call(3)
    expected = module(x, idx, weights)
    y = module(x.to(dtype), idx.int(), weights.to(dtype))
    assert y.dtype == dtype
    rounded = module(x, idx, weights.to(dtype).float())
    assert torch.equal(y.bfloat16(), rounded)
    assert torch.allclose(rounded.float(), expected.float(), atol=0.05)


def test_gradients_are_refused(fp4_experts):
    module, *_ = fp4_experts(torch.float32)
    x, idx, weights = random_call(3)
    with pytest.raises(NotImplementedError, match=r"no backward pass.*torch.no_grad"):
        module(x.requires_grad_(), idx, weights)
    with torch.no_grad():
        assert module(x, idx, weights).isfinite().all()


def small_qwen(hidden: int = 128, intermediate: int = 128) -> Any:
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()
    model.set_experts_implementation("deep_moe")
    return model


def test_weights_are_not_rounded_unasked(caplog):
    """What the kernel cannot run exactly is run by transformers, and said once."""
    model = small_qwen().float()
    ids = torch.arange(6)[None]
    with caplog.at_level(logging.INFO), torch.no_grad():
        logits = [model(ids).logits for _ in range(2)]
    (record,) = [r for r in caplog.records if "experts run by" in r.message]
    assert record.levelno == logging.WARNING
    assert "would be rounded to MXFP4; register(quantize=True) allows that" in record.message
    with torch.no_grad():
        adapter.release(model)
        model.set_experts_implementation("grouped_mm")
        assert torch.equal(model(ids).logits, logits[0])
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize(("hidden", "intermediate"), [(128, 128), (160, 96)])
def test_weights_are_rounded_if_asked(hidden: int, intermediate: int):
    model = small_qwen(hidden, intermediate)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        experts = model.model.layers[0].mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(experts, name)
            parameter.mul_(8)
        plain = model(ids).logits.float()
        adapter.release(model)
        adapter.register(quantize=True)
        path = adapter.prepare(model)
        rounded = model(ids).logits.float()
    assert path == {"model.layers.0.mlp.experts": "deep_moe"}
    assert 0 < relative_error(rounded, plain) < 0.3


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, Swiglu()),
        ({"limit": 10.0}, Swiglu(10.0)),
        ({"swiglu_alpha": 1.702, "swiglu_limit": 7.0}, SwigluOai(1.702, 7.0)),
        ({"gate_softcap": 4.0, "up_softcap": 25.0}, Situ(4.0, 25.0)),
    ],
)
def test_the_activation_is_found_out(fp4_experts, attributes, expected):
    module, l1, l2 = fp4_experts(torch.float32)
    names = ("limit", "swiglu_limit", "swiglu_alpha", "gate_softcap", "up_softcap")
    for name in names:
        setattr(module, name, attributes.get(name))
    x, idx, weights = random_call(5)
    y = module(x, idx, weights)
    assert torch.equal(y, called_directly(l1, l2, x, idx, weights, expected))


def test_what_cannot_be_served_is_left_to_transformers():
    model = small_qwen().float()
    experts = model.model.layers[0].mlp.experts
    experts.act_fn = torch.nn.GELU()
    ids = torch.arange(6)[None]
    with torch.no_grad():
        model.set_experts_implementation("eager")
        expected = model(ids).logits
        model.set_experts_implementation("deep_moe")
        reason = adapter.prepare(model)["model.layers.0.mlp.experts"]
        assert reason.startswith("transformers: ")
        assert torch.allclose(model(ids).logits, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"act_fn": torch.nn.GELU()}, "activation of Qwen3MoeExperts is none that the kernel has"),
        ({"has_bias": True}, "gate_up_proj_bias is no row for each expert"),
        ({"has_gate": False}, "experts with has_gate=False"),
        ({"has_post_expert_norm": True}, "experts with has_post_expert_norm=True"),
    ],
)
def test_reasons(change, reason):
    adapter.register(quantize=True)
    model = small_qwen()
    for name, value in change.items():
        setattr(model.model.layers[0].mlp.experts, name, value)
    assert reason in adapter.prepare(model)["model.layers.0.mlp.experts"]


def test_weights_that_hold_nan_are_not_rounded():
    adapter.register(quantize=True)
    model = small_qwen()
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[3, 2, 1] = float("nan")
    reason = adapter.prepare(model)["model.layers.0.mlp.experts"]
    assert reason.startswith("transformers: expert 3: ")
    assert "NaN" in reason


def test_sizes_that_no_kernel_has():
    adapter.register(quantize=True)
    reason = adapter.prepare(small_qwen(128, 80))["model.layers.0.mlp.experts"]
    assert "intermediate_hidden" in reason


# ---- several ranks

# Older versions spread experts by themselves alone.
needs_ep_implementation = pytest.mark.skipif(
    find_spec("transformers.distributed.expert_parallel") is None,
    reason="this version of transformers has no ep_implementation",
)
REPLACED_PLAN = {"lm_head": "colwise_gather_output"}  # a plan for tensor parallelism must be given


def _generate(device: torch.device, checkpoint: Path, out: Path, **options: str) -> None:
    """Both ranks hold the same tokens: experts are spread over a tensor-parallel group."""
    adapter.register()
    model = load(
        checkpoint,
        distributed_config=transformers.distributed.DistributedConfig(
            tp_size=2, ep_size=2, tp_plan=REPLACED_PLAN, **options
        ),
    )
    paths = adapter.prepare(model)
    assert list(paths) == EXPERTS
    if "ep_implementation" in options:
        assert set(paths.values()) == {"deep_moe"}
    torch.save(greedy(model, PROMPT), out / f"{dist.get_rank()}.pt")
    adapter.release(model)
    adapter.close_buffers()


def _own_tokens(device: torch.device, checkpoint: Path, out: Path) -> None:
    """Each rank has tokens of its own, not equally many."""
    adapter.register()
    model = load(
        checkpoint,
        dtype=torch.float32,
        distributed_config=transformers.distributed.DistributedConfig(
            fsdp_size=2, ep_size=2, ep_implementation="deep_moe"
        ),
    )
    rank = dist.get_rank()
    ids = torch.arange(3 + 4 * rank)[None] + 5 * rank
    with torch.no_grad():
        torch.save(model(ids).logits, out / f"{rank}.pt")
    adapter.close_buffers()
    dist.barrier()


def on_ranks(work: Any, monkeypatch: pytest.MonkeyPatch, *args: Any) -> None:
    # transformers asks the environment for what torchrun sets there.
    monkeypatch.setenv("WORLD_SIZE", "2")
    run_on_ranks(work, 2, "cpu", *args)


def _generate_in_the_kernel(device: torch.device, checkpoint: Path, out: Path) -> None:
    _generate(device, checkpoint, out, ep_implementation="deep_moe")


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [
        pytest.param(_generate_in_the_kernel, id="by the kernel", marks=needs_ep_implementation),
        pytest.param(_generate, id="by transformers"),
    ],
)
def test_two_ranks_generate_what_one_generates(work, checkpoint, tmp_path, monkeypatch):
    on_ranks(work, monkeypatch, checkpoint, tmp_path)
    (tokens, logits), (other_tokens, other_logits) = (
        torch.load(tmp_path / f"{rank}.pt") for rank in range(2)
    )
    assert torch.equal(tokens, ANSWER)
    assert torch.equal(tokens, other_tokens)
    assert torch.equal(logits, other_logits)
    alone = greedy(load(checkpoint), PROMPT)[1]
    # Before 5.23 transformers multiplies experts that it spreads, in bfloat16: the largest logits
    # have steps of 2^-4.
    atol = 0.02 if work is _generate_in_the_kernel else 2 * 2**-4
    assert torch.allclose(logits, alone, atol=atol)


@pytest.mark.slow
@needs_ep_implementation
def test_ranks_with_their_own_tokens(float_checkpoint, tmp_path, monkeypatch):
    on_ranks(_own_tokens, monkeypatch, float_checkpoint, tmp_path)
    alone = load(float_checkpoint, dtype=torch.float32)
    for rank in range(2):
        ids = torch.arange(3 + 4 * rank)[None] + 5 * rank
        with torch.no_grad():
            expected = alone(ids).logits
        assert torch.allclose(torch.load(tmp_path / f"{rank}.pt"), expected, atol=1e-5)


@needs_ep_implementation
def test_expert_parallel_needs_the_experts_too(checkpoint):
    from deep_moe.integrations.transformers.expert_parallel import DeepMoEExpertParallel

    class Mesh:
        def get_group(self) -> Any:
            return dist.group.WORLD

    model = load(checkpoint, "eager")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r'goes with experts_implementation="deep_moe".*eager'):
            DeepMoEExpertParallel(model.model.layers[0].mlp.experts, Mesh(), Mesh())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("lacks", ["experts.5.w1.weight", "experts.7.w2", "experts.3.w3.scale"])
def test_a_checkpoint_without_an_expert_is_refused(checkpoint, tmp_path, lacks):
    """By transformers, which stacks experts; nothing is served."""
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if f"layers.1.ffn.{lacks}" not in name}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"conversion of the weights|ignore_mismatched_sizes"):
        load(tmp_path)


# ---- registration


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"quantize": 1}, TypeError, "quantize must be a bool"),
        ({"max_tokens_per_rank": "8"}, TypeError, "max_tokens_per_rank must be an int"),
        ({"max_tokens_per_rank": 0}, ValueError, "max_tokens_per_rank must be at least 1; got 0"),
        (
            {"token_format": "fp8"},
            ValueError,
            "token_format must be .*mxfp8 or .* or bf16; got",
        ),
        ({"token_format": 16}, TypeError, "token_format must be .* or bf16 or None; got 16"),
        ({"arch": "sm_80"}, ValueError, "sm_80"),
        ({"arch": 90}, TypeError, "arch must be a str"),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        adapter.register(**arguments)


@pytest.mark.parametrize("version", ["5.16.0", "6.0.0.dev0", "4.57"])
def test_other_versions_are_refused(version, monkeypatch):
    monkeypatch.setattr("deep_moe.integrations.engine_version.version", lambda _: version)
    with pytest.raises(
        DeepMoEError, match=rf"transformers must be at least 5.16.1 .* got {version}"
    ):
        adapter.register()
