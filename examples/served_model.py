"""A model of random weights for the examples that serve one, and how near their results are.

The model is Qwen3-MoE's, since its attention runs on any GPU that engines know. It is written
twice, as checkpoints have it: with its experts in one of `FORMATS`, and with their numbers in BF16,
which is the reference. Nothing but experts is quantized.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

import deep_moe
from deep_moe.formats.block_scaled import unpack_ue8m0
from deep_moe.trial.child_sessions import child_sessions

VOCABULARY, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32000, 16, 4, 128
# Of how far apart tokens' log-probabilities lie in the reference. Activations in FP8 make for less
# than this; experts that are swapped, or scales that are shifted, for far more.
ALLOWED = 0.1
# A line of an engine's log: its load balancer has moved experts. vLLM tries it once at start.
MOVED = re.compile(r"Rearranged experts(?!.*profile)|EPLBManager\] rebalance end")
STEPS_BETWEEN_MOVES = 8
END_S = 20  # that an engine has to end by itself, once its results are written


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--topk", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        type=variable,
        metavar="VARIABLE=VALUE",
        help="serve by deep_moe once more, with this in the environment; may be given again",
    )
    parser.add_argument("--folder", help="where models are written for the time; default: /tmp")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)  # the model of a child
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--new-weights",
        action="store_true",
        help="give the running engine the weights of another model, and serve that one too",
    )
    parser.add_argument(
        "--redundant-experts",
        type=int,
        metavar="N",
        help="with so many, or 0, the engine's load balancer moves experts every "
        f"{STEPS_BETWEEN_MOVES} steps",
    )


def variable(text: str) -> dict[str, str]:
    """For the environment, as the option has it."""
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"must be VARIABLE=VALUE; got {text!r}")
    return {name: value}


def write_models(
    quantized: Path, reference: Path, arguments: argparse.Namespace, weights: str
) -> None:
    """weights: of the experts in `quantized`, one of `FORMATS`."""
    write_model(quantized, reference, arguments, weights, seed=0)
    if arguments.new_weights:
        write_model(after(quantized), after(reference), arguments, weights, seed=2)


def after(model: Path) -> Path:
    """The folder of the weights that take the place of those in `model`."""
    return model.with_name(f"{model.name}-new")


def write_model(
    quantized: Path, reference: Path, arguments: argparse.Namespace, weights: str, seed: int
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int, std: float) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, device=device)
        return (values * std).bfloat16()

    hidden, intermediate = arguments.hidden, arguments.intermediate
    for folder in (quantized, reference):
        folder.mkdir()
        config = model_config(arguments, weights if folder is quantized else None)
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
        stored: dict[str, torch.Tensor] = {}
        floats: dict[str, torch.Tensor] = {}
        for expert in range(arguments.experts):
            for name, shape in (
                ("gate_proj", (intermediate, hidden)),
                ("up_proj", (intermediate, hidden)),
                # So that experts weigh as much as what goes by them.
                ("down_proj", (hidden, intermediate)),
            ):
                gain = 4 if name == "down_proj" else 1
                weight = random(*shape, std=gain * shape[1] ** -0.5)
                key = f"{prefix}.mlp.experts.{expert}.{name}.weight"
                floats[key] = add_weight(stored, key, weight, weights).cpu()
        save_file(stored, Path(quantized, f"experts-{layer}.safetensors"))
        save_file(floats, Path(reference, f"experts-{layer}.safetensors"))
    rest = {name: tensor.cpu() for name, tensor in rest.items()}
    for folder in (quantized, reference):
        save_file(rest, Path(folder, "rest.safetensors"))


def add_weight(
    stored: dict[str, torch.Tensor], key: str, weight: torch.Tensor, weights: str
) -> torch.Tensor:
    """Put a matrix into `stored` as a checkpoint has it; what its numbers then are, in bfloat16."""
    tensors, numbers = FORMATS[weights].write(weight)
    for suffix, tensor in tensors.items():
        stored[key.removesuffix(".weight") + suffix] = tensor.contiguous().cpu()
    return numbers.bfloat16()


Written = tuple[Mapping[str, torch.Tensor], torch.Tensor]


class Format(NamedTuple):
    """write: a matrix's tensors, by what their names end with, and its numbers. quantization: what
    a config says of it, by the modules that are not quantized."""

    write: Callable[[torch.Tensor], Written]
    quantization: Callable[[list[str]], dict[str, Any]]


def mxfp4(weight: torch.Tensor) -> Written:
    values, scales = deep_moe.quantize_mxfp4(weight)
    tensors = {".weight": values.view(torch.uint8), ".weight_scale": unpack_ue8m0(scales)}
    return tensors, deep_moe.dequantize_mxfp4(values, scales)


def mxfp4_in_fp8(weight: torch.Tensor) -> Written:
    tensors, numbers = mxfp4(weight)
    scales = tensors[".weight_scale"].view(torch.float8_e8m0fnu)
    return {".weight": tensors[".weight"].view(torch.int8), ".weight_scale_inv": scales}, numbers


def fp8(weight: torch.Tensor) -> Written:
    """With a scale for 128 x 128 values."""
    blocks = weight.float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = power_of_two(blocks.abs().amax((1, 3), keepdim=True) / 448)
    values = (blocks / scale).reshape(weight.shape).to(torch.float8_e4m3fn)
    numbers = values.float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128)) * scale
    scales = scale.squeeze(3).squeeze(1)
    return {".weight": values, ".weight_scale_inv": scales}, numbers.reshape(weight.shape)


def fp8_rows(weight: torch.Tensor) -> Written:
    scale = power_of_two(weight.float().abs().amax(1, keepdim=True) / 448)
    values = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {".weight": values, ".weight_scale": scale}, values.float() * scale


def mxfp8(weight: torch.Tensor) -> Written:
    values, scales = deep_moe.quantize_mxfp8(weight)
    width = weight.shape[1] // 32
    tensors = {".weight": values, ".weight_scale": unpack_ue8m0(scales)[:, :width]}
    return tensors, deep_moe.dequantize_mxfp8(values, scales)


def nvfp4(weight: torch.Tensor) -> Written:
    made = deep_moe.quantize_nvfp4(weight)
    # Equal for gate and up, as vLLM's own method takes gate's for both, and a power of two, so that
    # BF16 holds the numbers. The matrix is then some other random one.
    scale = (weight.float().std() * 4 / 2688).log2().round().exp2()
    tensors = {
        ".weight": made.weight.view(torch.uint8),
        ".weight_scale": made.sf,
        ".weight_scale_2": scale,
    }
    return tensors, deep_moe.dequantize_nvfp4(made.weight, made.sf, scale.reshape(1))


def int4(weight: torch.Tensor) -> Written:
    """In groups of 32."""
    values, scales = deep_moe.quantize_int4(weight)
    tensors = {
        ".weight_packed": values.view(torch.int32),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(weight.shape),
    }
    return tensors, deep_moe.dequantize_int4(values, scales)


def power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Not below `scale`, so that BF16 holds the numbers that it makes."""
    return scale.log2().ceil().exp2()


