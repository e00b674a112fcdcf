"""Weights that FSDP2 gathers as E4M3.

`fully_shard` asks a parameter's type how its shards are gathered: `fsdp_pre_all_gather` says what
travels, `fsdp_post_all_gather` makes the parameter of a pass from what has arrived. A
`GatherableWeight` quantizes its shard where it lies, and codes and scales travel: half the bytes of
BF16, and each rank quantizes its own part only. The parameter of the pass is a `GatheredWeight`.

Each gather quantizes the shard as it is then. No quantized copy outlives the pass, so an optimizer
can leave none behind. A shard has whole experts, so no block of 128 x 128 lies on two ranks, and
codes and scales are those of the whole weight.

Products of the forward pass take a matrix's codes in one order, those of data gradients in the
other. A gather brings one order: the one for data gradients where it is made in the backward pass.
Who needs the other order, too, transposes the codes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from .groups import is_dtensor
from .quantized import QuantizedWeights, transposed_weights
from .steps_for import steps_for

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from .layer import MoELayer

_aten = torch.ops.aten


class GatherableWeight(torch.Tensor):
    """A weight [experts, K, N], or a shard of its experts. `plain` is the tensor that has the
    values; every operation reads and writes it. Results are plain tensors, but for those that
    `fully_shard`, `nn.Module.to` and the like put in the parameter's place."""

    plain: torch.Tensor

    @staticmethod
    def __new__(cls, plain: torch.Tensor) -> GatherableWeight:
        found: GatherableWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            plain.shape,
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            device=plain.device,
        )
        found.plain = plain
        return found

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["plain"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], _context: None, _size: Any, _stride: Any
    ) -> GatherableWeight:
        return cls(inner["plain"])

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given: dict[int, GatherableWeight] = {}

        def unwrapped(weight: GatherableWeight) -> torch.Tensor:
            given[id(weight.plain)] = weight
            return weight.plain

        def wrapped(result: torch.Tensor) -> torch.Tensor:
            if id(result) in given:  # of an operation in place
                return given[id(result)]
            return cls(result) if func in _TAKE_THE_PLACE else result

        args, kwargs = tree_map_only(cls, unwrapped, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, wrapped, func(*args, **kwargs))

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        """PyTorch's own would leave `plain` as it is."""
        form = (self.shape, self.dtype, self.device)
        if (data.shape, data.dtype, data.device) != form:
            raise TypeError(
                f"data of a weight with quantize_gathered must stay {tuple(self.shape)}, "
                f"{self.dtype}, on {self.device}; got {tuple(data.shape)}, {data.dtype}, on "
                f"{data.device}: use nn.Module.to"
            )
        self.plain = plain_weight(data).detach().contiguous()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GatherableWeight({self.plain!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> GatherableWeight:
        if id(self) in memo:
            earlier: GatherableWeight = memo[id(self)]
            return earlier
        found = GatherableWeight(copy.deepcopy(self.plain, memo))
        memo[id(self)] = found
        found.requires_grad_(self.requires_grad)
        found.grad = copy.deepcopy(self.grad, memo)
        others = {name: value for name, value in vars(self).items() if name != "plain"}
        vars(found).update(copy.deepcopy(others, memo))
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as a plain tensor, which anybody can load."""
        plain: torch.Tensor = self.plain
        if isinstance(self, nn.Parameter):
            plain = nn.Parameter(plain, self.requires_grad)
        return plain.__reduce_ex__(protocol)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: MoELayer,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """What travels of this shard, and what `fsdp_post_all_gather` is told."""
        is_alone = _is_alone(self.shape, outer_size, mesh.size())
        shard = self.plain.to(mp_policy.param_dtype or self.dtype)
        if shard.dtype != torch.bfloat16:
            raise TypeError(
                "parameters must be gathered in torch.bfloat16 with quantize_gathered, which is "
                f"what the layer quantizes; got {shard.dtype}: pass fully_shard an mp_policy with "
                "param_dtype=torch.bfloat16"
            )
        steps = steps_for(shard, module.arch)
        for_gradients = _is_in_backward_pass()
        quantized = steps.quantize_weights(shard.transpose(1, 2) if for_gradients else shard)
        if is_alone:  # PyTorch then passes on the first tensor only
            return (quantized.values,), (for_gradients, quantized.scales)
        return (quantized.values, quantized.scales), (for_gradients, None)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The parameter of a pass, or with out None: `out` takes what has arrived."""
        for_gradients, own_scales = metadata
        values, *scales = all_gather_outputs
        gathered = QuantizedWeights(values, scales[0] if own_scales is None else own_scales)
        if out is not None:
            assert isinstance(out, GatheredWeight)
            out.box.fill(gathered, for_gradients=for_gradients)
            return None
        box = Box(gathered, for_gradients=for_gradients)
        return GatheredWeight(box, param_dtype), ()


class Box:
    """Codes and scales that were gathered last, for products of the forward pass or of data
    gradients. Their storages are FSDP's, which frees and fills them."""

    def __init__(self, gathered: QuantizedWeights, *, for_gradients: bool) -> None:
        self.fill(gathered, for_gradients=for_gradients)

    def fill(self, gathered: QuantizedWeights, *, for_gradients: bool) -> None:
        self.gathered, self.are_for_gradients = gathered, for_gradients

    def in_order(self, *, for_gradients: bool) -> QuantizedWeights:
        if for_gradients == self.are_for_gradients:
            return self.gathered
        return transposed_weights(self.gathered)


class GatheredWeight(torch.Tensor):
    """All of a weight [experts, K, N], as E4M3. A leaf of the type that was gathered, which gets
    gradients of that type. Only products of quantized weights can read its values."""

    box: Box

    @staticmethod
    def __new__(cls, box: Box, dtype: torch.dtype) -> GatheredWeight:
        values = box.gathered.values
        size = values.shape if box.are_for_gradients else values.mT.shape
        found: GatheredWeight = torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=dtype, device=values.device
        )
        found.box = box
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        weight = args[0]
        # FSDP makes a parameter by as_strided, autograd finds a leaf's node by view.
        if func is _aten.detach.default or (
            func in (_aten.as_strided.default, _aten.view.default)
            and tuple(args[1]) == tuple(weight.shape)
        ):
            return cls(weight.box, weight.dtype)
        if func is _aten.zeros_like.default:  # FSDP's gradient of a weight that got none
            return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        # A TypeError would become Python's own, of operands.
        raise RuntimeError(
            f"{func} is not for a weight that was gathered with quantize_gathered, as E4M3"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype}, gathered as E4M3)"


