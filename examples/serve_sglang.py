"""SGLang serves a model of random weights, once with its experts in the kernel and once without.

Its experts have DeepSeek-V4-Flash's sizes, in FP8 with a scale per 128 x 128 values, or with
`--weights mxfp4` in MXFP4, as SGLang's class of this model takes them on Hopper (served_model.py).
It is served three times, each in a process of its own: by deep_moe, by SGLang alone, and by SGLang
with the experts' weights as BF16 numbers, which is the reference. All of them get the same prompts,
and say how probable every token of them is. Needs GPUs, SGLang and an installed deep_moe; fetches
nothing.

    python examples/serve_sglang.py
    python examples/serve_sglang.py --weights mxfp4
    python examples/serve_sglang.py --tensor-parallel-size 2    # experts spread over two GPUs
    python examples/serve_sglang.py --tensor-parallel-size 2 --data-parallel-attention
    python examples/serve_sglang.py --tensor-parallel-size 2 --redundant-experts 4  # experts move
    python examples/serve_sglang.py --new-weights             # and replaces them while it runs
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from served_model import (
    STEPS_BETWEEN_MOVES,
    add_engine_options,
    add_model_options,
    after,
    engine_checks,
    prompts_of,
    run_child,
    serve_own,
    with_new_weights,
    write_models,
)

# Of one step on one rank, for which the buffer is made.
MAX_TOKENS_VARIABLE = "SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK"
MAX_TOKENS = 1024
REFERENCE = "bf16"
FORMATS = {"fp8": "fp8", "mxfp4": "mxfp4_in_fp8"}  # of write_models
SPARE_TOKENS = 32  # of a context, which SGLang keeps some of to itself


def main() -> int:
    arguments = parsed()
    if arguments.serve:
        serve(arguments)
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        quantized, reference = Path(folder, arguments.weights), Path(folder, REFERENCE)
        write_models(quantized, reference, arguments, FORMATS[arguments.weights])
        tokens = {MAX_TOKENS_VARIABLE: str(MAX_TOKENS)}
        off, on = ({"DEEP_MOE_SGLANG": switch} | tokens for switch in "01")
        runs = {"reference": run_child("reference", reference, [off], "SGLang")}
        if not arguments.without_sglang_alone:
            runs["SGLang"] = run_child("SGLang", quantized, [off], "SGLang")

        def by_deep_moe(name: str, variables: dict[str, str]) -> dict[str, Any]:
            return run_child(name, quantized, [on | variables], "SGLang")

        return serve_own(arguments, runs, by_deep_moe, **engine_checks(arguments))


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    add_engine_options(parser)
    parser.add_argument("--weights", choices=FORMATS, default="fp8", help="of the experts")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs")
    parser.add_argument(
        "--data-parallel-attention", action="store_true", help="each GPU has requests of its own"
    )
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument(
        "--without-sglang-alone",
        action="store_true",
        help="do not serve by SGLang's own experts",
    )
    for part in ("attention", "sampling"):
        parser.add_argument(f"--{part}-backend", help="SGLang's option; default: what it chooses")
    arguments = parser.parse_args(words)
    if arguments.redundant_experts is not None and arguments.tensor_parallel_size == 1:
        parser.error("--redundant-experts needs --tensor-parallel-size: one rank has none to move")
    return arguments


def engine_arguments(arguments: argparse.Namespace, *, is_kernel: bool) -> dict[str, Any]:
    """Of `sglang.Engine`. is_kernel: whole layers of experts go to one kernel, which is deep_moe's
    where the adapter is on."""
    num_gpus = arguments.tensor_parallel_size
    given = {
        "model_path": str(arguments.serve),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "context_length": arguments.prompt_tokens + arguments.new_tokens + SPARE_TOKENS,
        "max_running_requests": arguments.prompts,
        "chunked_prefill_size": MAX_TOKENS,
        "mem_fraction_static": 0.5,
        "tp_size": num_gpus,
        "disable_cuda_graph": arguments.eager,
        "disable_radix_cache": True,
        "log_level": "info",
        "attention_backend": arguments.attention_backend,
        "sampling_backend": arguments.sampling_backend,
    }
    if arguments.data_parallel_attention:
        given |= {"dp_size": num_gpus, "enable_dp_attention": True}
    if is_kernel:
        given |= {
            "ep_size": num_gpus,
            "moe_a2a_backend": "megamoe",
            "moe_runner_backend": "deep_gemm",
        }
        if arguments.redundant_experts is not None:
            given |= {
                "enable_eplb": True,
                "ep_num_redundant_experts": arguments.redundant_experts,
                "eplb_rebalance_num_iterations": STEPS_BETWEEN_MOVES,
            }
    elif arguments.serve.name == "mxfp4":
        # What SGLang would choose by itself for such a checkpoint reads experts in FP8.
        given["moe_runner_backend"] = "marlin"
    return given


def serve(arguments: argparse.Namespace) -> None:
    """In a child: every prompt's tokens' log-probabilities, and what the model makes of it."""
    import os

    import sglang

    prompts = prompts_of(arguments)
    is_kernel = os.environ["DEEP_MOE_SGLANG"] == "1"
    engine = sglang.Engine(**engine_arguments(arguments, is_kernel=is_kernel))

    def generate(inputs: list[list[int]], num_new: int) -> list[dict[str, Any]]:
        options = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
        return engine.generate(
            input_ids=inputs, sampling_params=options, return_logprob=True, logprob_start_len=0
        )

    def served() -> dict[str, Any]:
        outputs = generate(prompts, arguments.new_tokens)
        made = [list(output["output_ids"]) for output in outputs]
        # The same tokens once more, now all of them as a prompt.
        again = generate([prompt + new for prompt, new in zip(prompts, made, strict=True)], 1)
        return {
            "prompts": [logprobs(output, "input")[1:] for output in outputs],
            "tokens": made,
            "decoded": [logprobs(output, "output") for output in outputs],
            "read": [logprobs(output, "input")[-arguments.new_tokens :] for output in again],
        }

    result = served()
    if arguments.new_weights:
        is_replaced, message, *_ = engine.update_weights_from_disk(str(after(arguments.serve)))
        if not is_replaced:
            raise SystemExit(message)
        result |= with_new_weights(served())
    arguments.out.write_text(json.dumps(result))
    engine.shutdown()


def logprobs(output: dict[str, Any], which: str) -> list[float]:
    """Of the tokens that were given, or made. There is none of the first one of a prompt."""
    return [entry[0] for entry in output["meta_info"][f"{which}_token_logprobs"]]


if __name__ == "__main__":
    raise SystemExit(main())