def config_of_fp8(ignored: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "ignored_layers": ignored,
        "modules_to_not_convert": ignored,
    }


def modelopt(algorithm: str, ignored: list[str], weights: dict[str, Any]) -> dict[str, Any]:
    """As ModelOpt has it for weights alone."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "group_size": weights["group_size"],
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


def compressed(
    style: str, ignored: list[str], weights: dict[str, Any], activations: dict[str, Any] | None
) -> dict[str, Any]:
    """As compressed-tensors has it."""
    weights = weights | {"symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": style,
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


FLOAT4, FLOAT8 = ({"num_bits": bits, "type": "float"} for bits in (4, 8))
WHOLE_TOKENS = FLOAT8 | {"strategy": "token", "symmetric": True, "dynamic": True}
# MXFP4 is that of a checkpoint that has nothing else quantized, or, under FP8's name as DeepSeek-V4
# has it, of one whose other experts would be FP8.
FORMATS = {
    "mxfp4": Format(mxfp4, lambda ignored: {"quant_method": "mxfp4"}),
    "mxfp4_in_fp8": Format(
        mxfp4_in_fp8,
        lambda ignored: config_of_fp8(ignored) | {"routed_experts_quant_method": "mxfp4"},
    ),
    "fp8": Format(fp8, config_of_fp8),
    "fp8_rows": Format(
        fp8_rows,
        lambda ignored: compressed(
            "float-quantized", ignored, FLOAT8 | {"strategy": "channel"}, WHOLE_TOKENS
        ),
    ),
    "mxfp8": Format(mxfp8, lambda ignored: modelopt("MXFP8", ignored, FLOAT8 | {"group_size": 32})),
    "nvfp4": Format(nvfp4, lambda ignored: modelopt("NVFP4", ignored, FLOAT4 | {"group_size": 16})),
    "int4": Format(
        int4,
        lambda ignored: compressed(
            "pack-quantized",
            ignored,
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
            None,
        ),
    ),
}


def model_config(arguments: argparse.Namespace, weights: str | None) -> dict[str, Any]:
    """weights: of the experts, None for bfloat16."""
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
    if weights is not None:
        attention = [
            f"model.layers.{layer}.self_attn.{name}_proj"
            for layer in range(arguments.layers)
            for name in "qkvo"
        ]
        gates = [f"model.layers.{layer}.mlp.gate" for layer in range(arguments.layers)]
        ignored = ["lm_head", *attention, *gates]
        config["quantization_config"] = FORMATS[weights].quantization(ignored)
    return config


def prompts_of(arguments: argparse.Namespace) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    shape = (arguments.prompts, arguments.prompt_tokens)
    return torch.randint(VOCABULARY, shape, generator=generator).tolist()


def serve_own(
    arguments: argparse.Namespace,
    runs: dict[str, dict[str, Any]],
    serve: Callable[[str, dict[str, str]], dict[str, Any]],
    **checks: bool,
) -> int:
    """Run each of those by deep_moe, by its name and variables, and report it beside `runs`.
    checks: of `report`; its result, 1 if that of any is 1."""
    status = 0
    for name, variables in own_runs(arguments).items():
        served = serve(name, variables)
        status |= report(runs | {name: served}, name, arguments.layers, **checks)
    return status


def engine_checks(arguments: argparse.Namespace) -> dict[str, bool]:
    """What `report` has to look at for the options of `add_engine_options`."""
    return {
        "new_weights": arguments.new_weights,
        "moves_experts": arguments.redundant_experts is not None,
    }


def own_runs(arguments: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Those by deep_moe, by name: what is in the environment of each, beside what all have."""
    runs: dict[str, dict[str, str]] = {"deep_moe": {}}
    for variables in arguments.also:
        words = ", ".join(f"{name}={value}" for name, value in variables.items())
        runs[f"deep_moe, {words}"] = variables
    return runs


