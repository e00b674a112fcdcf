"""Parameters of an engine's layer that are the kernel's own tensors.

An engine, a load balancer or a trainer may give a parameter other memory, or write a checkpoint's
rows where the kernel's layout lies. The kernel would go on with the old weights, or with scrambled
ones, and nothing would say so. Addresses tell, and cost a microsecond a call.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deep_moe.errors import DeepMoEError


class KernelParameters:
    """layer: its name in errors. tensors: what the kernel reads, by the names of the parameters
    whose memory they become. how: to load new weights, in words."""

    def __init__(
        self, layer: str, module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], how: str
    ) -> None:
        self._layer = layer
        self._how = how
        for name, tensor in tensors.items():
            parameter = module._parameters[name]
            assert parameter is not None
            parameter.data = tensor
        self._addresses = tuple((name, tensor.data_ptr()) for name, tensor in tensors.items())

    def kept(self, module: torch.nn.Module) -> list[str]:
        """The names of the module's parameters that are the kernel's tensors."""
        return [
            name
            for name, address in self._addresses
            if _address(module._parameters.get(name)) == address
        ]

    def require(self, module: torch.nn.Module) -> None:
        """Raise DeepMoEError unless all of the module's parameters are what the kernel reads. In
        every call."""
        parameters = module._parameters
        for name, address in self._addresses:
            parameter = parameters.get(name)
            if parameter is None or parameter.data_ptr() != address:
                raise DeepMoEError(
                    f"{self._layer}: {name} has other memory than deep_moe's kernel reads: it was "
                    f"replaced and not laid out. {self._how}"
                )

    def refuse_parts(self, parameter: torch.Tensor) -> None:
        """Raise DeepMoEError if a part of a checkpoint is about to be written into the kernel's
        layout."""
        given = _address(parameter)
        for name, address in self._addresses:
            if given == address:
                raise DeepMoEError(
                    f"{self._layer}: {name} holds the layout of deep_moe's kernel, into which "
                    f"nothing of a checkpoint can be written. {self._how}"
                )

    def need_all(self, module: torch.nn.Module) -> bool:
        """Whether the module has new memory for all of them, to be laid out; False if for none.
        Raises DeepMoEError for some."""
        kept = self.kept(module)
        if not kept:
            return True
        if len(kept) < len(self._addresses):
            raise DeepMoEError(
                f"{self._layer}: new weights must bring all tensors of the layer; there is no new "
                f"{', '.join(kept)}. {self._how}"
            )
        return False


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
