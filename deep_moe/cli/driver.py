"""The NVIDIA driver of this machine."""

from __future__ import annotations

import ctypes


def driver_cuda_version() -> tuple[int, int] | None:
    """Major and minor version of CUDA that the driver supports; None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    status = library.cuDriverGetVersion(ctypes.byref(version))
    if status != 0:
        raise RuntimeError(f"the NVIDIA driver does not tell its version: error {status}")
    return version.value // 1000, version.value % 1000 // 10
