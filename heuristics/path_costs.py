"""What a layer costs on each path: bytes of buffers, bytes over links, and an estimate of the time.

Times are estimates, not measurements. They are made of rates that were measured on H200s
(`H200`, and `TWO_GPU_STEPS` of the low-latency path), of what a network card carries
(`Network`), and of assumptions, which are named as such. docs/paths.md shows what they come to, and
a test holds the estimates of the fused call against the tables of benchmarks/results.

Routing is uniform: every set of experts of a token is equally likely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import comb, hypot
from typing import NamedTuple

from deep_moe.formats.weight_formats import BF16_TOKENS, SCALE_GROUP

from .low_latency import CONTROL_BYTES, LowLatencyShape, low_latency_buffer_layout
from .segments import ceil_div
from .shape import MoEShape
from .symm_buffer_layout import symm_buffer_layout
from .throughput import ThroughputShape, throughput_buffer_layout
from .two_level import TwoLevelShape

BF16_BYTES = 2


class FormatRates(NamedTuple):
    """Of weights of one format. bits_per_weight: read, scales included. flops: of the layer's
    products, beside which the weights are read."""

    bits_per_weight: float
    flops: float


@dataclass(frozen=True)
class GpuRates:
    """What one GPU does.

    weight_bytes_per_s: reads of HBM. copy_bytes_per_s: reads and writes together. link_bytes_per_s:
    copies to or from peers, each way. formats: by the weights' format. call_us: of a call that does
    next to nothing. step_us: of one of PyTorch's small kernels in a row of them.
    """

    name: str
    weight_bytes_per_s: float
    copy_bytes_per_s: float
    link_bytes_per_s: float
    formats: Mapping[str, FormatRates] = field(hash=False)
    call_us: float
    step_us: float

    def of_format(self, weights: str) -> FormatRates:
        """ValueError for weights with which nothing was measured."""
        if weights not in self.formats:
            raise ValueError(
                f"weights must be {' or '.join(self.formats)}, with which {self.name}s were "
                f"measured; got {weights!r}"
            )
        return self.formats[weights]


# HBM and links: measured 2026-11-20. Products and call_us: fitted to the tables of 2026-11-22
# (mxfp4) and to the log of 2026-11-23 (fp8, bf16). step_us: assumed.
H200 = GpuRates(
    "NVIDIA H200",
    weight_bytes_per_s=4.44e12,
    copy_bytes_per_s=4.22e12,
    link_bytes_per_s=394e9,
    formats={
        "mxfp4": FormatRates(4.25, 1.2e15),
        "fp8": FormatRates(8.0, 0.95e15),
        "bf16": FormatRates(16.0, 0.62e15),
    },
    call_us=37.0,
    step_us=2.5,
)


@dataclass(frozen=True)
class Network:
    """What one GPU has of the network between domains, each way.

    bytes_per_s: of its card. share: of that, in an all-to-all; 0.9 is what DeepEP's second version
    publishes of two domains, and is assumed of NCCL. start_us: of an all-to-all that moves next to
    nothing; assumed.
    """

    bytes_per_s: float = 50e9  # 400 Gb/s
    share: float = 0.9
    start_us: float = 30.0

    def us(self, num_bytes: float) -> float:
        """Of an all-to-all in which this rank sends and receives so many bytes."""
        return self.start_us + 1e6 * num_bytes / (self.share * self.bytes_per_s)


@dataclass(frozen=True)
class TwoGpuStep:
    """A step of the low-latency path as it was measured on two H200s: microseconds by tokens per
    rank."""

    us: Mapping[int, float]

    @property
    def few(self) -> int:
        return min(self.us)

    @property
    def many(self) -> int:
        return max(self.us)


# Hidden 7168, top-8 of 256 experts, fp8_128 there and BF16 back (benchmarks/LOG.md, 2026-11-23).
TWO_GPU_SHAPE = LowLatencyShape(2, 256, 8, 7168, 128, "fp8_128")
TWO_GPU_STEPS = {
    "dispatch": TwoGpuStep({1: 13.4, 8: 14.2, 32: 14.4, 128: 18.0}),
    "combine": TwoGpuStep({1: 12.2, 8: 12.6, 32: 16.8, 128: 35.6}),
}


# Layers of other sizes, to which nothing was fitted, with fp8_32 there: sizes, tokens per rank,
# dispatch and combine in us (benchmarks/LOG.md, 2026-11-23, benchmarks.split_path).
TWO_GPU_OTHERS = (
    (LowLatencyShape(2, 128, 6, 4096, 512, "fp8_32"), 1, 11.0, 10.6),
    (LowLatencyShape(2, 128, 6, 4096, 512, "fp8_32"), 128, 14.0, 21.2),
    (LowLatencyShape(2, 192, 6, 7168, 512, "fp8_32"), 128, 16.9, 28.3),
    (LowLatencyShape(2, 128, 6, 4096, 512, "fp8_32"), 512, 29.1, 56.6),
)


@dataclass(frozen=True)
class CostStep:
    """One part of a path's time, and how it was estimated."""

    name: str
    us: float
    how: str


