"""Whole models of other kinds in transformers: gpt-oss, and experts in BF16 and FP8. They have
learnt to count, so that no rounding decides their tokens."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import deep_moe
import deep_moe.integrations.transformers as adapter
from deep_moe.formats.block_scaled import unpack_ue8m0
from tests.everyday import parametrize

from .conftest import NUM_COUNTED, counting

# In front of what has the same condition: a second import of a skipped module finds half of it.
transformers = pytest.importorskip("transformers", minversion="5.16.1")

from .test_transformers import (  # noqa: E402
    ANSWER,
    EXPERTS,
    PROMPT,
    REPLACED_PLAN,
    greedy,
    laid_out,
    load,
    on_ranks,
    relative_error,
)

SIZES = {
    "vocab_size": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    adapter.register()
    yield
    adapter.close_buffers()


def teach(model: Any, num_steps: int = 40) -> None:
    """To count."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_steps):
        ids = counting(torch.randint(0, NUM_COUNTED, (8, 1)), 16)
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As it is published: stacked blocks and scales with rows of gate and up in turn, biases, and
    sizes that are no multiples of 128."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **SIZES, hidden_size=160, intermediate_size=96, num_local_experts=8, swiglu_limit=1.0
    )
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            torch.nn.init.normal_(getattr(layer.mlp.experts, name), std=0.08)
            torch.nn.init.normal_(getattr(layer.mlp.experts, f"{name}_bias"), std=0.3)
    teach(model, 60)
    model.save_pretrained(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed, sf = deep_moe.quantize_mxfp4(tensor.transpose(1, 2).contiguous())
            num_groups = packed.shape[2] // 16
            blocks = packed.view(torch.uint8).unflatten(2, (num_groups, 16))
            tensors[f"{name}_blocks"] = blocks.contiguous()
            tensors[f"{name}_scales"] = unpack_ue8m0(sf)[..., :num_groups].contiguous()
        else:
            tensors[name] = tensor.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    published = json.loads((folder / "config.json").read_text())
    published["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (folder / "config.json").write_text(json.dumps(published))
    return folder


@parametrize(
    ("arch", "token_format", "most"),
    [
        ("sm_90a", None, 0.12),
        ("sm_100a", "mxfp8", 0.12),
        ("sm_90a", "bf16", 0.005),
        ("sm_100a", "bf16", 0.005),
    ],
    everyday=[("sm_100a", "mxfp8", 0.12)],
)
def test_gpt_oss_generates_what_the_eager_path_generates(gpt_oss, arch, token_format, most):
    """With tokens in BF16 nothing but weights is quantized, and logits are nearer."""
    adapter.register(arch=arch, token_format=token_format)
    model, eager = load(gpt_oss), load(gpt_oss, "eager")
    before = {name: tensor.clone() for name, tensor in eager.state_dict().items()}
    assert adapter.prepare(model) == dict.fromkeys(EXPERTS, "deep_moe")
    expected, expected_logits = greedy(eager, PROMPT)
    tokens, logits = greedy(model, PROMPT)
    assert tokens.tolist() == expected.tolist() == ANSWER.tolist()
    assert 0 < relative_error(logits, expected_logits) < 0.12
    # Of most tokens: where a router's two best are near each other, rounding decides.
    errors = [relative_error(*own) for own in zip(logits, expected_logits, strict=True)]
    assert statistics.median(errors) < most
    layer = laid_out(model.model.layers[0].mlp.experts)
    assert layer is not None
    assert layer.sizes.weights == "mxfp4"
    assert layer.sizes.token_format == (token_format or "mxfp8")
    adapter.release(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def _generate(device: torch.device, checkpoint: Path, out: Path) -> None:
    adapter.register()
    model = load(
        checkpoint,
        distributed_config=transformers.distributed.DistributedConfig(
            tp_size=2, ep_size=2, tp_plan=REPLACED_PLAN, ep_implementation="deep_moe"
        ),
    )
    assert adapter.prepare(model) == dict.fromkeys(EXPERTS, "deep_moe")
    torch.save(greedy(model, PROMPT), out / f"{torch.distributed.get_rank()}.pt")
    adapter.close_buffers()


@pytest.mark.slow
def test_two_ranks_generate_what_one_generates(gpt_oss, tmp_path, monkeypatch):
    on_ranks(_generate, monkeypatch, gpt_oss, tmp_path)
    (tokens, logits), (other_tokens, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(tokens, ANSWER)
    assert torch.equal(other_tokens, ANSWER)
    assert torch.allclose(logits, greedy(load(gpt_oss), PROMPT)[1], atol=0.02)


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16 that counts; its experts are no MXFP4 numbers."""
    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **SIZES | {"num_key_value_heads": 2},  # which two ranks share
        hidden_size=256,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_experts=8,
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    for layer in model.model.layers:
        for weights in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            torch.nn.init.normal_(weights, std=0.06)
    teach(model)
    model.bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture
def qwen(qwen_folder: Path) -> Callable[[], Any]:
    """Loads that model."""
    return lambda: load(qwen_folder, "eager")


@parametrize("arch", ["sm_90a", "sm_100a"], everyday=["sm_90a"])
def test_bf16_experts_generate_what_the_eager_path_generates(qwen, arch):
    """Nothing is quantized: logits are nearer than FP8 tokens could make them."""
    adapter.register(arch=arch, num_pool_tokens=384)
    model = qwen()
    expected, expected_logits = greedy(model, PROMPT)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.set_experts_implementation("deep_moe")
    assert adapter.prepare(model) == dict.fromkeys(EXPERTS, "deep_moe")
    tokens, logits = greedy(model, PROMPT)
    assert tokens.tolist() == expected.tolist() == ANSWER.tolist()
    assert relative_error(logits, expected_logits) < 0.01
    layer = laid_out(model.model.layers[0].mlp.experts)
    assert layer is not None
    assert (layer.sizes.weights, layer.sizes.num_pool_tokens) == ("bf16", 384)
    adapter.release(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.slow
def test_two_ranks_generate_with_bf16_experts(qwen_folder, tmp_path, monkeypatch):
    on_ranks(_generate, monkeypatch, qwen_folder, tmp_path)
    expected = greedy(load(qwen_folder, "eager"), PROMPT)[1]
    for rank in range(2):
        tokens, logits = torch.load(tmp_path / f"{rank}.pt")
        assert torch.equal(tokens, ANSWER)
        assert relative_error(logits, expected) < 0.02  # attention adds up two ranks' sums


@parametrize("arch", ["sm_90a", "sm_100a"], everyday=["sm_90a"])
def test_fp8_experts_generate_what_their_numbers_generate(qwen, arch):
    """The modules that transformers has for FP8 on GPUs, in a model; the eager path multiplies
    their numbers as BF16."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation

    class Experts(FP8Experts):
        pass

    use_experts_implementation(Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    adapter.register(arch=arch)
    plain, model = qwen(), qwen()
    model.set_experts_implementation("deep_moe")
    for own, other in zip(plain.model.layers, model.model.layers, strict=True):
        experts = Experts(model.config, block_size=(128, 128))
        for name in ("gate_up_proj", "down_proj"):
            floats = getattr(own.mlp.experts, name).data.float()
            blocks = floats.unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
            # Powers of two, which every target applies.
            sf = (blocks.abs().amax((2, 4)) / 448).log2().ceil().exp2()
            scales = sf.repeat_interleave(128, 1).repeat_interleave(128, 2)
            values = (floats / scales).to(torch.float8_e4m3fn)
            numbers = (values.float() * scales).bfloat16()
            getattr(own.mlp.experts, name).data = numbers
            for key, tensor in ((name, values), (f"{name}_scale_inv", sf)):
                setattr(experts, key, torch.nn.Parameter(tensor, requires_grad=False))
        other.mlp.experts = experts
    assert adapter.prepare(model) == dict.fromkeys(EXPERTS, "deep_moe")
    expected, expected_logits = greedy(plain, PROMPT)
    tokens, logits = greedy(model, PROMPT)
    assert tokens.tolist() == expected.tolist() == ANSWER.tolist()
    assert 0 < relative_error(logits, expected_logits) < 0.12
