"""Calls of a layer on all ranks: emulated in this process, or with a process for each. What a rank
brings to them is `Tokens`, what it gets is a `RankOutput` for each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from deep_moe import jit
from deep_moe.activations import DEFAULT_ACTIVATION, Activation
from deep_moe.biases.per_expert import MegaMoEBiases
from deep_moe.emulator.machine import Schedule
from deep_moe.formats.block_scaled import dequantize_e4m3_ue8m0, quantize_e4m3_ue8m0
from deep_moe.formats.float_scaled import dequantize_e4m3_float, quantize_e4m3_float
from deep_moe.formats.nvfp4 import dequantize_nvfp4_tokens, quantize_nvfp4_tokens
from deep_moe.fused.buffer import SymmBuffer, get_symm_buffer_for_mega_moe
from deep_moe.fused.call_tensors import with_statistics
from deep_moe.fused.emulated_call import finish_emulated, prepare_launch
from deep_moe.fused.emulated_ranks import EmulatedRanks
from deep_moe.fused.input_preparation import row_fields
from deep_moe.fused.mega_moe import mega_moe, with_numerics
from deep_moe.fused.options import CallArguments, CallOptions, given_options
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.prepare_inputs import PrepareInputsConfig
from deep_moe.jit.kernel_args import PrepareInputsArgs
from deep_moe.jit.launch import MemoryRegion, RankLaunch, run_emulated
from deep_moe.targets import EMULATED, target_for
from deep_moe.weights.layers import MegaMoEWeights
from deep_moe.weights.transform import transform_weights_for_mega_moe

from .rank_processes import results_of_ranks
from .synthetic import LayerParts, Tokens
from .trace import RankTrace, record

if TYPE_CHECKING:
    from deep_moe.activations import ActivationName


@dataclass(frozen=True)
class RankOutput:
    """What one rank's call gave."""

    y: torch.Tensor  # bfloat16 [tokens, hidden]
    stats: torch.Tensor  # int32 [local experts]: tokens that each of them received


Calls = Sequence[Sequence[Tokens]]  # of every call, each rank's tokens


def run_emulated_ranks(
    shape: MoEShape, layer: LayerParts, calls: Calls, **options: Any
) -> list[list[RankOutput]]:
    """All ranks in this process, one call after the other in the same buffers. What each rank got,
    call by call. options: keyword arguments of `EmulatedRanks.call`."""
    with _emulated_ranks(shape) as ranks:
        weights = transformed_weights(shape, layer, options.get("arch"))
        options["biases"] = rank_biases(layer, shape, options.get("arch"))
        outputs = []
        for tokens in calls:
            for buffer, own in zip(ranks.buffers, tokens, strict=True):
                fill_inputs(buffer, own)
            outputs.append(_call_emulated_ranks(ranks, weights, tokens, options))
        return outputs


def run_emulated_in_a_row(
    shape: MoEShape,
    layer: LayerParts,
    calls: Calls,
    *,
    activation: ActivationName | Activation = DEFAULT_ACTIVATION,
    activation_clamp: float | None = None,
    fast_math: bool = True,
    schedule: Schedule = "random",
    **options: Any,
) -> list[list[RankOutput]]:
    """The same as a model does it: `prepare_inputs` and a call, again and again, on each rank with
    no look at the others. options: of `CallOptions`, the same for all calls.

    The inputs are the tokens' values in BF16, see `model_inputs`.
    """
    with _emulated_ranks(shape) as ranks:
        weights = transformed_weights(shape, layer, options.get("arch"))
        given = given_options("run_emulated_in_a_row", cast(CallOptions, options))
        each = [with_numerics(given, activation, activation_clamp, fast_math)] * len(calls)
        biases = rank_biases(layer, shape, given.get("arch"))
        return call_in_a_row(ranks, weights, calls, each, schedule=schedule, biases=biases)