@dataclass(frozen=True)
class PathCost:
    """What a call of a path costs each rank. link_bytes: over NVLink, in the busier direction.
    network_bytes: to other domains, each way. us: of all steps; less than their sum where they
    overlap."""

    path: str
    num_tokens: int
    buffer_bytes: Mapping[str, int]
    link_bytes: float
    network_bytes: float
    us: float
    steps: tuple[CostStep, ...]


def parts_of_a_token(
    num_parts: int,
    num_experts: int,
    num_topk: int,
    *,
    num_groups: int = 0,
    num_topk_groups: int = 0,
) -> float:
    """Among how many of `num_parts` equal parts of the experts a token's different experts lie, on
    the average. With groups of experts, of which each token takes num_topk_groups, and then
    something of each of them; parts are whole groups then.

    >>> round(parts_of_a_token(2, 256, 8), 3), round(parts_of_a_token(8, 256, 8), 2)
    (1.993, 5.29)
    >>> round(parts_of_a_token(8, 256, 8, num_groups=8, num_topk_groups=4), 2)
    4.0
    """
    number, chosen = (num_groups, num_topk_groups) if num_groups else (num_experts, num_topk)
    if number % num_parts:
        what = "num_groups" if num_groups else "num_experts"
        raise ValueError(f"{what} must be a multiple of num_parts ({num_parts}); got {number}")
    others = number - number // num_parts
    return num_parts * (1 - comb(others, chosen) / comb(number, chosen))


def active_experts(shape: MoEShape, num_slots: float) -> float:
    """Experts of a rank that get a token, where `num_slots` slots fall on them at random.

    >>> round(active_experts(MoEShape(2, 192, 6, 7168, 3072, 8), 8 * 6), 1)
    37.9
    """
    number = shape.num_experts_per_rank
    return number * (1 - (1 - 1 / number) ** num_slots)


def expert_us(shape: MoEShape, num_slots: float, rates: GpuRates = H200) -> float:
    """Of a rank's experts on so many slots of tokens: weights and products, which overlap in part,
    so that the root of the sum of squares fits what was measured better than the larger one."""
    read = active_experts(shape, num_slots) + shape.num_shared_experts
    of_format = rates.of_format(shape.weights)
    num_weights = 3 * shape.hidden * shape.intermediate_hidden
    num_bytes = read * num_weights * of_format.bits_per_weight / 8
    weights_us = 1e6 * num_bytes / rates.weight_bytes_per_s
    products_us = 1e6 * 2 * num_slots * num_weights / of_format.flops
    return hypot(weights_us, products_us)


def fused_link_bytes(shape: MoEShape, num_slots: float) -> float:
    """Over a rank's links in one direction, where so many slots of its tokens are used: each that
    names an expert of another rank sends a token there and a BF16 row back, and others' come."""
    values = shape.token_format.value_bytes
    scales = 0 if shape.token_format == BF16_TOKENS else 1 / SCALE_GROUP[1]
    away = num_slots * (shape.num_ranks - 1) / shape.num_ranks
    return away * shape.hidden * (values + scales + BF16_BYTES)


def fused_us(shape: MoEShape, num_slots: float, num_tokens: float, rates: GpuRates = H200) -> float:
    """A call of the fused kernel in which so many slots of a rank's tokens are used. num_tokens:
    of the rank, which go to the shared experts."""
    slots = num_slots + num_tokens * shape.num_shared_experts
    links_us = 1e6 * fused_link_bytes(shape, num_slots) / rates.link_bytes_per_s
    return rates.call_us + max(expert_us(shape, slots, rates), links_us)


