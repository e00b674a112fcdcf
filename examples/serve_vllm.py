"""vLLM serves a model of random weights, once with its experts in the kernel and once without.

Its experts have DeepSeek-V4-Flash's sizes, and its format, MXFP4, or another (served_model.py). It
is served three times, each in processes of its own: by deep_moe, by vLLM alone, and by vLLM with
the experts' weights as BF16 numbers, which is the reference. All of them get the same prompts, and
say how probable every token of them is. Needs GPUs, vLLM and an installed deep_moe; fetches
nothing.

    python examples/serve_vllm.py
    python examples/serve_vllm.py --weights nvfp4
    python examples/serve_vllm.py --tensor-parallel-size 2    # experts spread over two GPUs
    python examples/serve_vllm.py --data-parallel-size 2      # and each with requests of its own
    python examples/serve_vllm.py --also DEEP_MOE_VLLM_PATH=low_latency    # and in three kernels
    python examples/serve_vllm.py --data-parallel-size 2 --redundant-experts 4  # experts move
    python examples/serve_vllm.py --new-weights     # and replaces them while it runs
    python examples/serve_vllm.py --sleep           # and sleeps in between
    python examples/serve_vllm.py --sleep --alone   # by deep_moe only, compared with itself
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from served_model import (
    FORMATS,
    STEPS_BETWEEN_MOVES,
    add_engine_options,
    add_model_options,
    after,
    engine_checks,
    own_runs,
    prompts_of,
    ran_all,
    run_child,
    serve_own,
    with_new_weights,
    write_models,
)

SLEEP_LEVELS = 1, 2  # what weights were is kept in the host's memory; or is loaded anew
ALLOWED_AFTER_SLEEP = 1e-3  # difference of log-probabilities: a step may be cut otherwise


def main() -> int:
    arguments = parsed()
    if arguments.serve:
        serve(arguments)
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        quantized, reference = Path(folder, arguments.weights), Path(folder, "bf16")
        write_models(quantized, reference, arguments, arguments.weights)

        def by_deep_moe(name: str, variables: dict[str, str]) -> dict[str, Any]:
            served = run(name, quantized, arguments, {"DEEP_MOE_VLLM": "1"} | variables)
            check_slept(name, served)
            return served

        if arguments.alone:
            own = {name: by_deep_moe(name, more) for name, more in own_runs(arguments).items()}
            return int(not all(ran_all(own[name], name, arguments.layers) for name in own))
        runs = {
            "reference": run("reference", reference, arguments, {"DEEP_MOE_VLLM": "0"}),
            "vLLM": run("vLLM", quantized, arguments, {"DEEP_MOE_VLLM": "0"}),
        }
        return serve_own(arguments, runs, by_deep_moe, **engine_checks(arguments))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    add_engine_options(parser)
    parser.add_argument("--weights", choices=FORMATS, default="mxfp4", help="of the experts")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs of one engine")
    parser.add_argument("--data-parallel-size", type=int, default=1, help="engines")
    parser.add_argument("--attention-backend", help="vLLM's option of this name")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument(
        "--sleep",
        action="store_true",
        help="let the engine with deep_moe sleep and wake, at each of vLLM's levels, and ask again",
    )
    parser.add_argument(
        "--alone", action="store_true", help="serve by deep_moe only: one start in place of three"
    )
    arguments = parser.parse_args()
    if arguments.sleep and arguments.data_parallel_size > 1:
        parser.error("--sleep needs --data-parallel-size 1")
    if arguments.prompts % arguments.data_parallel_size:
        parser.error("--prompts must be a multiple of --data-parallel-size")
    return arguments


def run(
    name: str, model: Path, arguments: argparse.Namespace, variables: dict[str, str]
) -> dict[str, Any]:
    """A process for each engine of data parallelism, as vLLM wants them started."""
    common = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_COLOR": "0"} | variables
    size = arguments.data_parallel_size
    if size == 1:
        return run_child(name, model, [common], "vLLM")
    common |= {
        "VLLM_DP_SIZE": str(size),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(free_port()),
    }
    environments = [
        common | {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)}
        for rank in range(size)
    ]
    return run_child(name, model, environments, "vLLM")


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def serve(arguments: argparse.Namespace) -> None:
    """In a child: every prompt's tokens' log-probabilities, and what the model makes of it."""
    from vllm import LLM, SamplingParams, envs

    share = arguments.prompts // arguments.data_parallel_size
    prompts = prompts_of(arguments)[envs.VLLM_DP_RANK * share :][:share]
    length = arguments.prompt_tokens + arguments.new_tokens
    num_gpus = arguments.tensor_parallel_size * arguments.data_parallel_size
    sleeps = arguments.sleep and os.environ["DEEP_MOE_VLLM"] == "1"
    llm = LLM(
        model=str(arguments.serve),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=length + 1,
        max_num_batched_tokens=max(length + 1, 1024),
        max_num_seqs=arguments.prompts,
        gpu_memory_utilization=0.5,
        tensor_parallel_size=arguments.tensor_parallel_size,
        enable_expert_parallel=num_gpus > 1,
        enable_prefix_caching=False,
        enable_sleep_mode=sleeps,
        **load_balancing(arguments.redundant_experts),
        attention_backend=arguments.attention_backend,
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

    def served() -> dict[str, Any]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], options)
        made = [list(output.outputs[0].token_ids) for output in outputs]
        decoded = [
            [
                step[token].logprob
                for step, token in zip(output.outputs[0].logprobs, new, strict=True)
            ]
            for output, new in zip(outputs, made, strict=True)
        ]
        # The same tokens once more, now all of them as a prompt.
        whole = [prompt + new for prompt, new in zip(prompts, made, strict=True)]
        again = llm.generate([{"prompt_token_ids": tokens} for tokens in whole], options)
        return {
            "prompts": [prompt_logprobs(o, p) for o, p in zip(outputs, prompts, strict=True)],
            "tokens": made,
            "decoded": decoded,
            "read": [
                prompt_logprobs(o, t)[-arguments.new_tokens :]
                for o, t in zip(again, whole, strict=True)
            ],
        }

    result = served()
    if sleeps:
        result["slept"] = []
        for level in SLEEP_LEVELS:
            sleep(llm, level, arguments.serve)
            result["slept"].append(difference(result, served()))
    if arguments.new_weights:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(after(arguments.serve))})
        result |= with_new_weights(served())
    arguments.out.write_text(json.dumps(result))


def sleep(llm: Any, level: int, model: Path) -> None:
    """And wake up again, with the weights of `model`."""
    llm.sleep(level=level)
    llm.wake_up(tags=["weights"])
    if level == 2:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
    llm.wake_up(tags=["kv_cache"])


def difference(before: dict[str, Any], after: dict[str, Any]) -> float:
    """The largest of two log-probabilities; infinite if other tokens were made."""
    if before["tokens"] != after["tokens"]:
        return float("inf")
    return max(
        abs(x - y)
        for key in ("prompts", "decoded")
        for a, b in zip(before[key], after[key], strict=True)
        for x, y in zip(a, b, strict=True)
    )


def check_slept(name: str, served: dict[str, Any]) -> None:
    for level, found in zip(SLEEP_LEVELS, served.get("slept", ()), strict=False):
        text = f"{name}: after sleep at level {level}, log-probabilities differ by {found:g}"
        print(text)
        if not found <= ALLOWED_AFTER_SLEEP:
            raise SystemExit(f"{text}, more than {ALLOWED_AFTER_SLEEP}")


def load_balancing(redundant_experts: int | None) -> dict[str, Any]:
    """vLLM's options. Between two steps, so that the tokens that are made have moved experts."""
    if redundant_experts is None:
        return {}
    return {
        "enable_eplb": True,
        "eplb_config": {
            "window_size": STEPS_BETWEEN_MOVES,
            "step_interval": STEPS_BETWEEN_MOVES,
            "use_async": False,
            "num_redundant_experts": redundant_experts,
        },
    }


def prompt_logprobs(output: Any, prompt: list[int]) -> list[float]:
    """Of every token but the first."""
    steps = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    return [step[token].logprob for step, token in steps]


if __name__ == "__main__":
    raise SystemExit(main())
