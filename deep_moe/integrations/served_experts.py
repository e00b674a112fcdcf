"""A layer's experts as an engine serves them: laid out once, called in every step.

This module keeps three rules between engine and adapter. Tensors stay where they are, so captured
graphs see weights that were replaced, and experts that a load balancer moved. Every tensor is
expert-major, so such a balancer can permute experts in place. Nothing waits for the GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from deep_moe.biases.per_expert import MegaMoEBiases, transform_biases_for_mega_moe
from deep_moe.compat.deep_gemm.operands import packed_weights
from deep_moe.errors import DeepMoEError, RequantizationWarning
from deep_moe.formats.sizes import K_BLOCK
from deep_moe.fused.input_preparation import prepare_inputs, route_and_prepare_inputs
from deep_moe.fused.mega_moe import mega_moe
from deep_moe.heuristics.shape import MoEShape
from deep_moe.targets import TARGETS, choose_config, target_for, target_of_capability
from deep_moe.tokens import token_format
from deep_moe.weights import weight_format
from deep_moe.weights.layers import (
    ExpertWeights,
    LayerTensors,
    LayerWeights,
    MegaMoEWeights,
    Pair,
    layer_weights,
)
from deep_moe.weights.transform import (
    empty_weights_for_mega_moe,
    inverse_transform_weights,
    transform_weights_for_mega_moe,
)

from .engine_form import LAYERS, EngineForm, in_engines_words
from .kernels_ahead import KernelsAhead
from .shared_buffers import LayerSizes, SharedBuffers
from .switch import ON, SM100_VARIABLE, read_requantize, read_sm100, read_static_scales
from .unsupported import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.activations import Activation
    from deep_moe.fused.buffer import SymmBuffer
    from deep_moe.heuristics.router import Router


class RoutedTokens(NamedTuple):
    """That a layer has routed into a buffer. owner: the layer's own object."""

    owner: object
    address: int
    num_tokens: int


# Of all models of this process: a draft model's layers of the same sizes take the same buffer.
buffers = SharedBuffers()
kernels = KernelsAhead()
_routed: WeakKeyDictionary[SymmBuffer, RoutedTokens] = WeakKeyDictionary()