def fused_cost(shape: MoEShape, num_tokens: int, rates: GpuRates = H200) -> PathCost:
    """One NVLink domain, one kernel.

    >>> shape = MoEShape(2, 192, 6, 7168, 3072, 8192)
    >>> [round(fused_cost(shape, tokens).us) for tokens in (8, 128, 8192)]  # seen: 342, 803, 5863
    [337, 800, 5502]
    """
    slots = num_tokens * shape.num_topk
    us = fused_us(shape, slots, num_tokens, rates)
    products = rates.of_format(shape.weights).flops / 1e15
    how = (
        f"{rates.call_us:g} us and the larger of experts (weights at "
        f"{rates.weight_bytes_per_s / 1e12:g} TB/s and products at {products:g} PFLOPS, root of "
        f"the sum of squares) and links ({rates.link_bytes_per_s / 1e9:g} GB/s); fitted to "
        f"{rates.name}s"
    )
    return PathCost(
        "fused",
        num_tokens,
        {"symmetric buffer": symm_buffer_layout(shape).num_bytes},
        fused_link_bytes(shape, slots),
        0.0,
        us,
        (CostStep("call", us, how),),
    )


def low_latency_link_bytes(shape: LowLatencyShape, num_tokens: int) -> dict[str, float]:
    """Each step's, over a rank's links in one direction: tokens once to every other rank of their
    experts, or, where that is their placement, once to each expert there; and a row back from every
    slot there.

    >>> shape = LowLatencyShape(8, 256, 8, 7168, 128, "fp8_128")
    >>> {step: round(size / 1e6, 2) for step, size in low_latency_link_bytes(shape, 128).items()}
    {'dispatch': 4.38, 'combine': 12.85}
    >>> shape = LowLatencyShape(8, 256, 8, 7168, 128, "fp8_128", placement="experts")
    >>> round(low_latency_link_bytes(shape, 128)["dispatch"] / 1e6, 2)
    6.64
    """
    times = float(shape.num_topk)  # that a token is sent
    if not shape.stages_by_expert:
        times = parts_of_a_token(shape.num_ranks, shape.num_experts, shape.num_topk)
    to_others = (shape.num_ranks - 1) / shape.num_ranks
    token_bytes = shape.row_bytes + 4 * shape.num_scale_words
    token_bytes += CONTROL_BYTES if shape.stages_by_expert else 0
    return {
        "dispatch": num_tokens * times * to_others * token_bytes,
        "combine": num_tokens * shape.num_topk * to_others * BF16_BYTES * shape.hidden,
    }


def low_latency_us(step: str, shape: LowLatencyShape, num_tokens: int) -> float:
    """A dispatch or combine: what it took at one token on two GPUs, and its further bytes at the
    rate that 128 tokens had there. More ranks than two are taken to change only the bytes.

    >>> shape = LowLatencyShape(8, 256, 8, 7168, 128, "fp8_128")
    >>> [round(low_latency_us(step, shape, 128), 1) for step in ("dispatch", "combine")]
    [34.9, 53.3]
    """
    seen = TWO_GPU_STEPS[step]
    start_bytes, end_bytes = (
        low_latency_link_bytes(TWO_GPU_SHAPE, tokens)[step] for tokens in (seen.few, seen.many)
    )
    us_per_byte = (seen.us[seen.many] - seen.us[seen.few]) / (end_bytes - start_bytes)
    num_bytes = low_latency_link_bytes(shape, num_tokens)[step]
    return seen.us[seen.few] + max(0.0, num_bytes - start_bytes) * us_per_byte


def low_latency_rate(step: str) -> float:
    """Bytes per second of a step's bytes beyond those of one token, on two GPUs."""
    seen = TWO_GPU_STEPS[step]
    sizes = [low_latency_link_bytes(TWO_GPU_SHAPE, n)[step] for n in (seen.few, seen.many)]
    return (sizes[1] - sizes[0]) / (1e-6 * (seen.us[seen.many] - seen.us[seen.few]))


