"""`deep-moe time`: predict how long a call takes on a chip that this machine need not have."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .checks import check_call, check_output_file
from .layer_options import LayerOptions, with_layer_options
from .options import (
    HtmlOption,
    JsonOption,
    MaxTokensOption,
    OverrideOption,
    RanksOption,
    SeedOption,
    TokensOption,
    parse_overrides,
    parse_tokens,
)
from .output import new_table, print_json, stderr, stdout
from .trace import facts_of_shape, title_of

if TYPE_CHECKING:
    from deep_moe.traces.timeline import Timeline
    from deep_moe.trial.simulated import SimulatedCall

ChipOption = Annotated[
    str, typer.Option("--chip", help="h100, h200, b200, b300 or gb200 (emulator/chips/).")
]


@with_layer_options
def time(
    options: LayerOptions,
    chip: ChipOption = "h100",
    ranks: RanksOption = 2,
    tokens: TokensOption = "128",
    max_tokens: MaxTokensOption = None,
    seed: SeedOption = 0,
    num_sms: Annotated[
        int | None, typer.Option("--num-sms", help="CTAs; default: all SMs of the chip.")
    ] = None,
    clock_mhz: Annotated[
        float | None,
        typer.Option(
            "--clock-mhz", min=1, help="Measured clock rate, in place of a predicted one."
        ),
    ] = None,
    override: OverrideOption = None,
    phases: Annotated[
        bool,
        typer.Option(
            "--phases/--no-phases",
            help="Also say what bounds each phase, from a second simulated call with time stamps.",
        ),
    ] = True,
    machine_code: Annotated[
        bool,
        typer.Option(
            "--machine-code",
            help="Take what instructions cost from the kernel's machine code. Needs nvdisasm "
            "(pip install nvidia-cuda-nvdisasm).",
        ),
    ] = False,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict how long one call takes on a chip, and what bounds the call, without a GPU.

    The emulator runs the kernel's warps and leaves out the products. docs/clock.md compares
    predicted with measured times. A layer of a published model takes minutes.
    """
    if html is not None:
        check_output_file("--html", html)
        if not phases:
            raise typer.BadParameter("--html shows the phases: it must be without --no-phases")
    if options.biases:
        raise typer.BadParameter("--biases must be left out: no clock has times of them")
    counts = parse_tokens(tokens, ranks)
    from deep_moe.emulator import chips
    from deep_moe.emulator.machine_code import DISASSEMBLER_VARIABLE, find_disassembler

    if machine_code and find_disassembler() is None:
        raise typer.BadParameter(
            "--machine-code needs nvdisasm: install nvidia-cuda-nvdisasm, or name its path in "
            f"{DISASSEMBLER_VARIABLE}"
        )

    on = chips.load(chip)
    if clock_mhz is not None:
        on = on.at_clock(clock_mhz)
    applied = options.applied()
    shape = options.shape(
        ranks, max(1, *counts) if max_tokens is None else max_tokens, arch=on.arch
    )
    overrides = parse_overrides(override)
    sms = int(on.value("num_sms")) if num_sms is None else num_sms
    check_call(shape, counts, arch=on.arch, num_sms=sms, activation=applied, overrides=overrides)
    # Imports PyTorch, which takes seconds: nothing that can be refused comes behind it.
    from deep_moe.trial.simulated import simulate_call

    with stderr().status("simulating") as status:

        def simulate(what: str, *, traced: bool, mirrored: bool | None) -> SimulatedCall:
            def progress(num_instructions: int) -> None:
                status.update(f"{what}: {num_instructions / 1e6:.0f} million warp instructions")

            return simulate_call(
                shape,
                counts,
                on,
                seed=seed,
                traced=traced,
                mirrored=mirrored,
                progress=progress,
                activation=applied,
                num_sms=sms,
                overrides=overrides,
                machine_code=machine_code,
            )

        call = simulate("simulating", traced=False, mirrored=None)
        recorded = None
        if phases:  # of as many ranks
            mirrored = len(call.launches) < shape.num_ranks
            recorded = simulate("simulating the phases", traced=True, mirrored=mirrored)
    facts = facts_of(call)
    of_phases = None
    if recorded is not None:
        of_phases, timeline = recorded_phases(recorded, {"chip": chip, **facts_of_shape(shape)})
        facts["phases"] = of_phases
        if html is not None:
            from deep_moe.traces.page import write_page

            write_page(timeline, html, title=title_of(options.model, ranks, tokens))
            facts["html"] = str(html)
    if as_json:
        known = {"tokens": counts, "chip": chip, "machine_code": machine_code}
        print_json({"shape": asdict(shape), **known, **facts})
        return
    stdout().print(
        f"{facts['us']:.1f} us on {chip} ({facts['kernel_us']:.1f} in the kernel), "
        f"{facts['clock_mhz']:.0f} MHz; bound by {facts['bound_by']}\n",
        soft_wrap=True,
    )
    shares = new_table("share of what the chip can do", "", "%", right=("%",), whole=("",))
    for name, share in facts["shares"].items():
        shares.add_row(name, f"{100 * share:.0f}")
    stdout().print(shares)
    if of_phases is not None:
        _print_phases(of_phases)
    roles = facts["roles"].values()
    kinds = [kind for kind in next(iter(roles)) if any(times[kind] >= 0.05 for times in roles)]
    spent = new_table(
        "us of a role's mean warp, rank 0", "", *kinds, right=tuple(kinds), whole=("",)
    )
    for role, times in facts["roles"].items():
        spent.add_row(role, *(f"{times[kind]:.1f}" for kind in kinds))
    stdout().print(spent)
    if html is not None:
        stdout().print(f"\nwritten: {html}", soft_wrap=True)


