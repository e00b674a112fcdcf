"""Writes docs/paths.md: which path a layer takes, and what it is estimated to cost.

    python -m docs.generate_paths

Every number of the page comes from heuristics/path_costs.py. A test compares the page with what
this makes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from deep_moe.heuristics import MoEShape, preset_shape
from deep_moe.heuristics.low_latency import MAX_TOKENS_PER_RANK, LowLatencyShape
from deep_moe.heuristics.path_costs import (
    CALL_STEPS,
    CHUNK_STEPS,
    DEEPEP_LOW_LATENCY,
    DEEPEP_THROUGHPUT,
    H200,
    ONE_NODE,
    ROOM_FOR_ROWS,
    TWO_GPU_OTHERS,
    TWO_GPU_SHAPE,
    TWO_GPU_STEPS,
    Network,
    PathCost,
    PublishedThroughput,
    deployment,
    fused_cost,
    low_latency_cost,
    low_latency_link_bytes,
    low_latency_rate,
    low_latency_us,
    throughput_cost,
    two_level_cost,
    two_level_transport,
)
from deep_moe.heuristics.shape import DEFAULT_POOL_TOKENS

OUTPUT = Path(__file__).parent / "paths.md"
# What the fused call's model was fitted to.
MEASURED = sorted(OUTPUT.parents[1].glob("benchmarks/results/*2026-11-22*.json"))
MODEL = "deepseek-v3"
NUM_RANKS = 8
TOKENS = (1, 8, 32, 128, 512, 1024, 4096)
NUM_DOMAINS = (2, 4, 8, 16, 32, 64, 128)
DECODE_TOKENS, PREFILL_TOKENS, PREFILL_CHUNKS = 128, 4096, 4
NETWORK = Network()

TEMPLATE = Path(__file__).parent / "paths.md.in"  # the words, with {names} for numbers and tables


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines)


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _mib(value: float) -> str:
    return f"{value / 2**20:.1f}" if value < 100 * 2**20 else f"{value / 2**20:.0f}"


def _worst_fit() -> float:
    """How far the fused call's estimates are off at most, of what was measured."""
    ratios = []
    for path in MEASURED:
        for result in json.loads(path.read_text(encoding="utf-8"))["results"]:
            tokens = result["tokens_per_rank"]
            shape = MoEShape(result["num_ranks"], **result["layer"], num_max_tokens_per_rank=tokens)
            ratios.append(fused_cost(shape, tokens).us / result["us"])
    return max(abs(ratio - 1) for ratio in ratios)


def _one_domain() -> str:
    rows = []
    for tokens in TOKENS:
        shape = preset_shape(MODEL, num_ranks=NUM_RANKS, num_max_tokens_per_rank=tokens)
        fused = fused_cost(shape, tokens)
        cells = [tokens, _us(fused.us), _mib(fused.link_bytes)]
        is_few = tokens <= MAX_TOKENS_PER_RANK
        split = (low_latency_cost if is_few else throughput_cost)(shape, tokens)
        steps = {step.name: step.us for step in split.steps}
        cells += [split.path, _us(split.us), _us(steps["dispatch"]), _us(steps["combine"])]
        cells += [_mib(split.link_bytes)]
        rows.append(cells)
    head = ("tokens per rank", "fused", "MiB", "split", "call", "dispatch", "combine", "MiB")
    return _table(head, rows)


def _two_gpus() -> str:
    rows = []
    for tokens in sorted(TWO_GPU_STEPS["dispatch"].us):
        cells: list[object] = [tokens]
        for step in ("dispatch", "combine"):
            model = low_latency_us(step, TWO_GPU_SHAPE, tokens)
            cells += [f"{TWO_GPU_STEPS[step].us[tokens]:.1f}", f"{model:.1f}"]
        rows.append(cells)
    head = ("tokens per rank", "dispatch, measured", "model", "combine, measured", "model")
    return _table(head, rows)


def _two_gpus_others() -> str:
    rows = []
    for shape, tokens, *seen in TWO_GPU_OTHERS:
        cells: list[object] = [f"{shape.hidden}, top-{shape.num_topk}, tokens: {tokens}"]
        num_bytes = low_latency_link_bytes(shape, tokens)
        for step, us in zip(("dispatch", "combine"), seen, strict=True):
            model = low_latency_us(step, shape, tokens)
            cells += [f"{num_bytes[step] / 1e6:.2f}", f"{us:.1f}", f"{model:.1f}"]
        rows.append(cells)
    head = ["hidden, slots"]
    for step in ("dispatch", "combine"):
        head += [f"{step}: MB", "measured", "model"]
    return _table(head, rows)