def low_latency_cost(
    shape: MoEShape, num_tokens: int, rates: GpuRates = H200, *, format: str = "fp8_128"
) -> PathCost:
    """The split path for small batches: dispatch, experts that are already there, combine."""
    sizes = (shape.num_ranks, shape.num_experts, shape.num_topk, shape.hidden)
    layer = LowLatencyShape(*sizes, shape.num_max_tokens_per_rank, format)
    num_bytes = low_latency_link_bytes(layer, num_tokens)
    steps = [
        CostStep(
            step,
            low_latency_us(step, layer, num_tokens),
            f"{TWO_GPU_STEPS[step].us[1]:g} us of one token and further bytes at "
            f"{low_latency_rate(step) / 1e9:.0f} GB/s, both seen on two {rates.name}s",
        )
        for step in ("dispatch", "combine")
    ]
    experts = CostStep(
        "experts",
        rates.call_us + expert_us(shape, num_tokens * shape.num_topk, rates),
        "as in the fused call, without links",
    )
    return PathCost(
        "low latency",
        num_tokens,
        {"symmetric buffer": low_latency_buffer_layout(layer).num_bytes},
        sum(num_bytes.values()),
        0.0,
        sum(step.us for step in steps) + experts.us,
        (steps[0], experts, steps[1]),
    )


# Rows that a rank of the throughput path has room for, in those of uniform routing.
ROOM_FOR_ROWS = 2


def throughput_cost(
    shape: MoEShape, num_tokens: int, rates: GpuRates = H200, *, format: str = "fp8_128"
) -> PathCost:
    """The split path for many tokens: every slot's token there, experts, every slot's row back.
    Nothing of it has been measured: its steps are taken to start and to move bytes as the
    low-latency path's do."""
    low = LowLatencyShape(
        shape.num_ranks, shape.num_experts, shape.num_topk, shape.hidden, 1, format
    )
    to_others = (shape.num_ranks - 1) / shape.num_ranks
    slots = num_tokens * shape.num_topk
    num_bytes = {
        "dispatch": slots * to_others * (low.row_bytes + 4 * low.num_scale_words),
        "combine": slots * to_others * BF16_BYTES * shape.hidden,
    }
    steps = [
        CostStep(
            step,
            TWO_GPU_STEPS[step].us[1] + 1e6 * num_bytes[step] / low_latency_rate(step),
            f"{TWO_GPU_STEPS[step].us[1]:g} us and bytes at {low_latency_rate(step) / 1e9:.0f} "
            "GB/s, assumed to be as the low-latency path's",
        )
        for step in ("dispatch", "combine")
    ]
    experts_us = rates.call_us + expert_us(shape, slots, rates)
    experts = CostStep("experts", experts_us, "as in the fused call, without links")
    rows = shape.num_max_tokens_per_rank * shape.num_topk * ROOM_FOR_ROWS
    sizes = (shape.num_ranks, shape.num_experts, shape.num_topk, shape.hidden)
    layer = ThroughputShape(*sizes, shape.num_max_tokens_per_rank, rows)
    return PathCost(
        "throughput",
        num_tokens,
        {"symmetric buffer": throughput_buffer_layout(layer).num_bytes},
        sum(num_bytes.values()),
        0.0,
        sum(step.us for step in steps) + experts_us,
        (steps[0], experts, steps[1]),
    )


@dataclass(frozen=True)
class Transport:
    """What goes to other domains, and comes back, in a call of one rank: rows in each chunk."""

    rows_per_chunk: float
    bytes_there: float
    bytes_back: float


def two_level_transport(
    shape: TwoLevelShape, num_tokens: float, *, num_groups: int = 0, num_topk_groups: int = 0
) -> Transport:
    """Rows that travel of `num_tokens` tokens of each rank. Groups: as in `parts_of_a_token`."""
    if not shape.exact_sizes:
        rows = float(shape.num_chunk_sent)
    else:
        domains = parts_of_a_token(
            shape.num_domains,
            shape.num_experts,
            shape.num_topk,
            num_groups=num_groups,
            num_topk_groups=num_topk_groups,
        )
        others = domains * shape.num_other_domains / shape.num_domains
        rows = num_tokens * others / shape.num_chunks
    total = rows * shape.num_chunks
    back = total * BF16_BYTES * shape.hidden
    return Transport(rows, total * shape.row.num_bytes, back)


# Small kernels of a call, most of them PyTorch's: of every call, and of each chunk. A test counts.
CALL_STEPS = 46
CHUNK_STEPS = 10