def gatherable_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter, or one of the same values whose type says how FSDP2 gathers it."""
    if isinstance(parameter, GatherableWeight):
        return parameter
    if is_dtensor(parameter):  # was assigned to a layer that is sharded
        sharded: Any = parameter
        if not isinstance(sharded._local_tensor, GatherableWeight):
            sharded._local_tensor = GatherableWeight(sharded._local_tensor)
        return parameter
    return nn.Parameter(GatherableWeight(parameter.detach()), parameter.requires_grad)


def plain_weight(weight: torch.Tensor) -> torch.Tensor:
    """The tensor that has the values of a weight that is not gathered."""
    return weight.plain if isinstance(weight, GatherableWeight) else weight


def memory_of(weight: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors that have a weight's values."""
    if isinstance(weight, GatheredWeight):
        return weight.box.gathered.values, weight.box.gathered.scales
    return (plain_weight(weight),)


def is_gatherable_or_gathered(weight: Any) -> bool:
    return isinstance(weight, GatherableWeight | GatheredWeight)


def _is_in_backward_pass() -> bool:
    no_pass = -1
    return torch._C._current_graph_task_id() != no_pass


def _is_alone(shard: torch.Size, whole: torch.Size, num_ranks: int) -> bool:
    """Whether this rank has all of a weight. Every rank raises, or none: the others would wait."""
    if shard[1:] != whole[1:]:
        raise ValueError(
            "shard_placement_fn must give Shard(0), whole experts, with quantize_gathered; got "
            f"shards {tuple(shard)} of {tuple(whole)}"
        )
    if num_ranks == 1 or (shard == whole and whole[0] > 1):
        return True
    if whole[0] % num_ranks:
        raise ValueError(
            "num_experts of the layer's rank must be a multiple of the ranks that shard it with "
            f"quantize_gathered; got {whole[0]} experts over {num_ranks} ranks"
        )
    return False


_TAKE_THE_PLACE: frozenset[Callable[..., Any]] = frozenset(
    {
        _aten._pin_memory.default,
        _aten._to_copy.default,
        _aten.as_strided.default,
        _aten.clone.default,
        _aten.detach.default,
        _aten.empty_like.default,
        _aten.new_zeros.default,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.view.default,
    }
)
"""Operations whose results become parameters, or shards of them."""