def _largest_other(step: str) -> tuple[float, float]:
    """Of the most bytes that were measured on two GPUs: their number, and how many times as long as
    the model it took."""
    shape, tokens, *seen = TWO_GPU_OTHERS[-1]
    us = dict(zip(("dispatch", "combine"), seen, strict=True))[step]
    return low_latency_link_bytes(shape, tokens)[step], us / low_latency_us(step, shape, tokens)


def _eight(eight: LowLatencyShape) -> str:
    """What goes into the model of eight GPUs, and what comes of it, beside what is published."""
    rows: list[Sequence[object]] = []
    low, high = [], []
    for step in ("dispatch", "combine"):
        model = low_latency_us(step, eight, DECODE_TOKENS)
        low.append(model)
        high.append(model * _largest_other(step)[1])
    for name, of_step in (
        ("one token on two GPUs, measured, µs", lambda step: f"{TWO_GPU_STEPS[step].us[1]:g}"),
        (
            "bytes over a rank's links, MB",
            lambda step: f"{low_latency_link_bytes(eight, DECODE_TOKENS)[step] / 1e6:.2f}",
        ),
        ("rate on two GPUs, GB/s", lambda step: f"{low_latency_rate(step) / 1e9:.0f}"),
    ):
        rows.append((name, of_step("dispatch"), of_step("combine"), ""))
    rows.append(("**model**, µs", *(f"**{us:.1f}**" for us in low), f"**{sum(low):.0f}**"))
    words = "if it is off as in the last row above"
    rows.append((words, *(f"{us:.1f}" for us in high), f"{sum(high):.0f}"))
    for who, us in ONE_NODE:
        parts = [f"{part:g}" for part in us] if len(us) == 2 else ["", ""]
        rows.append((f"{who}, published", *parts, f"{sum(us):.0f}"))
    return _table(("8 GPUs, 128 tokens, hidden 7168, top-8", "dispatch", "combine", "both"), rows)


def _costs(num_domains: int) -> tuple[PathCost, PathCost]:
    """Of few tokens and of many."""
    decode = deployment(num_domains, DECODE_TOKENS, exact_sizes=True)
    prefill = deployment(num_domains, PREFILL_TOKENS, num_chunks=PREFILL_CHUNKS, exact_sizes=True)
    return two_level_cost(decode, DECODE_TOKENS), two_level_cost(prefill, PREFILL_TOKENS)


def _transport_and_kernels(cost: PathCost) -> tuple[float, float]:
    steps = {step.name.partition(",")[0]: step.us for step in cost.steps}
    chunks = PREFILL_CHUNKS if cost.num_tokens == PREFILL_TOKENS else 1
    return chunks * (steps["there"] + steps["back"]), chunks * steps["kernel"]


def _network_bound() -> int:
    """Domains from which on transport takes longer than kernels, with few tokens and many."""
    for domains in NUM_DOMAINS:
        parts = [_transport_and_kernels(cost) for cost in _costs(domains)]
        if all(transport > kernels for transport, kernels in parts):
            return domains
    raise ValueError("the page must say that kernels always take longer")


def _two_level() -> str:
    rows = []
    for domains in NUM_DOMAINS:
        cells: list[object] = [f"{domains} ({NUM_RANKS * domains})"]
        for cost in _costs(domains):
            transport, kernels = _transport_and_kernels(cost)
            cells += [_mib(cost.network_bytes), _us(transport), _us(kernels), _us(cost.us)]
        rows.append(cells)
    names = ("MiB each way", "transport", "kernels", "call")
    head = ["domains (GPUs)"]
    for tokens in (DECODE_TOKENS, PREFILL_TOKENS):
        head += [f"{tokens} tokens: {names[0]}", *names[1:]]
    return _table(head, rows)


def _modelled(published: PublishedThroughput) -> tuple[float, float]:
    shape = deployment(published.num_domains, published.num_tokens, exact_sizes=True)
    transport = two_level_transport(
        shape,
        published.num_tokens,
        num_groups=published.num_groups,
        num_topk_groups=published.num_topk_groups,
    )
    return NETWORK.us(transport.bytes_there), NETWORK.us(transport.bytes_back)


def _published() -> str:
    rows = []
    for published in DEEPEP_THROUGHPUT:
        there, back = _modelled(published)
        rows.append(
            (
                f"{published.version}, {published.num_domains} domains",
                published.num_tokens,
                f"{published.dispatch_gb_per_s:g} and {published.combine_gb_per_s:g}",
                f"{published.network_gb_per_s:.0f}",
                _us(published.dispatch_us),
                _us(there),
                _us(published.combine_us),
                _us(back),
            )
        )
    head = (
        "published",
        "tokens",
        "GB/s there and back",
        "about so much crosses",
        "dispatch",
        "our model",
        "combine",
        "our model",
    )
    return _table(head, rows)