def recorded_phases(
    call: SimulatedCall, facts: dict[str, str]
) -> tuple[list[dict[str, Any]], Timeline]:
    """What bounds each phase of a recorded call, and the call as a page shows it, with `facts`."""
    from deep_moe.trial.phases import longest_wait, phase_bounds
    from deep_moe.trial.trace import aligned, timeline_of, usage_series

    on_one_clock = aligned(call.traces)
    usage = usage_series(call.usage, on_one_clock, call.chip)
    timeline = timeline_of(on_one_clock, usage=usage, facts=facts)
    phases = phase_bounds(on_one_clock, timeline)
    for phase in phases:
        role, step, us = longest_wait(phase, timeline)
        phase["longest_wait"] = {"role": role, "step": step, "us": us}
    return phases, timeline


def _print_phases(phases: list[dict[str, Any]]) -> None:
    units = list(phases[0]["shares"])
    numbers = ("us", *(f"{unit}\n%" for unit in units))
    table = new_table(
        "phases, and what bounds them",
        "",
        *numbers,
        "bound by",
        "longest wait of those who compute, mean us",
        right=numbers,
        whole=("",),
    )
    for phase in phases:
        wait = phase["longest_wait"]
        table.add_row(
            phase["name"],
            f"{phase['us']:.1f}",
            *(f"{100 * phase['shares'][unit]:.0f}" for unit in units),
            phase["bound_by"],
            f"{wait['role']}: {wait['step']} {wait['us']:.1f}" if wait["step"] else "",
        )
    stdout().print(table)


def facts_of(call: SimulatedCall) -> dict[str, Any]:
    """What is said of a call: times in microseconds, shares of the slowest rank's GPU."""
    from deep_moe.trial.phases import bound_by

    slowest = max(call.launches, key=lambda launch: launch.ns)
    chip = call.chip
    shares = {
        "memory": slowest.hbm_bytes / slowest.ns / chip.value("hbm_gb_per_s"),
        "tensor cores": slowest.tensor_share,
        "links": slowest.link_bytes / slowest.ns / chip.value("link_gb_per_s"),
        "L2": slowest.l2_bytes / slowest.ns / chip.value("l2_gb_per_s"),
    }
    first = min(call.launches, key=lambda launch: launch.rank)
    roles = {
        role: {
            kind: sum(first.spent_ns[warp][kind] for warp in warps) / len(warps) / 1e3
            for kind in first.spent_ns[0]
        }
        for role, warps in call.config.warp_roles.items()
    }
    return {
        "us": call.us,
        "kernel_us": call.kernel_us,
        "us_of_ranks": [launch.ns / 1e3 for launch in call.launches],
        "clock_mhz": slowest.clock_mhz,
        "bound_by": bound_by(shares),
        "shares": shares,
        "roles": roles,
    }
