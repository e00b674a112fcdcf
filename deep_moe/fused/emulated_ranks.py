"""Several ranks in one process: each a buffer, all run together by one emulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from deep_moe.activations import DEFAULT_ACTIVATION, Activation
from deep_moe.described import described_as
from deep_moe.emulator.machine import EntriesBySource
from deep_moe.heuristics.shape import DEFAULT_POOL_TOKENS, MoEShape
from deep_moe.heuristics.symm_buffer_layout import entries_by_source, symm_buffer_layout
from deep_moe.jit.launch import Mirror, RankLaunch, run_emulated
from deep_moe.targets import EMULATED, target_of
from deep_moe.tensor_memory import check_dense, refuse_shared_memory
from deep_moe.weights import DEFAULT_WEIGHTS
from deep_moe.weights.layers import MegaMoEWeights

from .buffer import SymmBuffer, get_symm_buffer_for_mega_moe
from .checks import STATISTICS, Biases, check_biases_given, check_weights, named_as, require_type
from .closing import Closing
from .emulated_call import finish_emulated, prepare_launch, require_memory
from .mega_moe import mega_moe, with_numerics
from .options import (
    MASKED_RANKS,
    OPTION_TENSORS,
    CallOptions,
    given_options,
    given_tensors,
    with_call_options,
    without_tensors,
)
from .rank_buffer import RankBuffer, used
from .symm_memory import private_host_memories

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from deep_moe.activations import ActivationName
    from deep_moe.emulator import Chip, Machine
    from deep_moe.emulator.machine import Schedule
    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName


@described_as(get_symm_buffer_for_mega_moe)
class EmulatedRanks(Closing):
    """`num_ranks` ranks of one layer, without processes or a GPU.

    Other arguments are as of `get_symm_buffer_for_mega_moe`.

    Args:
        num_ranks: ranks to emulate.

    Attributes:
        buffers: one SymmBuffer per rank; fill their views, then `call`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
        MemoryError: the machine has too little memory for these sizes.
    """

    def __init__(
        self,
        num_ranks: int,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        *,
        weights: WeightsName = DEFAULT_WEIGHTS,
        num_shared_experts: int = 0,
        num_pool_tokens: int | None = DEFAULT_POOL_TOKENS,
        biases: bool = False,
        token_format: TokenFormatName | None = None,
    ) -> None:
        self.shape = MoEShape(
            num_ranks=num_ranks,
            num_experts=num_experts,
            num_topk=num_topk,
            hidden=hidden,
            intermediate_hidden=intermediate_hidden,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            num_pool_tokens=num_pool_tokens,
            weights=weights,
            biases=biases,
            num_shared_experts=num_shared_experts,
            token_format=token_format or EMULATED.default_tokens(weights),
        )
        memories = private_host_memories(num_ranks, symm_buffer_layout(self.shape).num_bytes)
        self.buffers = [SymmBuffer(self.shape, memory) for memory in memories]

    @described_as(mega_moe)
    @with_call_options
    def call(
        self,
        ys: Sequence[torch.Tensor],
        weights: Sequence[MegaMoEWeights],
        stats: Sequence[torch.Tensor | None] | None = None,
        *,
        activation: ActivationName | Activation = DEFAULT_ACTIVATION,
        activation_clamp: float | None = None,
        fast_math: bool = True,
        biases: Sequence[Biases] | None = None,
        schedule: Schedule = "random",
        ranks: Sequence[int] | None = None,
        progress: Callable[[int], None] | None = None,
        hopper_fp8_sums: bool = False,
        chip: Chip | None = None,
        products: bool = True,
        observe: Callable[[Machine], None] | None = None,
        mirrored: bool = False,
        machine_code: bool = False,
        **options: Unpack[CallOptions],
    ) -> None:
        """Run one call of every rank; arguments as in `mega_moe`.

        Other arguments are as of `mega_moe`.

        Args:
            ys: each rank's output.
            weights: each rank's, transformed.
            stats: each rank's receive statistics.
            biases: each rank's transformed (l1, l2), if there are some.
            schedule: how warps are interleaved.
            ranks: those that take part, by default all; the others never arrive.
            progress: told now and then how many warp instructions have been executed.
            hopper_fp8_sums: on sm_90a, drop the low bits of sums as an H200 does, not add exactly.
            chip: whose time is simulated, see `Machine`.
            products: False leaves them out, where only time is asked for.
            observe: gets the machine after the call.
            mirrored: run rank 0 alone; every peer does to it what it does to that peer, at the same
                time, as where peers have as many tokens and the same routing, turned by a rank.
                Weights of the peers are taken to be rank 0's. It needs a chip and checked=False,
                and no rank may be masked.
            machine_code: with a chip, read what instructions cost from the kernel's machine code,
                see `deep_moe.emulator.machine_code`.
            {options}

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a value, shape, dtype or device that is not allowed; the
                text names it.
            MegaMoEError: a kernel gave up, or an earlier call did; `reset()` makes the buffers
                usable again.
            EmulatorError: a check found a mistake of the kernel.
            CompileError: NVRTC refused the kernel.
        """
        if mirrored and ranks is not None:
            raise ValueError(f"ranks must be None where mirrored=True; got {ranks!r}")
        taking_part = range(self.shape.num_ranks) if ranks is None else ranks
        if mirrored:
            taking_part = (0,)
        tensors: dict[str, Sequence[torch.Tensor | None]] = given_tensors(options)
        given = given_options("call", without_tensors(options))
        arguments = with_numerics(given, activation, activation_clamp, fast_math)
        per_rank = {"ys": ys, "weights": weights, "stats": stats, "biases": biases, **tensors}
        for name, values in per_rank.items():
            if values is None and name in ("stats", "biases"):
                continue
            if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
                kind = type(values).__name__
                raise TypeError(f"{name} must be a list, an entry for each rank; got {kind}")
            if len(values) != self.shape.num_ranks:
                raise ValueError(
                    f"{name} must have one entry for each of the {self.shape.num_ranks} ranks; "
                    f"got {len(values)}"
                )
        self._refuse_shared_outputs(ys, stats, tensors)
        names = {name: name for name in tensors}
        if stats is not None:
            tensors[STATISTICS], names[STATISTICS] = stats, "stats"
        checked = arguments.get("checked") is not False
        biases_of: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]
        biases_of = biases or [(None, None)] * self.shape.num_ranks
        arch = arguments.get("arch")
        kernel = (self.buffers[0].target if arch is None else target_of(arch)).kernel
        with used(self.buffers):
            launches: list[RankLaunch] = []
            for rank in taking_part:
                own = ((name, each[rank]) for name, each in tensors.items())
                of_rank = {name: tensor for name, tensor in own if tensor is not None}
                own_names = {name: f"{words}[{rank}]" for name, words in names.items()}
                with named_as({**_names_of(rank), **own_names}):
                    check_weights(weights[rank], self.shape, kernel, activation)
                    launches.append(
                        prepare_launch(
                            ys[rank],
                            weights[rank].l1,
                            weights[rank].l2,
                            self.buffers[rank],
                            of_rank,
                            arguments,
                            check_biases_given(*biases_of[rank], self.buffers[rank]),
                        )
                    )
            if mirrored:
                _refuse_masked_peers(tensors)
                launches = [_with_mirrored_peers(launches[0], self.shape)]
            run_ranks(
                self.buffers,
                launches,
                taking_part,
                seed=arguments.get("schedule_seed") or 0,
                schedule=schedule,
                checked=checked,
                progress=progress,
                hopper_fp8_sums=hopper_fp8_sums,
                clock="virtual" if chip is None else chip,
                products=products,
                observe=observe,
                machine_code=machine_code,
            )

    @staticmethod
    def _refuse_shared_outputs(
        ys: Sequence[torch.Tensor],
        stats: Sequence[torch.Tensor | None] | None,
        tensors: Mapping[str, Sequence[torch.Tensor | None]],
    ) -> None:
        """Raise if what one rank writes is in the memory of what another writes or is given."""
        outputs = {f"ys[{rank}]": y for rank, y in enumerate(ys)}
        outputs |= {f"stats[{rank}]": t for rank, t in enumerate(stats or ()) if t is not None}
        inputs: dict[str, torch.Tensor] = {}
        for name, each in tensors.items():
            to = outputs if OPTION_TENSORS[name].is_written else inputs
            to |= {f"{name}[{rank}]": t for rank, t in enumerate(each) if t is not None}
        for name, tensor in {**outputs, **inputs}.items():
            require_type(name, tensor, torch.Tensor, "a tensor")
            check_dense(name, tensor)
        refuse_shared_memory(outputs, inputs)

    def reset(self) -> None:
        """Make all buffers usable again after a failed call."""
        for buffer in self.buffers:
            buffer.reset()

    def close(self) -> None:
        """Give the memory back."""
        for buffer in self.buffers:
            buffer.close()


def _refuse_masked_peers(tensors: Mapping[str, Sequence[torch.Tensor | None]]) -> None:
    """Raise if rank 0 masks a rank: its peers would mask others, turned by a rank."""
    masked = tensors[MASKED_RANKS][0] if MASKED_RANKS in tensors else None
    if masked is not None and masked.any():
        raise ValueError(
            f"{MASKED_RANKS}[0] must leave out no rank where mirrored=True; got {masked.tolist()}"
        )


def _with_mirrored_peers(launch: RankLaunch, shape: MoEShape) -> RankLaunch:
    """Rank 0's launch. Its peer p sees it as it sees rank -p."""
    (own,) = (region for region in launch.memory if region.home == 0)
    arrays = tuple(EntriesBySource(*array) for array in entries_by_source(shape))
    num_ranks = shape.num_ranks
    memory = tuple(
        replace(region, mirror=Mirror(own.address, num_ranks, num_ranks - region.home, arrays))
        if region.home
        else region
        for region in launch.memory
    )
    return replace(launch, memory=memory)