def call_in_a_row(
    ranks: EmulatedRanks,
    weights: Sequence[MegaMoEWeights],
    calls: Calls,
    options: Sequence[CallArguments],
    *,
    schedule: Schedule = "random",
    biases: Sequence[MegaMoEBiases] | None = None,
) -> list[list[RankOutput]]:
    """`run_emulated_in_a_row` on ranks that are there, with options for each call. The first ones'
    schedule seed holds for all."""
    launches: list[RankLaunch] = []
    xs, outputs = [], []  # kept until all is over: a launch has only addresses
    for tokens, of_call in zip(calls, options, strict=True):
        outputs.append(_first_outputs(ranks.shape, tokens, of_call))
        for buffer, own, (l1, l2), output in zip(
            ranks.buffers, tokens, weights, outputs[-1], strict=True
        ):
            if own.num_tokens:
                xs.append(model_inputs(own)[0])
                arch = of_call.get("arch")
                launches.append(_preparation(xs[-1], own, buffer, arch or EMULATED.name))
            own_biases = None if biases is None else biases[buffer.rank]
            launches.append(
                prepare_launch(
                    *(output.y, l1, l2, buffer, with_statistics(output.stats)),
                    *(of_call, own_biases),
                )
            )
    seed = options[0].get("schedule_seed") or 0
    run_emulated(launches, seed=seed, schedule=schedule, checks=True, clock="virtual")
    for buffer in ranks.buffers:
        finish_emulated(buffer, checked=True)
    return outputs


def model_inputs(tokens: Tokens) -> tuple[torch.Tensor, Tokens]:
    """The values of tokens as a model has them, bfloat16 [tokens, hidden], and what
    `prepare_inputs` makes of them: the same numbers where BF16 holds them, but they may have other
    codes and scales. BF16 stays as it is."""
    if tokens.x.dtype == torch.bfloat16:
        return tokens.x, tokens
    if tokens.x.dtype == torch.uint8:
        x = dequantize_nvfp4_tokens(tokens.x, tokens.x_sf).bfloat16()
        return x, Tokens(*quantize_nvfp4_tokens(x), tokens.topk_idx, tokens.topk_weights)
    if tokens.x_sf.dtype == torch.float32:
        x = dequantize_e4m3_float(tokens.x, tokens.x_sf).bfloat16()
        quantized = quantize_e4m3_float(x, whole_tokens=tokens.x_sf.shape[1] == 1)
        return x, Tokens(*quantized, tokens.topk_idx, tokens.topk_weights)
    x = dequantize_e4m3_ue8m0(tokens.x, tokens.x_sf).bfloat16()
    return x, Tokens(*quantize_e4m3_ue8m0(x), tokens.topk_idx, tokens.topk_weights)


def _preparation(x: torch.Tensor, tokens: Tokens, buffer: SymmBuffer, arch: str) -> RankLaunch:
    """The launch of `prepare_inputs` for one rank, which that function runs by itself."""
    config = PrepareInputsConfig(
        quantizes=buffer.x.dtype != torch.bfloat16,
        has_float_scales=buffer.x_sf.dtype == torch.float32,
        **row_fields(buffer.x, buffer.x_sf),
        arch=arch,
    )
    num_chunks = config.num_chunks(x.numel())
    args = PrepareInputsArgs(
        x=x.data_ptr(),
        topk_idx=tokens.topk_idx.data_ptr(),
        topk_weights=tokens.topk_weights.data_ptr(),
        input_x=buffer.x.data_ptr(),
        input_x_sf=buffer.x_sf.data_ptr(),
        input_topk_idx=buffer.topk_idx.data_ptr(),
        input_topk_weights=buffer.topk_weights.data_ptr(),
        num_chunks=num_chunks,
        num_slots=tokens.topk_idx.numel(),
        num_topk=tokens.topk_idx.shape[1],
    )
    # The call that follows names the memory that is written.
    read = {"x": x, "topk_idx": tokens.topk_idx, "topk_weights": tokens.topk_weights}
    memory = tuple(
        MemoryRegion.of_tensor(name, tensor, is_writable=False) for name, tensor in read.items()
    )
    kernel = jit.build(config, for_emulator=True)
    num_ctas = config.num_ctas(num_chunks)
    return RankLaunch(buffer.rank, kernel, num_ctas, config.num_threads, 0, args, memory)


