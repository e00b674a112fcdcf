"""A DeepSeek-V4-like model of two layers with MXFP4 experts, as a published checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deep_moe

from ..examples.test_served_model import example

SIZES = {
    "vocab_size": 32,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 2,
    "index_n_heads": 2,
    "index_head_dim": 64,
    "max_position_embeddings": 128,
    "num_nextn_predict_layers": 0,
    "mlp_layer_types": ["hash_moe", "moe"],
}


NUM_COUNTED = SIZES["vocab_size"] - 2  # tokens 0 and 1 are the begin and the end of a text
NUM_TRAINING_STEPS = 60


def counting(start: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Tokens that count on from `start` [..., 1], and begin anew behind the last one."""
    return (start + torch.arange(num_tokens)) % NUM_COUNTED + 2


@pytest.fixture(scope="session")
def float_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All weights in float32, those of experts numbers that MXFP4 holds. The model has learnt to
    count, so that it is sure of its tokens: what a random one says, a rounding may decide."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    folder = tmp_path_factory.mktemp("floats")
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**SIZES))
    hash_router = model.model.layers[0].mlp.gate
    hash_router.tid2eid.copy_(torch.rand(SIZES["vocab_size"], 8).topk(2).indices)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.experts.gate_up_proj, std=0.06)
        torch.nn.init.normal_(layer.mlp.experts.down_proj, std=0.06)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(NUM_TRAINING_STEPS):
        ids = counting(torch.randint(0, NUM_COUNTED, (8, 1)), 16)
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    for layer in model.model.layers:
        for weights in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            weights.data = deep_moe.dequantize_mxfp4(*deep_moe.quantize_mxfp4(weights.data))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(float_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts in packed E2M1 with UE8M0 scales per 32, everything else in bfloat16."""
    import transformers

    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 20):
        pytest.skip("transformers before 5.20 cannot run a quantized DeepSeek-V4 on a CPU")
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        publish = example("serve_transformers", patch).publish
    publish(float_checkpoint, folder, ["self_attn", "shared_experts", "gate", "lm_head", "hc"])
    return folder