def run_child(
    name: str, model: Path, environments: list[dict[str, str]], engine: str
) -> dict[str, Any]:
    """Run the calling script once more, with --serve and --out, in a process for each of
    `environments`, whose variables it gets. Their results one behind the other; `paths`: what the
    engine's log says of who runs experts, `moves`: of experts that its load balancer moved."""
    print(f"{name}: {engine} loads and serves the model", flush=True)
    began = time.monotonic()
    stem = re.sub(r"\W+", "-", name)
    outs = [model.with_name(f"{stem}-{i}.json") for i in range(len(environments))]
    logs = [model.with_name(f"{stem}-{i}.log") for i in range(len(environments))]
    children = []
    with child_sessions() as start:
        for out, log, environment in zip(outs, logs, environments, strict=True):
            out.unlink(missing_ok=True)  # of a run before
            command = [sys.executable, *sys.argv, "--serve", str(model), "--out", str(out)]
            variables = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
            with log.open("w") as file:
                children.append(
                    start(command, env=variables, stdout=file, stderr=subprocess.STDOUT)
                )
        statuses = await_results(children, outs)
    # Whose result is there has served, however an engine's threads end with it.
    failed = [i for i, out in enumerate(outs) if not out.exists()]
    if failed:
        # Who failed by itself, rather than who was ended for it.
        first = max(failed, key=lambda i: bool(statuses[i]))
        print(logs[first].read_text())
        raise SystemExit(f"{name}: {engine} ended with exit status {statuses[first]}")
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    result: dict[str, Any] = {"paths": [], "moves": []}
    for out, log in zip(outs, logs, strict=True):
        for key, value in json.loads(out.read_text()).items():
            result.setdefault(key, []).extend(value)
        lines = log.read_text().splitlines()
        result["paths"] += [line for line in lines if "experts run by" in line]
        result["moves"] += [line for line in lines if MOVED.search(line)]
    return result


