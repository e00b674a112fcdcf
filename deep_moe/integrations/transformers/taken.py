"""Tensors whose values are in the kernel's memory.

A taken tensor stays the same object, with its shape, dtype and device, so an optimizer or another
layer still holds it. But it holds no values. When any code reads or writes it, it first gets its
values back, and with it all tensors that were taken together; then the kernel's copy is gone. So no
write can miss a copy, and an existing copy is never out of date.

A tensor that could be changed unnoticed is not taken: one whose memory other tensors share, and one
that C++ holds (a graph or a reducer).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from deep_moe.tensor_memory import num_bytes_reached

logger = logging.getLogger(__name__)

_LOAN = "_deep_moe_loan"
_STAND_IN = "_deep_moe_stand_in"


class Loan:
    """Tensors that were taken together. content: what the kernel has instead. originals: makes
    their values, by the same names."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        content: Any,
        originals: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        self.content = content
        self.names = frozenset(tensors)
        self._originals = originals
        # Weak, as each of them holds the loan: with the last of them it goes.
        self._tensors = {name: weakref.ref(tensor) for name, tensor in tensors.items()}
        self._stand_ins: dict[str, weakref.ref[torch.Tensor]] = {}
        for tensor in tensors.values():
            values = _empty(_local(tensor))
            _set_values(tensor, values)
            self._take(tensor)

    def _take(self, tensor: torch.Tensor) -> None:
        tensor.__dict__[_LOAN] = self
        tensor.__class__ = _taken_class(type(tensor))

    def stand_in(self, tensor: DTensor) -> torch.Tensor:
        """For this rank's part of a tensor that was taken: taken itself."""
        found: torch.Tensor | None = tensor.__dict__.get(_STAND_IN)
        if found is None:
            found = tensor._local_tensor.detach()
            found._is_param = True  # as `DTensor.to_local` has it
            self._take(found)
            tensor.__dict__[_STAND_IN] = found
            (name,) = (name for name, ref in self._tensors.items() if ref() is tensor)
            self._stand_ins[name] = weakref.ref(found)
        return found

    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether it was taken by this name."""
        return any(
            name in refs and refs[name]() is tensor for refs in (self._tensors, self._stand_ins)
        )

    def end(self, because: str) -> None:
        """Give all tensors their values back. because: in words, for the log."""
        if not self._tensors:
            return
        # Tensors of inference mode could not be trained.
        with torch.inference_mode(False), torch.no_grad():
            values = self._originals()
            for refs in (self._tensors, self._stand_ins):
                for name, ref in refs.items():
                    tensor = ref()
                    if tensor is not None:
                        tensor.__class__ = type(tensor).__bases__[1]
                        del tensor.__dict__[_LOAN]
                        tensor.__dict__.pop(_STAND_IN, None)
                        _set_values(tensor, values[name])
        self._tensors, self._stand_ins = {}, {}
        self.content = None
        self._originals = dict
        logger.info("experts' weights were given back: %s", because)


def take(
    tensors: Mapping[str, torch.Tensor],
    content: Any,
    originals: Callable[[], Mapping[str, torch.Tensor]],
) -> Loan:
    """Take tensors that `reason_not_to_take` has nothing against. They hold the loan, and nothing
    else does."""
    return Loan(tensors, content, originals)


def loan_of(tensors: Mapping[str, torch.Tensor]) -> Loan | None:
    """That by which exactly these were taken, if there is one."""
    for tensor in tensors.values():
        loan: Loan | None = tensor.__dict__.get(_LOAN)
        if (
            loan is not None
            and loan.names == tensors.keys()
            and all(loan.holds(name, each) for name, each in tensors.items())
        ):
            return loan
        return None
    return None


def end_loans(tensors: Mapping[str, torch.Tensor], because: str) -> None:
    """Of any of these tensors."""
    for tensor in tensors.values():
        loan: Loan | None = tensor.__dict__.get(_LOAN)
        if loan is not None:
            loan.end(because)


def reason_not_to_take(tensor: torch.Tensor) -> str | None:
    """Why a tensor's values are not its own, or are not there, in words that follow its name; None
    if it may be taken, unless it has shared memory. Does not wait for a GPU."""
    if type(tensor) not in (torch.nn.Parameter, torch.Tensor, DTensor):
        return f"is a {type(tensor).__name__}"
    if tensor.grad_fn is not None:
        return "is computed in each call"
    local = _local(tensor)
    if type(local) not in (torch.nn.Parameter, torch.Tensor):
        return f"is a {type(local).__name__} on this rank"
    if local.device.type == "meta":
        return "has no values: it is on the meta device, offloaded or not loaded yet"
    if local.untyped_storage().nbytes() < num_bytes_reached(local):
        return "has no values: its memory was freed, as FSDP frees what it gathers"
    held: tuple[Any, ...] = (tensor, local)
    if any(each._use_count() > 1 for each in held):
        return "is held by a graph of autograd's, or by other code in C++"
    return None


def has_shared_memory(tensor: torch.Tensor) -> bool:
    """Whether other tensors have a tensor's memory, too: a view, a state dict's, a buffer of FSDP's
    that weights are gathered in. They could change its values unseen."""
    storage = _local(tensor).untyped_storage()
    # One is the tensor's, one that of the object that was made here.
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


class _Taken:
    """Of every class of tensors that were taken."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _harmless():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for tensor in _taken_among((args, kwargs)):
            _end(tensor, getattr(func, "__qualname__", str(func)))
        return func(*args, **kwargs)

    # These ask for the type before they touch the values.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _end(self, "deepcopy").__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _end(self, "pickle").__reduce_ex__(protocol)