def two_level_cost(
    shape: TwoLevelShape,
    num_tokens: int,
    rates: GpuRates = H200,
    network: Network | None = None,
    *,
    num_groups: int = 0,
    num_topk_groups: int = 0,
) -> PathCost:
    """Several domains: the fused call inside each, all-to-alls between them, in chunks."""
    if network is None:
        network = Network()
    groups = {"num_groups": num_groups, "num_topk_groups": num_topk_groups}
    transport = two_level_transport(shape, num_tokens, **groups)
    chunks = shape.num_chunks
    # Uniform routing: a domain computes as many slots as its ranks bring.
    slots = num_tokens * shape.num_topk
    if shape.own_shape is not None:
        own_slots = slots / shape.num_domains
        own_us = fused_us(shape.own_shape, own_slots, num_tokens, rates)
        chunk_slots = (slots - own_slots) / chunks
    else:
        own_us, chunk_slots = 0.0, slots / chunks
    kernel_us = fused_us(shape.domain_shape, chunk_slots, num_tokens / chunks, rates)
    there_us = back_us = 0.0
    if shape.num_other_domains:
        there_us = network.us(transport.bytes_there / chunks)
        back_us = network.us(transport.bytes_back / chunks)
    steps_us = local_us(shape, num_tokens, transport, rates)
    total = steps_us + pipeline_us([there_us] * chunks, [kernel_us] * chunks, back_us, own_us)
    if shape.exact_sizes and shape.num_other_domains:
        total += network.start_us
    how_network = (
        f"{network.start_us:g} us (assumed) and bytes at {network.share:g} of "
        f"{network.bytes_per_s / 1e9:g} GB/s (assumed of NCCL)"
    )
    how_kernel = f"as the fused path's, {chunk_slots:.0f} slots"
    steps = [
        CostStep(f"there, {chunks} x", there_us, how_network),
        CostStep(f"kernel, {chunks} x", kernel_us, how_kernel),
        CostStep(f"back, {chunks} x", back_us, how_network),
        CostStep(
            "own copies and sums",
            steps_us,
            f"bytes at {rates.copy_bytes_per_s / 1e12:g} TB/s and "
            f"{CALL_STEPS + CHUNK_STEPS * chunks} small kernels at {rates.step_us:g} us "
            "(assumed)",
        ),
    ]
    if shape.own_shape is not None:
        steps.insert(1, CostStep("own tokens' kernel", own_us, "as the fused path's"))
    if shape.exact_sizes and shape.num_other_domains:
        steps.insert(0, CostStep("sizes", network.start_us, "one more all-to-all (assumed)"))
    links = chunks * fused_link_bytes(shape.domain_shape, chunk_slots)
    if shape.own_shape is not None:
        links += fused_link_bytes(shape.own_shape, slots / shape.num_domains)
    return PathCost(
        "two-level",
        num_tokens,
        shape.buffer_bytes,
        links,
        transport.bytes_there + transport.bytes_back,
        total,
        tuple(steps),
    )


def pipeline_us(
    there_us: Sequence[float], kernel_us: Sequence[float], back_us: float, first_us: float = 0.0
) -> float:
    """Until the last chunk has come back: the transport sends all chunks there, one behind the
    other, then each one back when it is computed; kernels run one behind the other, each when its
    chunk has arrived. first_us: of a kernel that needs no transport.

    >>> pipeline_us([10], [100], 20), pipeline_us([5, 5], [50, 50], 10)
    (130.0, 115.0)
    >>> pipeline_us([10], [5], 10, first_us=8)
    25.0
    """
    arrived = kernels = 0.0
    kernels += first_us
    done = []
    for there, kernel in zip(there_us, kernel_us, strict=True):
        arrived += there
        kernels = max(kernels, arrived) + kernel
        done.append(kernels)
    transport = arrived
    for computed in done:
        transport = max(transport, computed) + back_us
    return float(transport)


