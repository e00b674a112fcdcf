"""`MoELayer`: the differentiable layer as a module."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deep_moe.activations import Activation
from deep_moe.devices import named_device
from deep_moe.fused.checks import require_type
from deep_moe.heuristics.shape import MAX_SIZE, require_int
from deep_moe.targets import target_for
from deep_moe.tensor_memory import check_dense, check_memory

from .experts import FP8_DATA_GRADIENTS, Precision
from .functional import Forward, moe
from .gathered_weights import gatherable_parameter
from .groups import (
    Shared,
    is_dtensor,
    num_ranks_of,
    refuse_averages_of_ddp,
    refuse_averages_of_fsdp,
)
from .operators import gated_activation_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.activations import ActivationName
    from deep_moe.fused.buffer import SymmBuffer
    from deep_moe.split.throughput import AllToAll
    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName
    from deep_moe.weights.layers import ExpertWeights


class MoELayer(nn.Module):
    """The experts of a mixture-of-experts layer; the router is the caller's.

    Parameters are `w1`, `w3` [experts, hidden, intermediate] and `w2` [experts, intermediate,
    hidden]; with biases also `b1`, `b3` [experts, intermediate] and `b2` [experts, hidden].

    Args:
        hidden: size of a token.
        intermediate: size between Linear1 and Linear2.
        num_experts: number of experts of all ranks together.
        fuse_w1_w3: W1 and W3 are one parameter `w1` [experts, hidden, 2 * intermediate], gate
            first, and `w3` is None: fewer and larger products.
        biases: three more parameters, float32, zero at first.
        group: ranks that share the experts, a process group or an `AllToAll`; this module has the
            parameters of its rank's part.
        precision: as in `deep_moe.moe`.
        recompute: as in `deep_moe.moe`.
        activation: as in `deep_moe.moe`.
        activation_clamp: as in `deep_moe.moe`.
        max_recv_slots: as in `deep_moe.moe`.
        keep_received: as in `deep_moe.moe`.
        quantize_kept: as in `deep_moe.moe`.
        fuse_wgrad_accumulation: as in `deep_moe.moe`.
        quantize_gathered: FSDP2 (`fully_shard`) gathers w1, w3 and w2 as E4M3 with scales in place
            of BF16. Each rank quantizes its own shards, anew for each gather. Outputs and gradients
            have the same bits. For precision "fp8_dgrad" and "fp8_wgrad", which multiply nothing
            but E4M3 with weights.
        arch: as in `deep_moe.moe`.
        forward: as in `deep_moe.moe`.
        sym_buffer: as in `deep_moe.moe`.
        device: of the parameters.
        dtype: of the parameters: bfloat16, or float64 to check gradients.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """

    w3: nn.Parameter | None
    b1: nn.Parameter | None
    b3: nn.Parameter | None
    b2: nn.Parameter | None

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        *,
        group: ProcessGroup | AllToAll | None = None,
        fuse_w1_w3: bool = False,
        biases: bool = False,
        precision: Precision = "bf16",
        recompute: bool = False,
        activation: ActivationName | Activation = "swiglu",
        activation_clamp: float | None = None,
        max_recv_slots: int | None = None,
        keep_received: bool = False,
        quantize_kept: bool = False,
        fuse_wgrad_accumulation: bool = False,
        quantize_gathered: bool = False,
        arch: str | None = None,
        forward: Forward = "training",
        sym_buffer: SymmBuffer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        sizes = {"hidden": hidden, "intermediate": intermediate, "num_experts": num_experts}
        for name, size in sizes.items():
            if not 1 <= require_int(name, size, "at least 1") < MAX_SIZE:
                raise ValueError(f"{name} must be at least 1 and below 2^31; got {size}")
        flags = {"fuse_w1_w3": fuse_w1_w3, "biases": biases, "quantize_gathered": quantize_gathered}
        for name, value in flags.items():
            require_type(name, value, bool, "a bool")
        if quantize_gathered and precision not in FP8_DATA_GRADIENTS:
            raise ValueError(
                "precision must be 'fp8_dgrad' or 'fp8_wgrad' with quantize_gathered, because the "
                f"backward pass of others multiplies unrounded weights; got {precision!r}"
            )
        if dtype not in (torch.bfloat16, torch.float64):
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float64; got {dtype}")
        device = None if device is None else named_device(device)
        self.hidden = hidden
        self.intermediate = intermediate
        self.num_experts = num_experts
        self.precision: Precision = precision
        self.recompute = recompute
        self.activation = gated_activation_of(activation, activation_clamp)
        self.arch = arch
        self.max_recv_slots = max_recv_slots
        self.keep_received = keep_received
        self.quantize_kept = quantize_kept
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.quantize_gathered = quantize_gathered
        self.forward_kind: Forward = forward
        self._num_ranks = num_ranks = num_ranks_of(group)
        self._shared_group: Shared[ProcessGroup | AllToAll] = Shared(group)
        self._shared_buffer = Shared(sym_buffer)
        if num_experts % num_ranks:
            raise ValueError(
                f"num_experts must be a multiple of the group's {num_ranks} ranks; "
                f"got {num_experts}"
            )
        num_local_experts = num_experts // num_ranks

        def parameter(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_local_experts, *shape, device=device, dtype=dtype))

        width = 2 * intermediate if fuse_w1_w3 else intermediate
        self.w1 = parameter(hidden, width)
        self.w3 = None if fuse_w1_w3 else parameter(hidden, width)
        self.w2 = parameter(intermediate, hidden)
        bias_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.b1 = parameter(intermediate, dtype=bias_dtype) if biases else None
        self.b3 = parameter(intermediate, dtype=bias_dtype) if biases else None
        self.b2 = parameter(hidden, dtype=bias_dtype) if biases else None
        self._make_gatherable()
        self.reset_parameters()

    @property
    def group(self) -> ProcessGroup | AllToAll | None:
        """Of the ranks that share the experts. Copies of the module have the same; `torch.save`
        leaves it out, and a module that was loaded is given one of as many ranks."""
        if self._shared_group.is_lost:
            raise RuntimeError(
                f"this layer was saved with its part of the experts of {self._num_ranks} ranks, "
                "and a group is not saved: set layer.group to a group of as many ranks"
            )
        return self._shared_group.value

    @group.setter
    def group(self, group: ProcessGroup | AllToAll | None) -> None:
        if num_ranks_of(group) != self._num_ranks:
            raise ValueError(
                f"group must have {self._num_ranks} ranks, as this layer has its part of the "
                f"experts of so many; got {num_ranks_of(group)}"
            )
        self._shared_group = Shared(group)

    @property
    def sym_buffer(self) -> SymmBuffer | None:
        """What forward "serving" goes through. Copies of the module have the same; `torch.save`
        leaves it out, and a module that was loaded is given another."""
        if self._shared_buffer.is_lost:
            raise RuntimeError(
                "this layer was saved with a sym_buffer, and a buffer is not saved: set "
                "layer.sym_buffer to a buffer of as many ranks"
            )
        return self._shared_buffer.value

    @sym_buffer.setter
    def sym_buffer(self, sym_buffer: SymmBuffer | None) -> None:
        self._shared_buffer = Shared(sym_buffer)

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP2 puts its shards in the place of parameters, whatever module it was called with.
        if is_dtensor(value) and self.group is not None and self._num_ranks > 1:
            refuse_averages_of_fsdp(self.group, value.device_mesh)
        super().__setattr__(name, value)

    def _make_gatherable(self) -> None:
        """Give weights the type that says how FSDP2 gathers them. What loads them replaces them."""
        if not self.quantize_gathered:
            return
        for name in ("w1", "w3", "w2"):
            weight = self._parameters.get(name)
            if weight is not None:
                self._parameters[name] = gatherable_parameter(weight)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_gatherable()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._make_gatherable()

    def reset_parameters(self) -> None:
        """Weights as in `nn.Linear`, biases zero."""
        with torch.no_grad():
            for weight in (self.w1, self.w3, self.w2):
                if weight is not None:
                    bound = 1 / math.sqrt(weight.shape[1])
                    weight.uniform_(-bound, bound)
            for bias in (self.b1, self.b3, self.b2):
                if bias is not None:
                    bias.zero_()

    def forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """[..., hidden] for x [..., hidden], topk_idx and topk_weights [..., topk].

        Args:
            x: bfloat16 [tokens, hidden].
            topk_idx: int64 or int32 [tokens, topk], -1 for an unused slot.
            topk_weights: float32 [tokens, topk], or bfloat16, as FSDP2's mixed precision has it.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a value, shape, dtype or device that is not allowed; the
                text names it.
            RuntimeError: the layer was loaded and has no group or buffer yet; or as of `moe`.
        """
        given = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights}
        for name, tensor in given.items():
            require_type(name, tensor, torch.Tensor, "a tensor")
            check_dense(name, tensor)
            # Flattened, rows of other lengths could pass for as many values in other rows.
            is_x = name == "x"
            if (
                tensor.ndim < 1
                or tensor.shape[-1] < 1
                or (is_x and tensor.shape[-1] != self.hidden)  # a compiler's sizes are no numbers
            ):
                columns = f"hidden ({self.hidden})" if is_x else "topk"
                raise ValueError(f"{name} must be [..., {columns}]; got {tuple(tensor.shape)}")
        if self._num_ranks > 1 and self.group is not None:
            refuse_averages_of_ddp(self.group, self.parameters(recurse=False))
        if topk_weights.dtype == torch.bfloat16:
            topk_weights = topk_weights.float()
        out = moe(
            x.reshape(-1, self.hidden),
            topk_idx.reshape(-1, topk_idx.shape[-1]),
            topk_weights.reshape(-1, topk_weights.shape[-1]),
            self.w1,
            self.w3,
            self.w2,
            b1=self.b1,
            b3=self.b3,
            b2=self.b2,
            group=self.group,
            precision=self.precision,
            recompute=self.recompute,
            activation=self.activation,
            max_recv_slots=self.max_recv_slots,
            keep_received=self.keep_received,
            quantize_kept=self.quantize_kept,
            fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
            arch=self.arch,
            forward=self.forward_kind,
            sym_buffer=self.sym_buffer,
        )
        # Not a view where none is needed: FSDP2's hooks are lost where one is changed in place.
        return out if x.ndim == 2 else out.view(x.shape)

    @torch.no_grad()
    def serving_weights(
        self, weights: WeightsName, token_format: TokenFormatName | None = None
    ) -> ExpertWeights:
        """This rank's weights as an engine loads them: what forward "serving" lays out.

        Args:
            weights: the format, as of `transform_weights_for_mega_moe`.
            token_format: that of the tokens; by default the one that goes with the weights.

        Returns `l1, l2` as checkpoints have them: what `transform_weights_for_mega_moe` and
        `deep_moe.checkpoint.save_experts` take. Raises ValueError for formats that the target
        does not have.
        """
        from .serving import serving_weights_in_parts

        target = target_for(self.arch, self.w1.device)
        on_target = target.weights_of(weights, token_format)
        return serving_weights_in_parts(self.w1, self.w3, self.w2, on_target)

    @torch.no_grad()
    def load_transposed(self, l1: torch.Tensor, l2: torch.Tensor) -> None:
        """Take the weights of a checkpoint, whose matrices are [out, in], of any float type.

        Args:
            l1: [experts, 2 * intermediate, hidden], gate's rows above up's, as
                `deep_moe.checkpoint.load_experts` gives BF16 weights.
            l2: [experts, hidden, intermediate], likewise.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a value, shape, dtype or device that is not allowed; the
                text names it.
        """
        intermediate, hidden = self.intermediate, self.hidden
        shapes = {
            "l1": (l1, (self.w1.shape[0], 2 * intermediate, hidden)),
            "l2": (l2, (self.w1.shape[0], hidden, intermediate)),
        }
        for name, (tensor, shape) in shapes.items():
            require_type(name, tensor, torch.Tensor, "a tensor")
            check_dense(name, tensor)
            if not tensor.is_floating_point():
                raise TypeError(f"{name} must be of a float type; got {tensor.dtype}")
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must have shape {shape}; got {tuple(tensor.shape)}")
            check_memory(name, tensor)
        if self.w3 is None:
            self.w1.copy_(l1.transpose(1, 2))
        else:
            self.w1.copy_(l1[:, :intermediate].transpose(1, 2))
            self.w3.copy_(l1[:, intermediate:].transpose(1, 2))
        self.w2.copy_(l2.transpose(1, 2))

    def extra_repr(self) -> str:
        return (
            f"hidden={self.hidden}, intermediate={self.intermediate}, "
            f"num_experts={self.num_experts}, precision={self.precision!r}, "
            f"activation={self.activation}"
        )