def await_results(children: list[subprocess.Popen[bytes]], outs: list[Path]) -> list[int | None]:
    """Until all children have ended, or one has failed, or `END_S` after all results are there: an
    engine's processes may not end by themselves, with memory that sleeps for one. Returns the exit
    statuses of those that have ended."""
    deadline = math.inf
    while True:
        # In this order: a child that has ended writes no more.
        statuses = [child.poll() for child in children]
        are_there = [out.exists() for out in outs]
        if all(are_there):
            deadline = min(deadline, time.monotonic() + END_S)
        has_failed = any(
            status and not made for status, made in zip(statuses, are_there, strict=True)
        )
        if has_failed or None not in statuses or time.monotonic() >= deadline:
            return statuses
        time.sleep(0.2)


def with_new_weights(result: dict[str, Any]) -> dict[str, Any]:
    """What a child found after its engine got new weights, as it writes it."""
    return {f"new_{key}": value for key, value in result.items()}


def report(
    runs: dict[str, dict[str, Any]],
    own: str,
    num_layers: int,
    *,
    new_weights: bool = False,
    moves_experts: bool = False,
) -> int:
    """Print how near `runs` are to the one of the name "reference"; 1 if `own`, the one by
    deep_moe, is too far, if it did not run all layers, or if experts were to be moved and were not.
    new_weights: of those, too."""
    status = _report(runs, own, num_layers)
    print("", *runs[own]["moves"], sep="\n")
    if moves_experts and not runs[own]["moves"]:
        print(f"{own}: no experts were moved")
        status = 1
    if new_weights:
        print("\nwith new weights in the running engine:")
        replaced = {
            name: run | {key: run[f"new_{key}"] for key in run if f"new_{key}" in run}
            for name, run in runs.items()
        }
        status |= _report(replaced, own, num_layers)
    return status


def ran_all(run: dict[str, Any], own: str, num_layers: int) -> bool:
    """Print who ran the experts; whether deep_moe ran those of all layers."""
    print("", *run["paths"], sep="\n")
    lines = [line for line in run["paths"] if "experts run by deep_moe" in line]
    layers = {line.split(": experts run")[0].split()[-1] for line in lines}
    if len(layers) != num_layers:
        print(f"{own} ran {len(layers)} of {num_layers} layers")
    return len(layers) == num_layers


def _report(runs: dict[str, dict[str, Any]], own: str, num_layers: int) -> int:
    exact = torch.tensor(runs["reference"]["prompts"])
    spread = (exact - exact.mean()).abs().mean().item()
    print(f"\nlog-probabilities of {exact.numel()} tokens, {spread:.3f} from their mean\n")
    width = max(map(len, runs))
    print(f"{'':{width}}   mean difference to reference   decoding to reading   first tokens")
    distance = {}
    for name, run in runs.items():
        distance[name] = (torch.tensor(run["prompts"]) - exact).abs().mean().item()
        steps = torch.tensor(run["decoded"]) - torch.tensor(run["read"])
        equal = [
            a[0] == b[0] for a, b in zip(run["tokens"], runs["reference"]["tokens"], strict=True)
        ]
        print(
            f"{name:{width}} {distance[name]:30.5f} {steps.abs().mean():21.5f}"
            f" {sum(equal):10} of {len(equal)}"
        )
    if not ran_all(runs[own], own, num_layers):
        return 1
    if not distance[own] <= ALLOWED * spread:
        print(f"{own} is further from the reference than {ALLOWED} of the spread")
        return 1
    return 0