def local_us(
    shape: TwoLevelShape, num_tokens: float, transport: Transport, rates: GpuRates = H200
) -> float:
    """What a rank does with its own memory around a call: quantize, make rows, pick those that are
    sent, put those that came into the buffer, add partial sums in FP32."""
    hidden, row = shape.hidden, shape.row.num_bytes
    rows = transport.rows_per_chunk * shape.num_chunks
    sums = min(shape.num_domains, shape.num_topk + shape.is_own_apart)
    num_bytes = num_tokens * (BF16_BYTES * hidden + 5 * row)  # quantized, as rows, into the buffer
    num_bytes += rows * 4 * row
    num_bytes += num_tokens * hidden * (sums * (2 * BF16_BYTES + 10) + 6)
    num_kernels = CALL_STEPS + CHUNK_STEPS * shape.num_chunks
    return 1e6 * num_bytes / rates.copy_bytes_per_s + num_kernels * rates.step_us


@dataclass(frozen=True)
class PublishedThroughput:
    """DeepEP's normal kernels between domains of 8 H800s, at 400 Gb/s per GPU: GB/s per GPU as its
    own test counts them, with a token's copy for its own domain (deepseek-ai/DeepEP, docs/legacy.md
    and README.md at 0297fc8). Hidden 7168, top-8, FP8 there and BF16 back; the first version with
    4096 tokens and the best 4 of 8 groups."""

    version: str
    num_domains: int
    num_tokens: int
    dispatch_gb_per_s: float
    combine_gb_per_s: float
    num_groups: int = 8
    num_topk_groups: int = 4

    @property
    def domains_per_token(self) -> float:
        return parts_of_a_token(
            self.num_domains,
            256,
            8,
            num_groups=self.num_groups,
            num_topk_groups=self.num_topk_groups,
        )

    @property
    def dispatch_us(self) -> float:
        """Of values and scales of 4 bytes per 128."""
        num_bytes = self.num_tokens * self.domains_per_token * 7168 * (1 + 4 / 128)
        return num_bytes / (1e3 * self.dispatch_gb_per_s)

    @property
    def combine_us(self) -> float:
        num_bytes = self.num_tokens * self.domains_per_token * 7168 * BF16_BYTES
        return num_bytes / (1e3 * self.combine_gb_per_s)

    @property
    def network_gb_per_s(self) -> float:
        """Of the dispatch, what crosses to another domain."""
        return self.dispatch_gb_per_s * (self.num_domains - 1) / self.num_domains


DEEPEP_THROUGHPUT = (
    PublishedThroughput("V1", 2, 4096, 43.0, 43.0),
    PublishedThroughput("V1", 4, 4096, 58.0, 57.0),
    PublishedThroughput("V1", 8, 4096, 51.0, 50.0),
    PublishedThroughput("V2", 2, 8192, 90.0, 81.0, num_groups=0, num_topk_groups=0),
    PublishedThroughput("V2", 4, 8192, 61.0, 61.0, num_groups=0, num_topk_groups=0),
)
# DeepEP's low-latency kernels over the network alone: ranks, dispatch and combine in us, of 128
# tokens, hidden 7168, top-8 (the same page).
DEEPEP_LOW_LATENCY = (
    (8, 77.0, 114.0),
    (16, 118.0, 195.0),
    (32, 155.0, 273.0),
    (64, 173.0, 314.0),
    (128, 192.0, 369.0),
    (256, 194.0, 360.0),
)
# One node of eight, the same sizes: who, dispatch and combine in us, or both together. The first
# two as perplexityai/pplx-garden publishes them (docs/fabric-lib.md at 2446003), the last one, of
# eight H800s, as ByteDance-Seed/Triton-distributed does of its low-latency layer.
ONE_NODE = (
    ("DeepEP", (42.6, 72.0)),
    ("pplx-garden", (49.7, 64.2)),
    ("Triton-distributed", (202.0,)),
)


def deployment(
    num_domains: int,
    num_tokens: int,
    *,
    num_ranks: int = 8,
    num_experts: int = 256,
    num_topk: int = 8,
    hidden: int = 7168,
    intermediate_hidden: int = 2048,
    **more: object,
) -> TwoLevelShape:
    """A model's layer over so many domains; sizes are deepseek-v3's. Where there are more ranks
    than experts, popular ones are held several times: as many places as ranks, or num_topk for each
    domain."""
    places = max(num_experts, num_domains * max(num_ranks, num_topk))
    places = ceil_div(places, num_domains * num_ranks) * num_domains * num_ranks
    sizes = (places, num_topk, hidden, intermediate_hidden, num_tokens)
    return TwoLevelShape(num_domains, num_ranks, *sizes, **more)  # type: ignore[arg-type]
