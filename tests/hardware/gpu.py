"""Runs a case on the current GPU. Needs a driver that compiles PTX, and cuda.bindings."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .case import Case


class Gpu:
    """The first device, in its primary context."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", 0)
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", self._device))

    def describe(self) -> dict[str, str]:
        name = self._call("cuDeviceGetName", 256, self._device)
        version = self._call("cuDriverGetVersion")
        return {
            "device": name.split(b"\0")[0].decode(),
            "driver": f"CUDA {version // 1000}.{version % 1000 // 10}",
        }

    def load(self, case: Case) -> Any:
        """The module of a case's PTX."""
        return self._call("cuModuleLoadData", case.ptx.encode() + b"\0")

    def run(self, case: Case, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """The outputs."""
        driver = self._driver
        module = self.load(case)
        function = self._call("cuModuleGetFunction", module, b"kernel")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", function, attribute, case.shared_bytes)
        pointers = [self._call("cuMemAlloc", array.nbytes) for array in arrays]
        for pointer, array in zip(pointers, arrays, strict=True):
            self._call("cuMemcpyHtoD", pointer, array.ctypes.data, array.nbytes)
        values: list[Any] = [ctypes.c_uint64(int(pointer)) for pointer in pointers]
        for map_ in case.maps:
            image = map_.spec(int(pointers[map_.array])).encode_cuda()
            values.append(ctypes.create_string_buffer(image, len(image)))
        parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        self._call(
            "cuLaunchKernel",
            function,
            *case.grid,
            *case.block,
            case.shared_bytes,
            0,
            ctypes.addressof(parameters),
            0,
        )
        self._call("cuCtxSynchronize")
        outputs = [np.empty_like(arrays[index]) for index in case.outputs]
        for index, output in zip(case.outputs, outputs, strict=True):
            self._call("cuMemcpyDtoH", output.ctypes.data, pointers[index], output.nbytes)
        for pointer in pointers:
            self._call("cuMemFree", pointer)
        self._call("cuModuleUnload", module)
        return outputs

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {status.name}")
        return values[0] if values else None
