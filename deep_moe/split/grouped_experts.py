"""`GroupedExperts`: the experts of one rank on tokens that are there, as a kernel of its own.

The kernel is the fused call's. It differs in where tokens come from, rows of the caller's, and in
where results go, the same rows of y (include/deep_moe/tokens).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.activations import DEFAULT_ACTIVATION, Activation, activation_of
from deep_moe.described import described_as
from deep_moe.formats.sizes import K_BLOCK
from deep_moe.fused.bounded_cache import BoundedCache
from deep_moe.fused.buffer import device_for, memory_for
from deep_moe.fused.call_plan import (
    CallCaches,
    CallPlan,
    args_of_weights,
)
from deep_moe.fused.checks import (
    NAMES_OF_LAYERS,
    WEIGHT_NAMES,
    WEIGHTS_WORDS,
    Biases,
    check_biases_given,
    check_contiguous,
    check_start,
    check_tensor,
    check_weights,
    named_as,
    refuse_gradients,
    require_type,
)
from deep_moe.fused.closing import Closing
from deep_moe.fused.config_chooser import ConfigChooser
from deep_moe.fused.emulated_call import run_rank
from deep_moe.fused.loaded_kernels import built_kernel, launcher_of
from deep_moe.fused.options import check_overrides
from deep_moe.fused.rank_buffer import RankBuffer, used
from deep_moe.fused.run_settings import RunSettings
from deep_moe.fused.symm_memory import DeviceMemory, HostMemory
from deep_moe.heuristics.expected_tokens import expected_tokens_per_rank
from deep_moe.heuristics.shape import MAX_EXPERTS, MoEShape, require_int
from deep_moe.heuristics.symm_buffer_layout import work_space_layout
from deep_moe.jit.cpp_structs import CppStruct
from deep_moe.jit.kernel_args import RECEIVED_UNEVENLY
from deep_moe.jit.launch import MemoryRegion, RankLaunch
from deep_moe.targets import EMULATED, Target, target_for, target_of
from deep_moe.targets.config import MegaMoEConfig
from deep_moe.tensor_memory import refuse_shared_memory
from deep_moe.tokens import TOKEN_FORMATS, TokenFormat
from deep_moe.tokens import token_format as token_format_of
from deep_moe.weights import DEFAULT_WEIGHTS, default_token_format
from deep_moe.weights.layers import MegaMoEWeights

if TYPE_CHECKING:
    from deep_moe.activations import ActivationName
    from deep_moe.tokens import TokenFormatName
    from deep_moe.trial.trace import Recorder
    from deep_moe.weights import WeightsName

MAX_ROWS = 1 << 21
_ALIGNMENT = 16  # bytes, of bulk copies


def token_formats_for(weights: str, arch: str | None = None) -> tuple[str, ...]:
    """The tokens' formats that experts with weights of a format take; the first is the default.
    arch: where; by default what a CPU emulates.

    >>> token_formats_for("mxfp4"), token_formats_for("bf16")
    (('mxfp8', 'fp8_128_ue8m0', 'fp8_128_pow2', 'bf16'), ('bf16',))
    >>> token_formats_for("fp8", "sm_90a")
    ('mxfp8', 'fp8_128_ue8m0', 'fp8_128_pow2', 'fp8_128', 'fp8_token')
    """
    target = EMULATED if arch is None else target_of(arch)
    in_products = target.token_formats(weights)
    known = [name for name in TOKEN_FORMATS if token_format_of(name).in_products in in_products]
    return tuple(sorted(known, key=lambda name: name != in_products[0]))


class GroupedExperts(Closing):
    """Linear1, activation and Linear2 of one rank's experts, on rows that are there.

    Args:
        max_rows: most rows of all experts together in a call; beyond it the call fails.
        hidden: a multiple of 128.
        intermediate_hidden: as in checkpoints.
        num_local_experts: experts of this rank.
        weights: format of the weights.
        biases: whether both layers have biases.
        token_format: format of x. With mxfp4 and fp8 weights: "mxfp8", the default, E4M3 with a
            UE8M0 scale per 32 values; "fp8_128_ue8m0", with one per 128; "fp8_128_pow2", with a
            float32 scale per 128 that is a power of two. With fp8 weights also "fp8_token", with a
            float32 scale per row, for weights with scales per row or matrix, and on sm_90a
            "fp8_128", with a float32 scale per 128. "bf16" goes with mxfp4 weights, too, and is the
            default with other ones but, on SM100, mxfp8 ("mxfp8") and nvfp4 ("nvfp4") weights.
            docs/split.md has a table.
        activation: as of `mega_moe`.
        activation_clamp: as of `mega_moe`.
        fast_math: as of `mega_moe`.
        num_pool_tokens: rows of the work space, a multiple of 384. With fewer than a call may bring
            they are used again within a call. By default as many as a call may bring.
        device: where the calls run. A CPU runs them in the emulator. By default the current GPU if
            there is one.
        num_sms: CTAs; by default all SMs of the GPU, 4 on a CPU.
        arch: "sm_100a" and so on; by default that of the GPU, sm_100a on a CPU.
        overrides: config fields by name, as of a fused call.
        timeout_s: limit of the kernel's waits; by default 60 on GPUs and 600 in the emulator.
            Nothing waits for other ranks.
        checked: check the values of the counts, for which a call on a GPU waits; on a CPU also look
            for races in the kernel. By default only on CPUs.
        schedule_seed: on a CPU, picks the order in which the emulator interleaves warps.

    The host waits for nothing, and calls may be captured in a CUDA graph after one outside. The
    calls of one object share its work space, so they must run one after the other: on one stream,
    or on streams that wait for each other.

    Attributes:
        nbytes: size of the work space.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
        MemoryError: the machine has too little memory for these sizes.
    """

    def __init__(
        self,
        max_rows: int,
        hidden: int,
        intermediate_hidden: int,
        num_local_experts: int,
        *,
        weights: WeightsName = DEFAULT_WEIGHTS,
        biases: bool = False,
        token_format: TokenFormatName | None = None,
        activation: ActivationName | Activation = DEFAULT_ACTIVATION,
        activation_clamp: float | None = None,
        fast_math: bool = True,
        num_pool_tokens: int | None = None,
        device: torch.device | str | int | None = None,
        num_sms: int | None = None,
        arch: str | None = None,
        overrides: Mapping[str, int] | None = None,
        timeout_s: float | None = None,
        checked: bool | None = None,
        schedule_seed: int = 0,
    ) -> None:
        require_type("biases", biases, bool, "a bool")
        require_type("fast_math", fast_math, bool, "a bool")
        run = RunSettings(num_sms, timeout_s, arch, checked, schedule_seed)
        if overrides is not None:
            check_overrides(overrides)
        chosen_device = device_for(None, device)
        target = target_for(arch, chosen_device)
        self.tokens = _checked_format(weights, token_format, target)
        self.shape = _shape_of(
            max_rows,
            hidden,
            intermediate_hidden,
            num_local_experts,
            weights,
            self.tokens.in_products,
            num_pool_tokens,
            biases,
        )
        self._activation = activation_of(activation, activation_clamp)
        layout = work_space_layout(self.shape)
        self._work_space = _WorkSpace(self.shape, memory_for(layout, None, chosen_device))
        self._settings = run.on(self._work_space.gpu)
        self._choose = ConfigChooser(
            shape=self.shape,
            arch=target.name,
            num_sms=self._settings.num_sms,
            activation=self._activation,
            fast_math=fast_math,
            accumulate=False,
            overrides=tuple((overrides or {}).items()),
            trace=False,
            gpu=None,
        )
        self._plan: CallPlan | None = None  # of the newest call
        # What is wrong with the options, a caller shall hear now.
        _choose_config(self._choose, self.tokens.name, max_rows, False)

    def __repr__(self) -> str:
        shape = self.shape
        return (
            f"GroupedExperts({shape.num_experts} experts on {self.device}, hidden {shape.hidden}, "
            f"intermediate {shape.intermediate_hidden}, {shape.weights} weights, "
            f"{self.token_format} tokens, up to {self.max_rows} rows, "
            f"{self.nbytes / 2**20:.1f} MiB, {self._work_space.state})"
        )

    @property
    def token_format(self) -> TokenFormatName:
        """That of x."""
        return self.tokens.name

    @property
    def max_rows(self) -> int:
        return self.shape.num_max_tokens_per_rank

    @property
    def device(self) -> torch.device:
        return self._work_space.device

    @property
    def nbytes(self) -> int:
        return self._work_space.nbytes

    @property
    def work_space(self) -> _WorkSpace:
        """What `deep_moe.trial.trace.record` takes to record the calls."""
        return self._work_space

    def __call__(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        weights: MegaMoEWeights,
        expert_count: torch.Tensor,
        expert_begin: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        l1_bias: torch.Tensor | None = None,
        l2_bias: torch.Tensor | None = None,
        expected_rows: int | None = None,
    ) -> torch.Tensor:
        """The experts' outputs, bfloat16, for each row of x hidden values, without routing weights.

        Args:
            x: either [local experts, N, hidden], of which expert e has the first expert_count[e]
                rows at x[e], as `LowLatencyAllToAll.dispatch` gives it; or [rows, hidden] with
                expert_begin, where expert e has the rows from expert_begin[e] on. float8_e4m3fn;
                bfloat16 with token_format "bf16"; uint8 [.., hidden/2] with "nvfp4".
            scales: [.., hidden/128] int32 or float32, [.., hidden/512] int32, or with "nvfp4"
                [.., 1 + hidden/64] int32, as the format says; None with "bf16".
            weights: what `transform_weights_for_mega_moe` returned.
            expert_count: int32 [local experts], on the device: rows of each expert.
            expert_begin: int32 [local experts], on the device: the first row of each expert.
                Experts' rows may lie anywhere in x, with gaps between them.
            l1_bias: with biases=True, what `transform_biases_for_mega_moe` returned for Linear1.
            l2_bias: the same for Linear2.
            out: where to write the result, by default a new tensor. Rows of no expert are not
                written.
            expected_rows: rows of all experts together in this call, if the caller knows it. It
                decides how fast the call is, not what it computes. By default the rows of the last
                call that the host has heard of, and max_rows before.

        Counts that do not fit x or max_rows are a MegaMoEError.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a value, shape, dtype or device that is not allowed; the
                text names it.
            MegaMoEError: the kernel gave up, or an earlier call did; `reset()` on every rank makes
                the object usable again. On a GPU the next call raises it.
            MegaMoETimeoutError: a wait took longer than `timeout_s`; the text names what is
                missing. It is a MegaMoEError.
            CompileError: NVRTC refused the kernel.
        """
        self._work_space.raise_if_unusable()
        biases = self._check(x, scales, expert_count, expert_begin, l1_bias, l2_bias, expected_rows)
        check_weights(weights, self.shape, self._settings.target.kernel, self._activation)
        is_given = out is not None
        out_size = (*x.shape[:-1], self.shape.hidden)
        if out is None:
            out = torch.empty(out_size, dtype=torch.bfloat16, device=self.device)
        else:
            require_type("out", out, torch.Tensor, "a tensor or None")
            check_tensor("out", out, torch.bfloat16, out_size, self.device)
            check_contiguous("out", out)
            check_start("out", out, _ALIGNMENT)
            read = {"x": x, "scales": scales, "expert_count": expert_count}
            refuse_shared_memory({"out": out}, {**read, "expert_begin": expert_begin})
        num_rows = out.numel() // self.shape.hidden
        if num_rows == 0:
            return out
        with used([self._work_space]):
            plan = self._find_plan(expected_rows, num_rows)
            with named_as(NAMES_OF_LAYERS):
                layer_args, occupied = args_of_weights(
                    plan, self._work_space, weights.l1, weights.l2, biases
                )
            if is_given:
                occupied.refuse_tensor("out", out)
            args = type(layer_args).from_buffer_copy(layer_args)
            args.y = out.data_ptr()
            args.wait_timeout_ns = self._settings.wait_timeout_ns
            args.num_tokens = num_rows
            args.local_x = x.data_ptr()
            args.local_x_sf = 0 if scales is None else scales.data_ptr()
            args.expert_begin = 0 if expert_begin is None else expert_begin.data_ptr()
            args.expert_count = expert_count.data_ptr()
            args.max_expert_rows = num_rows if expert_begin is not None else x.shape[1]
            recorder = self._work_space.recorder
            if recorder is not None:
                args.trace = recorder.attach(plan.config).data_ptr()
                args.trace_capacity = recorder.capacity
            gpu = self._work_space.gpu
            if gpu is not None:
                assert plan.launcher is not None
                plan.launcher.launch(args, plan.config.num_sms, gpu.current_stream())
                return out
            read = {
                "x": x,
                "scales": scales,
                "expert_count": expert_count,
                "expert_begin": expert_begin,
                **dict(zip(WEIGHT_NAMES, weights.tensors, strict=True)),
                "l1_bias": l1_bias,
                "l2_bias": l2_bias,
            }
            self._emulate(plan.config, args, read, out)
        return out

    def check(self) -> None:
        """Raise what the last call reported, if it gave up. Does not wait for a GPU.

        Raises:
            MegaMoEError: the last kernel gave up; the text says why.
            ValueError: the object was closed.
        """
        self._work_space.raise_if_closed()
        self._work_space.raise_if_failed()

    def reset(self) -> None:
        """Make the object usable again after a failed call."""
        self._work_space.reset()

    def close(self) -> None:
        """Give the work space back. The object cannot be used after this."""
        self._work_space.close()

    def _check(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        expert_count: torch.Tensor,
        expert_begin: torch.Tensor | None,
        l1_bias: torch.Tensor | None,
        l2_bias: torch.Tensor | None,
        expected_rows: int | None,
    ) -> Biases | None:
        """Raise for what is not allowed; both layers' biases, if there are some."""
        shape, device = self.shape, self.device
        num_experts, hidden = shape.num_experts, shape.hidden
        require_type("x", x, torch.Tensor, "a tensor")
        if x.ndim not in (2, 3):
            raise ValueError(
                "x must be [local experts, N, hidden], or [rows, hidden] with expert_begin; got "
                f"shape {tuple(x.shape)}"
            )
        if (x.ndim == 2) != (expert_begin is not None):
            needed = "given" if x.ndim == 2 else "None"
            raise ValueError(
                f"expert_begin must be {needed} with x of shape {tuple(x.shape)}: it goes with x "
                "of shape [rows, hidden] only"
            )
        for name, tensor in (("expert_count", expert_count), ("expert_begin", expert_begin)):
            if tensor is None and name == "expert_begin":
                continue
            require_type(name, tensor, torch.Tensor, "a tensor")
            assert tensor is not None
            check_tensor(name, tensor, torch.int32, (num_experts,), device)
            check_contiguous(name, tensor)
        rows = (num_experts, x.shape[1]) if x.ndim == 3 else (x.shape[0],)
        check_tensor("x", x, self.tokens.dtype, (*rows, self.tokens.num_elements(hidden)), device)
        check_contiguous("x", x)
        check_start("x", x, _ALIGNMENT)
        self._check_scales(scales, rows, expert_count, expert_begin)
        if expected_rows is not None:
            require_int("expected_rows", expected_rows, f"0 to max_rows ({self.max_rows})")
            if not 0 <= expected_rows <= self.max_rows:
                raise ValueError(
                    f"expected_rows must be 0 to max_rows ({self.max_rows}); got {expected_rows}"
                )
        if torch.is_grad_enabled():
            refuse_gradients(x=x)
        return check_biases_given(l1_bias, l2_bias, self._work_space)

    def _check_scales(
        self,
        scales: torch.Tensor | None,
        rows: tuple[int, ...],
        expert_count: torch.Tensor,
        expert_begin: torch.Tensor | None,
    ) -> None:
        tokens, dtype = self.tokens, self.tokens.scale_torch_dtype
        where = f"with token_format {tokens.name!r}"
        if dtype is None:
            if scales is not None:
                raise ValueError(f"scales must be None {where}; got {type(scales).__name__}")
            return
        require_type("scales", scales, torch.Tensor, f"a tensor {where}")
        assert scales is not None
        if scales.dtype is torch.float32 and dtype is not torch.float32:
            raise TypeError(
                f"scales must be {dtype} {where}; got torch.float32, which "
                'token_format="fp8_128_pow2" has, for powers of two, and "fp8_128"'
            )
        num_words = tokens.num_row_words(self.shape.hidden)
        check_tensor("scales", scales, dtype, (*rows, num_words), self.device)
        check_contiguous("scales", scales)
        if self._settings.checked and dtype is torch.float32 and tokens.rounds_scales:
            self._check_powers(scales, expert_count, expert_begin)

    @staticmethod
    def _check_powers(
        scales: torch.Tensor, expert_count: torch.Tensor, expert_begin: torch.Tensor | None
    ) -> None:
        """Raise if a scale of a row that an expert has is no power of two. Waits for them."""
        flat = scales.flatten(0, -2)
        for expert, count in enumerate(expert_count.tolist()):
            begin = expert * scales.shape[1] if expert_begin is None else int(expert_begin[expert])
            bits = flat[begin : begin + max(count, 0)].view(torch.int32)
            wrong = ((bits & 0x807FFFFF) != 0).nonzero()
            if wrong.numel():
                row, column = wrong[0].tolist()
                raise ValueError(
                    'scales must be powers of two with token_format "fp8_128_pow2": kernels fold '
                    f"them into E4M3 values; got {float(flat[begin + row, column])} for row {row} "
                    f"of local expert {expert}"
                )

    def _find_plan(self, expected_rows: int | None, num_rows: int) -> CallPlan:
        received = self._work_space.memory.status.received
        is_uneven = received >= RECEIVED_UNEVENLY
        if expected_rows is None:
            last = received & (RECEIVED_UNEVENLY - 1)
            expected_rows = expected_tokens_per_rank(self.shape, 0, last)
            if last == 0:
                expected_rows = min(num_rows, self.max_rows)
        config = _choose_config(self._choose, self.tokens.name, expected_rows, is_uneven)
        if self._work_space.recorder is not None:
            config = _traced(config)
        plan = self._plan
        if plan is not None and plan.config is config:
            return plan
        gpu = self._work_space.gpu
        if gpu is not None and plan is not None and gpu.is_capturing():
            return plan  # a capture compiles and loads nothing if there is a kernel that can do it
        self._plan = CallPlan(
            config=config,
            config_number=self._work_space.caches.number_of(config),
            num_tokens=0,
            is_checked=self._settings.checked,
            wait_timeout_ns=self._settings.wait_timeout_ns,
            launcher=None if gpu is None else launcher_of(config, gpu),
        )
        return self._plan

    def _emulate(
        self,
        config: MegaMoEConfig,
        args: CppStruct,
        read: Mapping[str, torch.Tensor | None],
        out: torch.Tensor,
    ) -> None:
        work_space, memory = self._work_space, self._work_space.memory
        regions = [
            MemoryRegion("work space", memory.addresses[0], self.nbytes, True, work_space.layout),
            MemoryRegion("wait status", memory.status_address, 64, True),
            MemoryRegion.of_tensor("out", out, is_writable=True),
            *(
                MemoryRegion.of_tensor(name, tensor, is_writable=False)
                for name, tensor in read.items()
                if tensor is not None
            ),
        ]
        if work_space.recorder is not None and work_space.recorder.memory is not None:
            stamps = work_space.recorder.memory
            regions.append(MemoryRegion.of_tensor("trace", stamps, is_writable=True))
        launch = RankLaunch(
            0,
            built_kernel(config, for_emulator=True),
            config.num_sms,
            config.num_threads,
            config.smem_bytes,
            args,
            tuple(region for region in regions if region.num_bytes),
            smem_layout=config.smem_layout,
            warp_roles=config.warp_roles,
        )
        run_rank(
            launch,
            work_space,
            {},
            num_ranks=1,
            seed=self._settings.schedule_seed,
            checked=self._settings.checked,
        )


