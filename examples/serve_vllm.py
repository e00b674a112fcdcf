"""vLLM serves a model of random weights, once with its experts in the kernel and once without.

The model is Qwen3-MoE's, since its attention runs on any GPU that vLLM knows; its experts have
DeepSeek-V4-Flash's sizes and format, MXFP4. It is written to a folder and served three times, each
in a process of its own: by deep_moe, by vLLM alone, and by vLLM with the experts' weights as BF16
numbers, which is the reference. All of them get the same prompts, and say how probable every token
of them is. Needs a GPU, vLLM and an installed deep_moe; fetches nothing.

    python examples/serve_vllm.py
    torchrun is not needed: python examples/serve_vllm.py --tensor-parallel-size 2
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import deep_moe
from deep_moe.formats.block_scaled import unpack_ue8m0

VOCABULARY, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32000, 16, 4, 128
# Of how far apart tokens' log-probabilities lie in the reference. Activations in FP8 make for less
# than this; experts that are swapped, or scales that are shifted, for far more.
ALLOWED = 0.1


def main() -> int:
    arguments = parsed()
    if arguments.serve:
        serve(arguments)
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        quantized, reference = Path(folder, "mxfp4"), Path(folder, "bf16")
        write_models(quantized, reference, arguments)
        runs = {
            "reference": run("reference", reference, {"DEEP_MOE_VLLM": "0"}),
            "vLLM": run("vLLM", quantized, {"DEEP_MOE_VLLM": "0"}),
            "deep_moe": run("deep_moe", quantized, {"DEEP_MOE_VLLM": "1"}),
        }
    return report(runs, arguments.layers)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--topk", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--folder", help="where models are written for the time; default: /tmp")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)  # the model of a child
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def write_models(quantized: Path, reference: Path, arguments: argparse.Namespace) -> None:
    """The same model twice, as checkpoints have it: experts in MXFP4, and their numbers in BF16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, std: float) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, device=device)
        return (values * std).bfloat16()

    hidden, intermediate = arguments.hidden, arguments.intermediate
    for folder in (quantized, reference):
        folder.mkdir()
        config = model_config(arguments, is_quantized=folder is quantized)
        Path(folder, "config.json").write_text(json.dumps(config))
    rest = {
        "model.embed_tokens.weight": random(VOCABULARY, hidden, std=1.0),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": random(VOCABULARY, hidden, std=2 * hidden**-0.5),
    }
    for layer in range(arguments.layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            rest[f"{prefix}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name in ("q_norm", "k_norm"):
            rest[f"{prefix}.self_attn.{name}.weight"] = torch.ones(HEAD_DIM, dtype=torch.bfloat16)
        for name, heads in (("q", NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS)):
            rest[f"{prefix}.self_attn.{name}_proj.weight"] = random(
                heads * HEAD_DIM, hidden, std=hidden**-0.5
            )
        rest[f"{prefix}.self_attn.o_proj.weight"] = random(
            hidden, NUM_HEADS * HEAD_DIM, std=(NUM_HEADS * HEAD_DIM) ** -0.5
        )
        rest[f"{prefix}.mlp.gate.weight"] = random(arguments.experts, hidden, std=hidden**-0.5)
        packed, floats = {}, {}
        for expert in range(arguments.experts):
            for name, shape in (
                ("gate_proj", (intermediate, hidden)),
                ("up_proj", (intermediate, hidden)),
                # So that experts weigh as much as what goes by them.
                ("down_proj", (hidden, intermediate)),
            ):
                gain = 4 if name == "down_proj" else 1
                weight = random(*shape, std=gain * shape[1] ** -0.5)
                values, scales = deep_moe.quantize_mxfp4(weight)
                key = f"{prefix}.mlp.experts.{expert}.{name}.weight"
                packed[key] = values.view(torch.uint8).cpu()
                packed[key + "_scale"] = unpack_ue8m0(scales).cpu()
                floats[key] = deep_moe.dequantize_mxfp4(values, scales, torch.bfloat16).cpu()
        save_file(packed, Path(quantized, f"experts-{layer}.safetensors"))
        save_file(floats, Path(reference, f"experts-{layer}.safetensors"))
    rest = {name: tensor.cpu() for name, tensor in rest.items()}
    for folder in (quantized, reference):
        save_file(rest, Path(folder, "rest.safetensors"))


def model_config(arguments: argparse.Namespace, *, is_quantized: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.intermediate,
        "moe_intermediate_size": arguments.intermediate,
        "num_hidden_layers": arguments.layers,
        "num_experts": arguments.experts,
        "num_experts_per_tok": arguments.topk,
        "norm_topk_prob": True,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if is_quantized:
        config["quantization_config"] = {"quant_method": "mxfp4"}
    return config


def run(name: str, model: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Serve a model in a process of its own. `paths`: what vLLM's log says of who runs experts."""
    out = model.with_name(f"{name}.json")
    command = [sys.executable, __file__, *sys.argv[1:], "--serve", str(model), "--out", str(out)]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_COLOR": "0"}
    print(f"{name}: vLLM loads and serves the model", flush=True)
    done = subprocess.run(
        command,
        env=os.environ | offline | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(done.stdout)
        raise SystemExit(f"{name}: vLLM ended with exit status {done.returncode}")
    result = json.loads(out.read_text())
    result["paths"] = [line for line in done.stdout.splitlines() if "experts run by" in line]
    return result


def serve(arguments: argparse.Namespace) -> None:
    """In a child: every prompt's tokens' log-probabilities, and what the model makes of it."""
    from vllm import LLM, SamplingParams

    generator = torch.Generator().manual_seed(1)
    shape = (arguments.prompts, arguments.prompt_tokens)
    prompts = torch.randint(VOCABULARY, shape, generator=generator).tolist()
    length = arguments.prompt_tokens + arguments.new_tokens
    llm = LLM(
        model=str(arguments.serve),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=length + 1,
        max_num_batched_tokens=max(length + 1, 1024),
        max_num_seqs=arguments.prompts,
        gpu_memory_utilization=0.5,
        tensor_parallel_size=arguments.tensor_parallel_size,
        enable_expert_parallel=arguments.tensor_parallel_size > 1,
        enable_prefix_caching=False,
        enforce_eager=arguments.eager,
        # Graphs of decoding steps, without a compiler between model and kernels.
        compilation_config={"mode": 0}
        if arguments.eager
        else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    )
    options = SamplingParams(
        temperature=0,
        max_tokens=arguments.new_tokens,
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0,
        detokenize=False,
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], options)
    made = [list(output.outputs[0].token_ids) for output in outputs]
    decoded = [
        [step[token].logprob for step, token in zip(output.outputs[0].logprobs, new, strict=True)]
        for output, new in zip(outputs, made, strict=True)
    ]
    # The same tokens once more, now all of them as a prompt.
    whole = [prompt + new for prompt, new in zip(prompts, made, strict=True)]
    again = llm.generate([{"prompt_token_ids": tokens} for tokens in whole], options)
    result = {
        "prompts": [prompt_logprobs(o, p) for o, p in zip(outputs, prompts, strict=True)],
        "tokens": made,
        "decoded": decoded,
        "read": [
            prompt_logprobs(o, t)[-arguments.new_tokens :]
            for o, t in zip(again, whole, strict=True)
        ],
    }
    arguments.out.write_text(json.dumps(result))


def prompt_logprobs(output: Any, prompt: list[int]) -> list[float]:
    """Of every token but the first."""
    steps = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    return [step[token].logprob for step, token in steps]


def report(runs: dict[str, dict[str, Any]], num_layers: int) -> int:
    reference = torch.tensor(runs["reference"]["prompts"])
    spread = (reference - reference.mean()).abs().mean().item()
    print(f"log-probabilities of {reference.numel()} tokens, {spread:.3f} from their mean\n")
    print("                 mean difference to reference   decoding to reading   first tokens")
    distance = {}
    for name, run_ in runs.items():
        distance[name] = (torch.tensor(run_["prompts"]) - reference).abs().mean().item()
        steps = torch.tensor(run_["decoded"]) - torch.tensor(run_["read"])
        equal = [
            a[0] == b[0] for a, b in zip(run_["tokens"], runs["reference"]["tokens"], strict=True)
        ]
        print(
            f"{name:12} {distance[name]:26.5f} {steps.abs().mean():21.5f}"
            f" {sum(equal):10} of {len(equal)}"
        )
    own = [line for line in runs["deep_moe"]["paths"] if "experts run by deep_moe" in line]
    print("\n" + "\n".join(runs["deep_moe"]["paths"]))
    if len({line.split(": experts run")[0].split()[-1] for line in own}) != num_layers:
        print(f"deep_moe ran {len(own)} of {num_layers} layers")
        return 1
    if not distance["deep_moe"] <= ALLOWED * spread:
        print(f"deep_moe is further from the reference than {ALLOWED} of the spread")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