def _published_low_latency() -> str:
    rows = []
    for ranks, dispatch, combine in DEEPEP_LOW_LATENCY:
        cells: list[object] = [ranks, f"{dispatch:g}", f"{combine:g}"]
        domains = ranks // NUM_RANKS
        if domains > 1:
            shape = deployment(domains, DECODE_TOKENS, exact_sizes=True)
            transport = two_level_transport(shape, DECODE_TOKENS)
            cells += [_us(NETWORK.us(transport.bytes_there)), _us(NETWORK.us(transport.bytes_back))]
        else:
            cells += ["", ""]
        rows.append(cells)
    head = ("GPUs", "dispatch, published", "combine, published", "there, our model", "back")
    return _table(head, rows)


def _memory() -> str:
    rows = []
    for tokens in (DECODE_TOKENS, PREFILL_TOKENS):
        shape = preset_shape(MODEL, num_ranks=NUM_RANKS, num_max_tokens_per_rank=tokens)
        pool = {"num_pool_tokens": DEFAULT_POOL_TOKENS}
        fused = fused_cost(replace(shape, **pool), tokens)
        paths: list[tuple[str, PathCost]] = [("fused", fused)]
        if tokens <= MAX_TOKENS_PER_RANK:
            paths.append(("low latency", low_latency_cost(shape, tokens)))
        name = f"throughput, room for {ROOM_FOR_ROWS} times the rows of uniform routing"
        paths.append((name, throughput_cost(shape, tokens)))
        for domains in (2, 8):
            layer = deployment(domains, tokens, **pool)
            paths.append(
                (
                    f"two-level, {domains} domains, as many as can come",
                    two_level_cost(layer, tokens),
                )
            )
            bound = 2 * tokens
            layer = deployment(domains, tokens, num_max_foreign_tokens=bound, **pool)
            if bound < (domains - 1) * tokens:
                name = f"two-level, {domains} domains, at most {bound} foreign tokens"
                paths.append((name, two_level_cost(layer, tokens)))
        for name, cost in paths:
            rows.append((f"{tokens} tokens: {name}", _mib(sum(cost.buffer_bytes.values()))))
    return _table(("path", "MiB"), rows)


def page() -> str:
    """The whole page."""
    eight = LowLatencyShape(NUM_RANKS, 256, 8, 7168, DECODE_TOKENS, "fp8_128")
    transport = two_level_transport(deployment(2, 128, exact_sizes=True), 128)
    return TEMPLATE.read_text(encoding="utf-8").format(
        model=MODEL,
        num_ranks=NUM_RANKS,
        one_domain=_one_domain(),
        call_us=H200.call_us,
        link=H200.link_bytes_per_s / 1e9,
        hbm=H200.weight_bytes_per_s / 1e12,
        mxfp4=H200.of_format("mxfp4").flops / 1e15,
        fp8=H200.of_format("fp8").flops / 1e15,
        bf16=H200.of_format("bf16").flops / 1e15,
        fit=f"{100 * _worst_fit():.0f} %",
        dispatch_rate=f"{low_latency_rate('dispatch') / 1e9:.0f}",
        combine_rate=f"{low_latency_rate('combine') / 1e9:.0f}",
        two_gpus=_two_gpus(),
        two_gpus_others=_two_gpus_others(),
        eight=_eight(eight),
        dispatch_seen=f"{_largest_other('dispatch')[0] / 1e6:.1f}",
        combine_seen=f"{_largest_other('combine')[0] / 1e6:.1f}",
        network_gb=NETWORK.bytes_per_s / 1e9,
        network_gbit=8 * NETWORK.bytes_per_s / 1e9,
        prefill=PREFILL_TOKENS,
        prefill_chunks=PREFILL_CHUNKS,
        two_level=_two_level(),
        start=NETWORK.start_us,
        share=NETWORK.share,
        copy=H200.copy_bytes_per_s / 1e12,
        call_steps=CALL_STEPS,
        chunk_steps=CHUNK_STEPS,
        step_us=H200.step_us,
        network_bound=_network_bound(),
        back_ratio=transport.bytes_back / transport.bytes_there,
        published=_published(),
        published_low_latency=_published_low_latency(),
        memory=_memory(),
    )


if __name__ == "__main__":
    OUTPUT.write_text(page(), encoding="utf-8")
    print(f"wrote {OUTPUT}")