@described_as(GroupedExperts)
def grouped_experts_workspace_size(
    max_rows: int,
    hidden: int,
    intermediate_hidden: int,
    num_local_experts: int,
    *,
    weights: WeightsName = DEFAULT_WEIGHTS,
    token_format: TokenFormatName | None = None,
    num_pool_tokens: int | None = None,
    arch: str | None = None,
) -> int:
    """Bytes of device memory that a `GroupedExperts` made from the same arguments has.

    Other arguments are as of `GroupedExperts`.

    Args:
        arch: the target, which decides the default of `token_format` with mxfp8 and nvfp4 weights.
            With these, `arch` or `token_format` must be given.

    Examples:
        Experts of deepseek-v4-pro on one of 8 ranks, for 1024 rows, in MiB:

        >>> round(grouped_experts_workspace_size(1024, 7168, 3072, 48) / 2**20)
        127

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    if token_format is None:
        token_format = (
            default_token_format(weights)
            if arch is None
            else target_of(arch).default_tokens(weights)
        )
    shape = _shape_of(
        max_rows,
        hidden,
        intermediate_hidden,
        num_local_experts,
        weights,
        token_format_of(token_format).in_products,
        num_pool_tokens,
        False,
    )
    return work_space_layout(shape).num_bytes


# Sizes of an object that its tensors give.
_GIVEN_BY = {
    "hidden": "x's hidden",
    "num_local_experts": "expert_count's length",
    "device": "x's device",
}


@described_as(GroupedExperts.__call__, GroupedExperts)
def grouped_experts(
    x: torch.Tensor,
    scales: torch.Tensor | None,
    weights: MegaMoEWeights,
    expert_count: torch.Tensor,
    expert_begin: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    intermediate_hidden: int,
    max_rows: int | None = None,
    l1_bias: torch.Tensor | None = None,
    l2_bias: torch.Tensor | None = None,
    expected_rows: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """`GroupedExperts` without an object: one is made for each kind of arguments, device and
    stream, and kept. The arguments are those of its call and, in `options`, of its constructor, but
    for what the weights know.

    Other arguments and errors are as of a `GroupedExperts` and its call.

    Args:
        max_rows: by default all rows of x, which for [local experts, N, hidden] may be far more
            than ever come; then say how many. Each kept object has a work space of
            `grouped_experts_workspace_size` bytes.
        options: further arguments of `GroupedExperts`.
    """
    require_type("x", x, torch.Tensor, "a tensor")
    require_type("expert_count", expert_count, torch.Tensor, "a tensor")
    require_type("weights", weights, MegaMoEWeights, WEIGHTS_WORDS)
    if "device" in options:
        raise TypeError(f"device must not be given, it is that of x; got {options['device']!r}")
    hidden = x.shape[-1] if x.ndim else 0
    num_rows = x.numel() // max(hidden, 1)
    if x.dtype == torch.uint8:
        hidden *= 2  # two E2M1 values in each
    if max_rows is None:
        max_rows = max(num_rows, 1)
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    given = {
        "token_format": weights.token_format,
        **options,
        "weights": weights.weights,
        "biases": l1_bias is not None or l2_bias is not None,
    }
    hashable = {
        name: frozenset(value.items()) if isinstance(value, Mapping) else value
        for name, value in given.items()
    }
    sizes = (max_rows, hidden, intermediate_hidden, expert_count.numel())
    try:
        key = (*sizes, x.device, stream, frozenset(hashable.items()))
        experts = _kept.get(key)
    except TypeError:  # no argument may be what cannot be hashed: the constructor names it
        with named_as(_GIVEN_BY):
            GroupedExperts(*sizes, device=x.device, **given)
        raise
    if experts is None:
        with named_as(_GIVEN_BY):
            experts = _kept.put(key, GroupedExperts(*sizes, device=x.device, **given))
    return experts(
        x,
        scales,
        weights,
        expert_count,
        expert_begin,
        out,
        l1_bias=l1_bias,
        l2_bias=l2_bias,
        expected_rows=expected_rows,
    )


_kept: BoundedCache[tuple[Any, ...], GroupedExperts] = BoundedCache(16)


class _WorkSpace(RankBuffer):
    """What calls share; `args_of_weights` takes it for a symmetric buffer of one rank."""

    def __init__(self, shape: MoEShape, memory: HostMemory | DeviceMemory) -> None:
        super().__init__("GroupedExperts", work_space_layout(shape), memory, None)
        self.shape = shape
        self.caches = CallCaches()
        # While calls are recorded: see deep_moe/trial/trace/.
        self.recorder: Recorder | None = None


def _shape_of(
    max_rows: int,
    hidden: int,
    intermediate_hidden: int,
    num_local_experts: int,
    weights: WeightsName,
    token_format: TokenFormatName,
    num_pool_tokens: int | None,
    biases: bool,
) -> MoEShape:
    """The experts as a layer of one rank, whose tokens have one slot."""
    allowed = f"1 to {MAX_ROWS}"
    require_int("max_rows", max_rows, allowed)
    if not 1 <= max_rows <= MAX_ROWS:
        raise ValueError(f"max_rows must be {allowed}; got {max_rows}")
    require_int("hidden", hidden, f"a positive multiple of {K_BLOCK}")
    if hidden <= 0 or hidden % K_BLOCK:
        raise ValueError(
            f"hidden must be a positive multiple of {K_BLOCK}, since rows are the caller's and "
            f"cannot be padded; got {hidden}"
        )
    allowed = f"1 to {MAX_EXPERTS}"
    require_int("num_local_experts", num_local_experts, allowed)
    if not 1 <= num_local_experts <= MAX_EXPERTS:
        raise ValueError(f"num_local_experts must be {allowed}; got {num_local_experts}")
    return MoEShape(
        num_ranks=1,
        num_experts=num_local_experts,
        num_topk=1,
        hidden=hidden,
        intermediate_hidden=intermediate_hidden,
        num_max_tokens_per_rank=max_rows,
        num_pool_tokens=num_pool_tokens,
        weights=weights,
        token_format=token_format,
        biases=biases,
    )


def _checked_format(
    weights: WeightsName, token_format: TokenFormatName | None, target: Target
) -> TokenFormat:
    target.weights_of(weights)  # or an error
    allowed = token_formats_for(weights, target.name)
    if token_format is None:
        return token_format_of(allowed[0])
    require_type("token_format", token_format, str, "a str or None")
    if token_format in allowed:
        return token_format_of(token_format)
    words = f"token_format must be {' or '.join(map(repr, allowed))} with {weights} weights"
    reason = {
        "fp8_128": ": its scales need be no powers of two, which kernels fold into values but for "
        "fp8 weights on sm_90a",
        "fp8_token": ": only fp8 weights go with one scale for a whole token",
        "bf16": ": tokens are quantized when they are dispatched",
    }
    why = "" if allowed == ("bf16",) else reason.get(token_format, "")
    raise ValueError(f"{words} on {target.name}; got {token_format!r}{why}")


@lru_cache(maxsize=64)
def _traced(config: MegaMoEConfig) -> MegaMoEConfig:
    return replace(config, trace=True)


@lru_cache(maxsize=1024)
def _choose_config(
    choose: ConfigChooser, token_format: TokenFormatName, expected_rows: int, is_uneven: bool
) -> MegaMoEConfig:
    return replace(choose(expected_rows, is_uneven), local_tokens=token_format)