def _names_of(rank: int) -> dict[str, str]:
    """What arguments of a rank's call are called here."""
    return {
        "y": f"ys[{rank}]",
        "weights": f"weights[{rank}]",
        "l1_weights": f"weights[{rank}].l1",
        "l2_weights": f"weights[{rank}].l2",
        "l1_bias": f"biases[{rank}][0]",
        "l2_bias": f"biases[{rank}][1]",
    }


def run_ranks(
    buffers: Sequence[RankBuffer],
    launches: Sequence[RankLaunch],
    taking_part: Sequence[int],
    *,
    seed: int,
    schedule: Schedule,
    checked: bool,
    clock: Literal["virtual"] | Chip = "virtual",
    **how: Any,
) -> None:
    """Run launches of several ranks at once, and raise the first failure. After one, no rank's
    buffer is usable. how: further arguments of `run_emulated`."""
    require_memory(launches, checked=checked)
    try:
        stall = run_emulated(
            launches, seed=seed, schedule=schedule, checks=checked, clock=clock, **how
        )
    except BaseException:
        for buffer in buffers:
            buffer.mark_failed("the emulator stopped")
        raise
    _raise_if_failed(buffers, taking_part, stall, checked=checked)


def _raise_if_failed(
    buffers: Sequence[RankBuffer], ranks: Sequence[int], stall: str, *, checked: bool
) -> None:
    """Raise the first failure of these ranks; after one, no rank's buffer is usable. stall: who
    waited for what, if the ranks came to a stop."""
    try:
        for rank in ranks:
            finish_emulated(buffers[rank], checked=checked)
    except RuntimeError as error:
        for buffer in buffers:
            buffer.mark_failed(str(error))
        if stall:
            error.args = (f"{error}\n{stall}",)
        raise