def trace_emulated_ranks(
    shape: MoEShape, layer: LayerParts, tokens: Sequence[Tokens], **call: Any
) -> list[RankTrace]:
    """One call of `run_emulated_ranks`, recorded."""
    with _emulated_ranks(shape) as ranks, record(*ranks.buffers) as recorders:
        for buffer, own in zip(ranks.buffers, tokens, strict=True):
            fill_inputs(buffer, own)
        call["biases"] = rank_biases(layer, shape, call.get("arch"))
        weights = transformed_weights(shape, layer, call.get("arch"))
        _call_emulated_ranks(ranks, weights, tokens, call)
        return [recorder.collect() for recorder in recorders]


def run_processes(
    shape: MoEShape, layer: LayerParts, calls: Calls, *, device: str, **options: Any
) -> list[list[RankOutput]]:
    """What `run_emulated_ranks` does, with one process per rank, as in a deployment: rank r on GPU
    r ("cuda") or emulated ("cpu").

    options: keyword arguments of `fp8_fp4_mega_moe`. If one rank fails, the others are ended, and
    the error holds its traceback.
    """
    of_ranks = results_of_ranks(
        _on_rank, shape.num_ranks, device, _run_rank, shape, layer, list(map(list, calls)), options
    )
    return by_call(of_ranks)


def by_call(of_ranks: Sequence[Sequence[RankOutput]]) -> list[list[RankOutput]]:
    """Of each call what each rank got, from what each rank got call by call."""
    return [list(of_call) for of_call in zip(*of_ranks, strict=True)]


def trace_processes(
    shape: MoEShape, layer: LayerParts, tokens: Sequence[Tokens], *, num_warmup: int, **call: Any
) -> list[RankTrace]:
    """One call of `run_processes` on GPUs, recorded after `num_warmup` more of the same."""
    trace_rank = partial(_trace_rank, num_warmup=num_warmup)
    return results_of_ranks(
        _on_rank, shape.num_ranks, "cuda", trace_rank, shape, layer, [list(tokens)], call
    )


def fill_inputs(buffer: SymmBuffer, tokens: Tokens) -> None:
    """Copy a rank's tokens into its buffer."""
    n = tokens.num_tokens
    buffer.x[:n].copy_(tokens.x)
    buffer.x_sf[:n].copy_(tokens.x_sf)
    buffer.topk_idx[:n].copy_(tokens.topk_idx)
    buffer.topk_weights[:n].copy_(tokens.topk_weights)


def _emulated_ranks(shape: MoEShape) -> EmulatedRanks:
    return EmulatedRanks(shape.num_ranks, **shape.buffer_arguments)


def bias_arguments(biases: MegaMoEBiases | None) -> dict[str, Any]:
    """Of a call, by name."""
    return {} if biases is None else {"l1_bias": biases.l1, "l2_bias": biases.l2}


def rank_operands(
    shape: MoEShape, layer: LayerParts, rank: int, device: torch.device, arch: str | None
) -> tuple[MegaMoEWeights, dict[str, Any]]:
    """A rank's transformed weights, and its biases by the names of a call's arguments."""
    l1, l2 = (
        tuple(tensor.to(device) for tensor in own) for own in layer.of_rank(rank, shape.num_ranks)
    )
    weights = transform_weights_for_mega_moe(
        l1, l2, arch=arch, weights=shape.weights, token_format=shape.token_format
    )
    biases = layer.biases_of_rank(rank, shape, target_for(arch, device).name)
    return weights, {name: bias.to(device) for name, bias in bias_arguments(biases).items()}


def rank_biases(layer: LayerParts, shape: MoEShape, arch: str | None) -> list[MegaMoEBiases] | None:
    """Each rank's, laid out for `arch` and the shape's weights, if the layer has some."""
    found = [layer.biases_of_rank(rank, shape, arch) for rank in range(shape.num_ranks)]
    biases = [own for own in found if own is not None]
    return biases or None