class _TakenDTensor(_Taken):
    __slots__ = ()

    def to_local(self, **options: Any) -> torch.Tensor:
        assert isinstance(self, DTensor)
        if torch.is_grad_enabled() and self.requires_grad:
            return _end(self, "to_local").to_local(**options)
        return self.__dict__[_LOAN].stand_in(self)

    def full_tensor(self, **options: Any) -> Any:
        return _end(self, "full_tensor").full_tensor(**options)

    def redistribute(self, *args: Any, **options: Any) -> Any:
        return _end(self, "redistribute").redistribute(*args, **options)

    def __tensor_flatten__(self) -> Any:
        return _end(self, "__tensor_flatten__").__tensor_flatten__()


def _end(tensor: Any, by: str) -> Any:
    """The tensor, with its values."""
    loan: Loan | None = tensor.__dict__.get(_LOAN)
    if loan is not None:
        loan.end(f"{by} was called on one of them; the next call lays them out again")
    return tensor


@cache
def _taken_class(kind: type) -> type:
    """The class of a tensor of this class while it is taken."""
    base = _TakenDTensor if issubclass(kind, DTensor) else _Taken
    return type(f"Taken{kind.__name__}", (base, kind), {"__slots__": ()})


@cache
def _harmless() -> frozenset[Any]:
    """What says nothing of values, and changes none."""
    tensor: Any = torch.Tensor
    properties = (
        "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad",
        "grad", "grad_fn", "is_leaf", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized",
        "_version",
    )  # fmt: skip
    methods = (
        "size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
        "requires_grad_", "__hash__", "is_inference", "get_device",
    )  # fmt: skip
    return frozenset(
        [
            *(getattr(tensor, name).__get__ for name in properties),
            *(getattr(tensor, name).__set__ for name in ("requires_grad", "grad")),
            *(getattr(tensor, name) for name in methods),
            torch.is_floating_point,
            torch.is_complex,
            torch.numel,
        ]
    )


def _taken_among(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, _Taken):
        yield value  # type: ignore[misc]
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _taken_among(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _taken_among(each)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _set_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        # Not a view, whose base would go on to hold the memory.
        own: Any = values.new_empty(0)
        tensor._local_tensor = own.set_(values)
    else:
        tensor.data = values


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """The shape without memory: one NaN, where the dtype has one, for code in C++ that asks nobody.
    PyTorch refuses to write into it."""
    value = torch.full((), float("nan"), dtype=torch.float32, device=tensor.device)
    if not tensor.is_floating_point():
        value = value.zero_()
    return value.to(tensor.dtype).expand(tensor.shape)
