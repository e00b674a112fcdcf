"""transformers runs a model of random weights, with its experts in the kernel and without.

The model is of transformers' class of DeepSeek-V4, with experts of DeepSeek-V4-Flash's sizes. It is
written as published checkpoints have it, experts in MXFP4, and once more with their numbers in
BF16, which is the reference. deep_moe runs the first, transformers by itself the second. Both get
the same prompts, and say how probable every token of them is. Needs transformers; without a GPU
experts are emulated, which is for small sizes only. Fetches nothing.

    python examples/serve_transformers.py
    python examples/serve_transformers.py --ranks 2     # experts spread over two GPUs
    python examples/serve_transformers.py --also TOKEN_FORMAT=bf16    # and with tokens in BF16
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from served_model import VOCABULARY, add_model_options, prompts_of, run_child, serve_own

import deep_moe
from deep_moe.formats.block_scaled import unpack_ue8m0

# What a run has in its environment: who runs experts, and how the kernel takes tokens.
EXPERTS, TOKENS = "EXPERTS", "TOKEN_FORMAT"
TP_PLAN = {"lm_head": "colwise_gather_output"}  # transformers wants one for tensor parallel ranks


def main() -> int:
    arguments = parsed()
    if arguments.serve:
        serve(arguments)
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        quantized, reference = Path(folder, "mxfp4"), Path(folder, "bf16")
        write_models(quantized, reference, arguments)
        runs = {"reference": run_child("reference", reference, [{EXPERTS: ""}], "transformers")}

        def by_deep_moe(name: str, variables: dict[str, str]) -> dict[str, Any]:
            ranks = [{EXPERTS: "deep_moe"} | rank | variables for rank in ranks_of(arguments)]
            return run_child(name, quantized, ranks, "transformers")

        return serve_own(arguments, runs, by_deep_moe)


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--ranks", type=int, default=1, help="processes, with a GPU each")
    arguments = parser.parse_args(words)
    if arguments.prompts % arguments.ranks:
        parser.error("--prompts must be a multiple of --ranks")
    return arguments


def ranks_of(arguments: argparse.Namespace) -> list[dict[str, str]]:
    """What torchrun would put into the environment of each rank; nothing for a rank alone."""
    if arguments.ranks == 1:
        return [{}]
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    common = {"WORLD_SIZE": arguments.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        {name: str(value) for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        for rank in range(arguments.ranks)
    ]


# ---- the model


def write_models(quantized: Path, reference: Path, arguments: argparse.Namespace) -> None:
    from transformers import DeepseekV4ForCausalLM

    torch.manual_seed(0)
    with torch.device(device_of(0)):
        model = DeepseekV4ForCausalLM(model_config(arguments)).bfloat16()
    for name, parameter in model.named_parameters():
        matrix = parameter.data
        if "experts." in name and matrix.dim() == 3:  # [expert, rows, columns]
            for expert in matrix:
                expert.normal_(std=matrix.shape[2] ** -0.5)
                values, scales = deep_moe.quantize_mxfp4(expert)
                expert.copy_(deep_moe.dequantize_mxfp4(values, scales, torch.bfloat16))
        elif matrix.dim() == 2 and "hc" not in name and "position" not in name:
            gain = 2 if name == "lm_head.weight" else 1
            std = 1.0 if "embed" in name else gain * matrix.shape[1] ** -0.5
            matrix.normal_(std=std)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):  # the experts of each token, where a hash routes
            scores = torch.rand(len(buffer), arguments.experts, device=buffer.device)
            buffer.copy_(scores.topk(arguments.topk).indices)
    model.save_pretrained(reference, max_shard_size="1000GB")
    # All but experts, whose products of FP8 would need kernels that transformers fetches.
    linears = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    quantized.mkdir()
    publish(reference, quantized, linears)


def publish(floats: Path, folder: Path, unconverted: list[str]) -> None:
    """Write the checkpoint in `floats` as published ones are: experts in packed E2M1 with UE8M0
    scales per 32, everything else in bfloat16. unconverted: modules that are not to be FP8's."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(floats / "model.safetensors").items():
        if ".ffn.experts." in name:
            values, scales = deep_moe.quantize_mxfp4(tensor.to(device_of(0)))
            tensors[name] = values.cpu()
            bytes_of_scales = unpack_ue8m0(scales).cpu()
            tensors[name.replace(".weight", ".scale")] = bytes_of_scales.view(torch.float8_e8m0fnu)
        else:
            tensors[name] = tensor.bfloat16() if tensor.is_floating_point() else tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((floats / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "expert_dtype": "fp4",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": unconverted,
    }
    (folder / "config.json").write_text(json.dumps(config))


def model_config(arguments: argparse.Namespace) -> Any:
    from transformers import DeepseekV4Config

    return DeepseekV4Config(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        moe_intermediate_size=arguments.intermediate,
        n_routed_experts=arguments.experts,
        num_experts_per_tok=arguments.topk,
        num_hidden_layers=arguments.layers,
        mlp_layer_types=["hash_moe"] + ["moe"] * (arguments.layers - 1),
        num_attention_heads=16,
        head_dim=128,
        qk_rope_head_dim=64,
        q_lora_rank=512,
        o_lora_rank=512,
        o_groups=4,
        index_n_heads=8,
        index_head_dim=128,
        max_position_embeddings=4096,
        num_nextn_predict_layers=0,
    )


def device_of(rank: int) -> torch.device:
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


# ---- a child


def serve(arguments: argparse.Namespace) -> None:
    """Every prompt's tokens' log-probabilities, and what the model makes of it. A rank writes its
    share of the prompts' results; all ranks hold the same tokens."""
    import transformers

    import deep_moe.integrations.transformers as deep_moe_transformers

    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = device_of(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    options: dict[str, Any] = {}
    if os.environ[EXPERTS] == "deep_moe":
        deep_moe_transformers.register(token_format=os.environ.get(TOKENS))
        options["experts_implementation"] = "deep_moe"
    if ranks > 1:
        options["distributed_config"] = transformers.distributed.DistributedConfig(
            tp_size=ranks, ep_size=ranks, tp_plan=TP_PLAN, ep_implementation="deep_moe"
        )
    else:
        options["device_map"] = device
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.serve, dtype=torch.bfloat16, **options
    ).eval()
    if os.environ[EXPERTS] == "deep_moe":
        for layer, path in deep_moe_transformers.prepare(model).items():
            print(f"{layer}: experts run by {path}")
    prompts = torch.tensor(prompts_of(arguments), device=device)
    with torch.inference_mode():
        generated = model.generate(
            prompts,
            max_new_tokens=arguments.new_tokens,
            min_new_tokens=arguments.new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        # Whole sequences at once, as a prompt.
        read = logprobs(model(generated.sequences).logits[:, :-1], generated.sequences[:, 1:])
        made = generated.sequences[:, prompts.shape[1] :]
        decoded = logprobs(torch.stack(generated.logits, 1), made)
    share = len(prompts) // ranks
    own = slice(rank * share, (rank + 1) * share)
    result = {
        "prompts": read[own, : prompts.shape[1] - 1].tolist(),
        "tokens": made[own].tolist(),
        "decoded": decoded[own].tolist(),
        "read": read[own, prompts.shape[1] - 1 :].tolist(),
    }
    arguments.out.write_text(json.dumps(result))
    if os.environ[EXPERTS] == "deep_moe":
        deep_moe_transformers.close_buffers()
    if ranks > 1:
        torch.distributed.destroy_process_group()


def logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[sequence, token], of the token behind each place, by the logits there."""
    every = logits.float().log_softmax(-1)
    return every.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


if __name__ == "__main__":
    raise SystemExit(main())