def transformed_weights(
    shape: MoEShape, layer: LayerParts, arch: str | None
) -> list[MegaMoEWeights]:
    """Each rank's."""
    return [
        transform_weights_for_mega_moe(
            *layer.of_rank(rank, shape.num_ranks),
            arch=arch,
            weights=shape.weights,
            token_format=shape.token_format,
        )
        for rank in range(shape.num_ranks)
    ]


def _call_emulated_ranks(
    ranks: EmulatedRanks,
    weights: Sequence[MegaMoEWeights],
    tokens: Sequence[Tokens],
    call: Mapping[str, Any],
) -> list[RankOutput]:
    outputs = _first_outputs(ranks.shape, tokens, call)
    ranks.call([o.y for o in outputs], weights, [o.stats for o in outputs], **call)
    return outputs


def _on_rank(
    device: torch.device,
    rank_function: Callable[..., Any],
    shape: MoEShape,
    layer: LayerParts,
    calls: Calls,
    call: Mapping[str, Any],
) -> Any:
    """What `rank_function` returns in this process."""
    rank = dist.get_rank()
    buffer = get_symm_buffer_for_mega_moe(
        dist.group.WORLD,
        **shape.buffer_arguments,
    )
    weights, biases = rank_operands(shape, layer, rank, device, call.get("arch"))
    value = rank_function(buffer, weights, [tokens[rank] for tokens in calls], {**call, **biases})
    dist.barrier()  # no rank takes its memory away while another still reads it
    return value


def _run_rank(
    buffer: SymmBuffer, weights: MegaMoEWeights, calls: Sequence[Tokens], call: Mapping[str, Any]
) -> list[RankOutput]:
    outputs = []
    for tokens in calls:
        fill_inputs(buffer, tokens)
        output = _first_output(buffer.shape, tokens, buffer.device, call)
        mega_moe(output.y, weights, buffer, output.stats, **call)
        buffer.memory.synchronize()
        buffer.raise_if_failed()
        outputs.append(RankOutput(output.y.cpu(), output.stats.cpu()))
    return outputs


def _trace_rank(
    buffer: SymmBuffer,
    weights: MegaMoEWeights,
    calls: Sequence[Tokens],
    call: Mapping[str, Any],
    *,
    num_warmup: int,
) -> RankTrace:
    (tokens,) = calls
    fill_inputs(buffer, tokens)
    output = _first_output(buffer.shape, tokens, buffer.device, call)
    together = torch.zeros(1, device=buffer.device)
    with record(buffer) as (recorder,):
        for _ in range(num_warmup + 1):
            dist.all_reduce(together)  # so that ranks begin together
            mega_moe(output.y, weights, buffer, output.stats, **call)
        return recorder.collect()


def initial_y(num_tokens: int, hidden: int) -> torch.Tensor:
    """What a call that accumulates finds in y: integers of -8 to 8, other ones in every row."""
    places = 7 * torch.arange(num_tokens).unsqueeze(1) + 3 * torch.arange(hidden)
    return (places % 17 - 8).to(torch.bfloat16)


def _first_outputs(
    shape: MoEShape, tokens: Sequence[Tokens], options: Mapping[str, Any]
) -> list[RankOutput]:
    """Of every rank, in this process."""
    return [_first_output(shape, own, torch.device("cpu"), options) for own in tokens]


def _first_output(
    shape: MoEShape, tokens: Tokens, device: torch.device, options: Mapping[str, Any]
) -> RankOutput:
    """Before a call with these options. y is full of NaN, so that a row left out is noticed, unless
    the call adds to it."""
    size = (tokens.num_tokens, shape.hidden)
    if options.get("accumulate"):
        y = initial_y(*size).to(device)
    else:
        y = torch.full(size, torch.nan, dtype=torch.bfloat16, device=device)
    stats = torch.zeros(shape.num_experts_per_rank, dtype=torch.int32, device=device)
    return RankOutput(y, stats)