class ServedExperts:
    """The experts of one layer that lie on this rank, and the buffer that calls go through.

    sizes: num_experts of all ranks, redundant copies included.
    group: of the ranks that the experts are spread over, None for one rank.
    max_tokens_per_rank: most tokens of one call.
    arch: a target's name; None for that of `device`.
    form: how the engine keeps the weights that `load` is given; None: as checkpoints of MXFP4, FP8
        with scales of blocks, and BF16 have them.
    names: without a form, of the engine's tensors in `load`, of both layers, for reasons.

    Making one is a meeting of all ranks, and so is `load`, where `agree` says. Raises
    UnsupportedError for sizes that the kernel does not take, before ranks meet.
    """

    def __init__(
        self,
        sizes: LayerSizes,
        activation: Activation,
        group: ProcessGroup | None,
        device: torch.device,
        max_tokens_per_rank: int,
        arch: str | None = None,
        form: EngineForm | None = None,
        names: Sequence[str] = (),
    ) -> None:
        num_ranks = 1 if group is None else group.size()
        check_sizes(
            sizes,
            num_ranks,
            max_tokens_per_rank,
            arch,
            device,
            form,
            has_gate=activation.has_gate,
        )
        self.sizes = sizes
        self.activation = activation
        self.group = group
        self.device = device
        self.max_tokens_per_rank = max_tokens_per_rank
        self.arch = arch
        self.form = form
        self.names = names if form is None else form.weight_tensors
        self.num_local_experts = sizes.num_experts // num_ranks
        self.weights: MegaMoEWeights | None = None
        self.biases: MegaMoEBiases | None = None
        # Of all tokens, float32 [1], in place of each token's own, if that was asked for: what this
        # rank's experts have for it, and, once ranks have met, the largest that any rank's have.
        self.has_static_scales = False
        self.local_token_scale: torch.Tensor | None = None
        self.token_scale: torch.Tensor | None = None
        # FP8 weights may be rounded anew, and the farthest that those of a layer of an expert were.
        self.may_requantize = sizes.weights == "fp8" and read_requantize()
        self.relative_error: float | None = None
        self._owner = object()
        self._is_mixed = False  # of old and new weights, when some that replace others failed

    def load(
        self,
        l1: LayerTensors | torch.Tensor,
        l2: LayerTensors | torch.Tensor,
        biases: Pair | None = None,
        *,
        is_interleaved: bool = False,
        are_made_up: bool = False,
    ) -> None:
        """Lay out weights as checkpoints have them, gate rows before up rows, expert by expert.

        The first time this makes tensors; later it writes into the same ones, on the current
        stream, so that graphs that were captured see the new weights.

        l1, l2: with a form, its tensors in their order. Else (values, scales). MXFP4: packed in
        bytes [E, N, K/2], with a UE8M0 byte or a power of two in float32 for each 32 values. FP8:
        float8_e4m3fn [E, N, K], float32 scales. BF16: values alone, bfloat16 [E, N, K].
        biases: of both layers, bfloat16 or float32 [E, N], if the sizes say that there are some.
        is_interleaved: rows of gate and up alternate in l1 and its biases.
        are_made_up: weights were not loaded, so that they need not be numbers; with a form only.

        Raises UnsupportedError for weights that the kernel cannot take, the first time; later
        DeepMoEError, as the weights that were there are gone: so are calls until others are loaded.
        """
        weights = self.weights
        for name, layer in (("l1", l1), ("l2", l2)):
            self._check_num_experts(name, (layer,) if isinstance(layer, torch.Tensor) else layer)
        if biases is not None:
            self._check_num_experts("biases", biases)
        try:
            new_biases = self._laid_out_biases(biases, is_interleaved=is_interleaved)
        except (TypeError, ValueError) as error:
            raise self._refusal(str(error)) from error
        if weights is None:
            weights = empty_weights_for_mega_moe(
                self.num_local_experts,
                self.sizes.hidden,
                self.sizes.intermediate_hidden,
                arch=self.arch,
                device=self.device,
                weights=self.sizes.weights,
                token_format=self.sizes.token_format,
                has_gate=self.activation.has_gate,
            )
        self._is_mixed = True
        for i in range(self.num_local_experts):
            try:
                self._transformed(
                    self._one("l1", l1, i, is_interleaved=is_interleaved, are_made_up=are_made_up),
                    self._one("l2", l2, i, are_made_up=are_made_up),
                    weights.expert(i),
                )
            except (TypeError, ValueError) as error:
                raise self._refusal(f"expert {i}: {error}") from error
        self.weights = weights
        if self.biases is None or new_biases is None:
            self.biases = new_biases
        else:
            for own, new in zip(self.biases, new_biases, strict=True):
                own.copy_(new)
        self._is_mixed = False

    def replace_expert(self, place: int, l1: LayerTensors | None, l2: LayerTensors | None) -> None:
        """Write new weights of the local expert at `place`, or of one of its layers where the
        other is None, into the same memory, on the current stream.

        l1, l2: as `load` takes them, of one expert, [1, ...].

        Raises DeepMoEError for weights that the kernel cannot take: the expert then has those that
        it had.
        """
        assert self.weights is not None
        own = self.weights.expert(place)
        try:
            new_l1 = None if l1 is None else self._one("l1", l1, 0)
            new_l2 = None if l2 is None else self._one("l2", l2, 0)
            # The transformation takes both layers. What it makes of one that stays is not used.
            if new_l1 is None or new_l2 is None:
                kept = self._as_loaded(own)
                new_l1, new_l2 = new_l1 or kept.l1, new_l2 or kept.l2
            made = self._transformed(new_l1, new_l2)
        except (TypeError, ValueError) as error:
            raise self._refusal(str(error)) from error
        for given, new, old in zip((l1, l2), made, own, strict=True):
            if given is not None:
                for new_tensor, old_tensor in zip(new, old, strict=True):
                    old_tensor.copy_(new_tensor)

    def _transformed(
        self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights | None = None
    ) -> MegaMoEWeights:
        """In the kernel's layout. How far weights were rounded anew goes to `relative_error`."""
        with warnings.catch_warnings(record=self.may_requantize) as told:
            if self.may_requantize:
                warnings.simplefilter("always", RequantizationWarning)
            made = transform_weights_for_mega_moe(
                l1,
                l2,
                self.arch,
                weights=self.sizes.weights,
                token_format=self.sizes.token_format,
                requantize=self.may_requantize,
                out=out,
            )
        for warning in told or ():
            if isinstance(warning.message, RequantizationWarning):
                own = self.relative_error or 0.0
                self.relative_error = max(own, warning.message.relative_error)
            else:
                warnings.warn(warning.message, stacklevel=3)
        return made

    @property
    def rounding_words(self) -> str:
        """For an engine's log, behind what runs the experts."""
        if self.relative_error is None:
            return ""
        return f", weights rounded anew, by up to {self.relative_error:.1%} of a layer's size"

    def _as_loaded(self, weights: MegaMoEWeights) -> ExpertWeights:
        return inverse_transform_weights(
            weights.l1,
            weights.l2,
            self.arch,
            weights=self.sizes.weights,
            token_format=self.sizes.token_format,
            hidden=self.sizes.hidden,
            intermediate_hidden=self.sizes.intermediate_hidden,
            has_gate=self.activation.has_gate,
        )

    def _refusal(self, reason: str) -> Exception:
        reason = in_engines_words(reason, self.names)
        if self.weights is None:
            return UnsupportedError(reason)
        return DeepMoEError(f"weights that replace others cannot be laid out: {reason}")

    def _check_num_experts(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        for place, tensor in enumerate(tensors):
            if tensor.dim() == 0 or tensor.shape[0] != self.num_local_experts:
                raise self._refusal(
                    f"{name}[{place}] must be of {self.num_local_experts} experts; got shape "
                    f"{[*tensor.shape]}"
                )

    def _laid_out_biases(
        self, biases: Pair | None, *, is_interleaved: bool
    ) -> MegaMoEBiases | None:
        if biases is None:
            return None
        first = gate_before_up(biases[0]) if is_interleaved else biases[0]
        return transform_biases_for_mega_moe(
            first,
            biases[1],
            self.arch,
            weights=self.sizes.weights,
            token_format=self.sizes.token_format,
        )

    def _one(
        self,
        name: str,
        layer: LayerTensors | torch.Tensor,
        expert_idx: int,
        *,
        is_interleaved: bool = False,
        are_made_up: bool = False,
    ) -> LayerWeights:
        """One expert's, as `transform_weights_for_mega_moe` takes them."""
        one = slice(expert_idx, expert_idx + 1)
        tensors = [t[one] for t in ((layer,) if isinstance(layer, torch.Tensor) else layer)]
        if self.form is not None:
            is_l1 = name == "l1"
            own, num_matrices = (
                (LAYERS[0], self.activation.num_l1_matrices) if is_l1 else (LAYERS[1], 1)
            )
            return self.form.weights_of(own, tensors, num_matrices, are_made_up=are_made_up)
        if is_interleaved:
            tensors[:2] = [gate_before_up(tensor) for tensor in tensors[:2]]
        if len(tensors) == 1:
            return layer_weights(name, tensors[0], weight_format(self.sizes.weights))
        is_packed = self.sizes.weights == "mxfp4"
        return LayerWeights(*(packed_weights(name, tensors) if is_packed else tensors))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the kernel reads: values of both layers, each followed by its scales, if the format
        has some; then both layers' biases, if there are some. Those of one byte as uint8, which
        every collective takes. Experts may be permuted in them between calls.

        Values and scales are [E, ...] in two dimensions, biases [E, N, 1]. Checkpoints never have
        these shapes, so that torch refuses to copy what they have into this memory.
        """
        assert self.weights is not None
        own = [tensor for layer in self.weights for tensor in layer if tensor.numel()]
        return (
            *(_bytes(tensor).flatten(1) for tensor in own),
            *(bias.unsqueeze(-1) for bias in self.biases or ()),
        )

    def whole_weights(self) -> MegaMoEWeights:
        """For a call. Raises DeepMoEError if there are none, or some were replaced when it turned
        out that others cannot be laid out."""
        if self.weights is None or self._is_mixed:
            raise DeepMoEError("the layer has not got all of its weights: load them again")
        return self.weights

    def run(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        expected_tokens_per_rank: int | None = None,
    ) -> None:
        """y [tokens, hidden], bfloat16: the weighted sums of each token's experts. Every rank of
        the group must call this; tokens may be 0.

        x: as y. topk_ids: int32 or int64 [tokens, topk], places of experts, -1 for none.
        topk_weights: float32 or bfloat16 [tokens, topk]. Or both as `route` has returned them for
        x: the tokens are prepared then.
        expected_tokens_per_rank: the mean over ranks, by default this rank's own number.
        """
        weights = self.whole_weights()
        num_tokens = x.shape[0]
        buffer = self._buffer_for(num_tokens)
        if num_tokens and topk_ids.data_ptr() == buffer.topk_idx.data_ptr():
            if _routed.get(buffer) != self._tokens(x):
                raise DeepMoEError(
                    "topk_ids lie in the buffer of the kernel's inputs, where other tokens were "
                    "prepared since: copy them to use them later"
                )
        elif num_tokens:
            _routed.pop(buffer, None)
            prepare_inputs(
                x.contiguous(),
                topk_ids.contiguous(),
                topk_weights.contiguous(),
                buffer,
                token_scale=self.token_scale,
                arch=self.arch,
            )
        # Said always, so that the tile follows from the step's size alone: a graph is captured with
        # the one that its replays need.
        expected = num_tokens if expected_tokens_per_rank is None else expected_tokens_per_rank
        mega_moe(
            y,
            weights,
            buffer,
            activation=self.activation,
            l1_bias=self.biases and self.biases.l1,
            l2_bias=self.biases and self.biases.l2,
            expected_tokens_per_rank=min(max(expected, 1), self.max_tokens_per_rank),
            arch=self.arch,
        )

    def route(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        router: Router,
        *,
        correction_bias: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts of tokens that `run` gets next, and prepare these in the same launch.

        x: as `run` gets it. The others: as `route_and_prepare_inputs` has them.

        Returns topk_weights and topk_ids, which lie in the buffer: until other tokens are prepared.
        """
        num_tokens = x.shape[0]
        buffer = self._buffer_for(num_tokens)
        _routed.pop(buffer, None)
        route_and_prepare_inputs(
            x.contiguous(),
            router_logits,
            buffer,
            router,
            correction_bias=correction_bias,
            padding_mask=padding_mask,
            token_scale=self.token_scale,
            arch=self.arch,
        )
        _routed[buffer] = self._tokens(x)
        return buffer.topk_weights[:num_tokens], buffer.topk_idx[:num_tokens]

    def _tokens(self, x: torch.Tensor) -> RoutedTokens:
        return RoutedTokens(self._owner, x.data_ptr(), x.shape[0])

    def _buffer_for(self, num_tokens: int) -> SymmBuffer:
        """The buffer, when its kernels are there. Raises ValueError for too many tokens."""
        if num_tokens > self.max_tokens_per_rank:
            raise ValueError(
                f"x must have at most {self.max_tokens_per_rank} tokens, the engine's limit of a "
                f"step; got {num_tokens}"
            )
        buffer = self.buffer()
        if not kernels.are_compiled:
            kernels.wait()
        return buffer

    def _agree_on_token_scale(self) -> None:
        """A meeting of all ranks. The tensor stays where it is, so that graphs see another scale.
        Raises UnsupportedError, on all ranks, if only some of them have one."""
        own = self.local_token_scale
        found = torch.tensor([0.0 if own is None else own.item(), own is None, own is not None])
        if self.group is not None:
            of_ranks = found.to(self.device)
            dist.all_reduce(of_ranks, dist.ReduceOp.MAX, group=self.group)
            found = of_ranks.cpu()
        largest, is_missing, is_there = found.tolist()
        if is_missing and is_there:
            raise UnsupportedError("only some ranks' experts have scales of tokens")
        if is_missing:
            return  # or those of the weights before stay
        if self.token_scale is None:
            self.token_scale = torch.empty(1, dtype=torch.float32, device=self.device)
        self.token_scale.fill_(largest)

    def prepare(self) -> None:
        """Before serving, and before an engine looks how much memory is left: make the buffer, and
        begin to compile all kernels of its calls, of which the first waits for them.

        Raises UnsupportedError, on all ranks, if there can be no buffer: ranks whose GPUs are not
        linked, for one; or if only some ranks have a scale of tokens. So engines call this before
        they give up weights of their own.
        """
        if self.has_static_scales:
            self._agree_on_token_scale()
        try:
            buffer = self.buffer()
        except ValueError as error:
            raise UnsupportedError(str(error)) from None
        kernels.begin(buffer, self.activation, has_token_scale=self.token_scale is not None)

    def renew(self) -> None:
        """Behind a replacement of weights: an engine may have slept before, and given the memory of
        PyTorch's allocator away with what it held. The work space of one rank lies there, and
        begins anew; of several ranks it lies elsewhere."""
        if self.has_static_scales:
            self._agree_on_token_scale()
        if self.group is None:
            self.buffer().reset()

    def buffer(self) -> SymmBuffer:
        """The buffer that all layers of these sizes share. Made at the first call of this, which is
        a meeting of all ranks."""
        return buffers.buffer(self.group, self.device, self.sizes, self.max_tokens_per_rank)


def static_scales(form: EngineForm | None, sizes: LayerSizes) -> str | None:
    """Name of the parameter with a checkpoint's scales of tokens, if the user asks for these and
    tokens have one each in the kernel."""
    if form is None or not token_format(sizes.token_format).has_one_scale:
        return None
    return form.token_scales if read_static_scales() else None


def check_sizes(
    sizes: LayerSizes,
    num_ranks: int,
    max_tokens_per_rank: int,
    arch: str | None,
    device: torch.device,
    form: EngineForm | None = None,
    *,
    has_gate: bool = True,
) -> None:
    """Raise UnsupportedError for sizes that there is no kernel for; and in FP8 for those that are
    no multiples of 128: stacked, gate and up may have a block of 128 rows in common.

    arch: a target's name, None for that of `device`. form: of weights, as `ServedExperts` has it.
    has_gate: whether Linear1 has rows of gate.
    """
    if form is None:
        has_blocks = sizes.weights == "fp8" and sizes.token_format != "fp8_token"
        rows = K_BLOCK if has_blocks else 1
    else:
        rows = form.rows_of_scale
    for name in ("hidden", "intermediate_hidden"):
        size = getattr(sizes, name)
        if size % rows:
            raise UnsupportedError(
                f"{name} must be a multiple of {rows} with {sizes.weights} weights, of which "
                f"{rows} rows share scales; got {size}"
            )
    try:
        shape = MoEShape(
            num_ranks=num_ranks,
            num_max_tokens_per_rank=max_tokens_per_rank,
            **sizes._asdict(),
            has_gate=has_gate,
        )
        # The limits of kernels, the number of a rank's experts for one. They are the same whatever
        # the number of tokens, but for tiles that take more shared memory.
        target = target_for(arch, device)
        for num_tokens in (0, max_tokens_per_rank):
            choose_config(shape, num_tokens, arch=target.name)
    except (TypeError, ValueError) as error:
        raise UnsupportedError(str(error)) from None


def arch_on(device: torch.device, emulated_arch: str | None) -> str | None:
    """The target for experts on `device`: None, for that of the GPU, or `emulated_arch` where there
    is no GPU. Raises UnsupportedError if there is neither, and for a GPU whose kernel nobody has
    run yet, unless the user asks for it (`read_sm100`)."""
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        target = target_of_capability((major, minor))
        if target is None:
            gpus = "; ".join(target.gpus for target in TARGETS.values())
            raise UnsupportedError(
                f"there is no kernel for compute capability {major}.{minor}, only for {gpus}"
            )
        if not target.was_run and not read_sm100():
            raise UnsupportedError(
                f"the kernel for {target.gpus} has run in the emulator only; "
                f"{SM100_VARIABLE}={ON} runs it all the same"
            )
        return None
    if device.type != "cpu" or emulated_arch is None:
        raise UnsupportedError("there is no NVIDIA GPU")
    return emulated_arch


def gate_before_up(rows: torch.Tensor) -> torch.Tensor:
    """Rows of gate and up that alternate along the second axis, those of gate first."""
    return torch.cat([rows[:, ::2], rows[:, 1::2]], dim=1)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
