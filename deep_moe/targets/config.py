"""`MegaMoEConfig`: everything that a kernel is built from. Fields that only one target's kernel has
are in the config of its folder.

The field names are the C++ names: the JIT renders each field into the kernel's `Config` struct.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from deep_moe.activations import Activation, activation_of
from deep_moe.heuristics.segments import Layout, align_up
from deep_moe.heuristics.shape import MoEShape
from deep_moe.heuristics.symm_buffer_layout import symm_buffer_layout, work_space_layout
from deep_moe.heuristics.tuning import Tuning, TuningResult
from deep_moe.tokens import TokenFormat

if TYPE_CHECKING:
    from .explain import Explanation
    from .target import Target, TargetWeights


@dataclass(frozen=True)
class Decision:
    """How a config came about: what was asked, the reason of each field, and what tuning tables
    say of the call."""

    num_tokens: int
    smem_capacity: int
    reasons: Mapping[str, str]
    tuning: Tuning | None
    tuning_result: TuningResult


class RoleRegisters(NamedTuple):
    """Warps of a CTA that have as many registers per thread."""

    role: str
    num_warps: int
    num_registers: int


@dataclass(frozen=True)
class MegaMoEConfig:
    """One kernel. Made by `choose_config`; equal configs give equal kernels."""

    kernel_name: ClassVar[str] = "mega_moe_kernel"
    is_cooperative: ClassVar[bool] = True  # CTAs wait for each other

    # problem
    num_ranks: int
    num_experts: int
    num_experts_per_rank: int
    num_topk: int
    num_shared_experts: int
    num_max_tokens_per_rank: int
    hidden: int  # padded, as the next
    intermediate_hidden: int
    output_hidden: int  # of y
    # launch
    num_sms: int
    cluster_size: int
    num_cluster_m_blocks: int
    num_dispatch_warps: int
    num_epilogue_warps: int
    num_threads: int
    smem_bytes: int
    # registers per thread
    num_dispatch_registers: int
    num_loader_registers: int
    num_epilogue_registers: int
    # tile
    block_m: int
    block_m_step: int
    min_block_m: int
    block_n: int
    block_k: int
    num_stages: int
    # schedule
    num_turn_m_blocks: int
    num_lead_m_blocks: int
    num_unit_m_blocks: int
    num_experts_per_part: int
    num_part_m_blocks: int
    # numerics
    fast_math: bool
    accumulate: bool
    # recording
    trace: bool  # time stamps, see include/deep_moe/trace/tracer.cuh
    # pool
    num_pool_tokens: int
    num_max_pool_blocks: int
    num_padded_sf_pool_tokens: int
    num_l2_mask_words: int
    num_ring_blocks: int
    pool_wraps: bool
    # derived
    num_l1_n_blocks: int
    num_l2_n_blocks: int
    num_l1_k_blocks: int
    num_l2_k_blocks: int
    num_combine_chunks: int
    # failures
    masks_ranks: bool = field(default=False, kw_only=True)  # include/deep_moe/sync/active_ranks.cuh

    # rendered as types
    activation: Activation = field(default=activation_of(), kw_only=True)
    target: Target = field(kw_only=True)
    weights: str = field(kw_only=True)
    biases: bool = field(default=False, kw_only=True)
    token_format: str = field(kw_only=True)
    # Of tokens that are here when the kernel starts, their format (deep_moe/split); None: of tokens
    # that ranks send each other.
    local_tokens: str | None = field(default=None, kw_only=True)
    # not rendered
    decision: Decision | None = field(default=None, kw_only=True, compare=False, repr=False)

    @property
    def num_traced_n_blocks(self) -> tuple[int, int]:
        """Of Linear1 and Linear2: the weight blocks of an expert as LinearOf::weight_block_row in
        include/deep_moe/experts/linear.cuh counts them."""
        unit = self.cluster_size // self.num_cluster_m_blocks
        return align_up(self.num_l1_n_blocks, unit), align_up(self.num_l2_n_blocks, unit)

    def kernel_fields(self) -> dict[str, int | float | bool]:
        """The numbers of the kernel's `Config` struct, in declaration order."""
        not_numbers = (
            *("activation", "target", "weights", "biases", "token_format"),
            *("local_tokens", "decision"),
        )
        return {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if entry.name not in not_numbers
        }

    def to_dict(self) -> dict[str, int | float | bool | str]:
        """All that is compiled in, for reports: the kernel's fields, the activation's name, and its
        parameters as `activation_<name>`."""
        return {**self.kernel_fields(), **self.activation.to_dict()}

    @property
    def arch(self) -> str:
        """What the kernel is compiled for, as the compiler knows it."""
        return self.target.name

    @property
    def target_weights(self) -> TargetWeights:
        """What the target does with the config's weights."""
        return self.target.weights_of(self.weights, self.token_format)

    @property
    def shape(self) -> MoEShape:
        """The problem that the config was made for, but for padding of the intermediate size."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(MoEShape)}
        return MoEShape(**{**values, "hidden": self.output_hidden})

    @property
    def has_gate(self) -> bool:
        """Whether Linear1 has rows of gate beside those of up."""
        return self.activation.has_gate

    @property
    def tokens(self) -> TokenFormat:
        """What tokens and Linear1's output are."""
        return self.shape.tokens

    @property
    def symm_buffer_layout(self) -> Layout:
        """Segments of a rank's symmetric buffer, or of the work space of local tokens, rendered as
        `Config::Symm`."""
        if self.local_tokens is not None:
            return work_space_layout(self.shape)
        return symm_buffer_layout(self.shape)

    @property
    def smem_layout(self) -> Layout:
        """Segments of a CTA's shared memory, rendered as `Config::Smem`."""
        policies: dict[str, str | bool] = {
            name: getattr(self, name) for name in ("weights", "biases", "token_format", "has_gate")
        }
        return self.target.smem_layout({**self.kernel_fields(), **policies})

    @property
    def tunable(self) -> dict[str, int]:
        """The fields that tuning may choose, with their values."""
        return {name: getattr(self, name) for name in self.target.tunable}

    @property
    def candidates(self) -> dict[str, tuple[int, ...]]:
        """Other values of each tunable field that are worth measuring beside this config's."""
        return self.target.candidates(self.shape.padded, self.tunable)

    @property
    def role_registers(self) -> tuple[RoleRegisters, ...]:
        """The warps of a CTA in the order of their numbers, by their registers."""
        dispatch, loaders, epilogue = self.target.roles
        num_others = self.num_threads // 32 - self.num_dispatch_warps - self.num_epilogue_warps
        return (
            RoleRegisters(dispatch, self.num_dispatch_warps, self.num_dispatch_registers),
            RoleRegisters(loaders, num_others, self.num_loader_registers),
            RoleRegisters(epilogue, self.num_epilogue_warps, self.num_epilogue_registers),
        )

    @property
    def warp_roles(self) -> dict[str, range]:
        """The warps of a CTA by what they do."""
        return self.target.warp_roles(self.kernel_fields())

    @property
    def tmem_layout(self) -> Layout | None:
        """Columns of tensor memory, rendered as `Config::Tmem`; None where there is none."""
        return self.target.tmem_layout({**self.kernel_fields(), "token_format": self.token_format})

    def explain(self) -> Explanation:
        """Every choice with its reason, the memory maps, and what the schedule amounts to."""
        from .explain import explain

        return explain(self)
