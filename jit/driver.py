"""The NVIDIA driver of this machine."""

from __future__ import annotations

import ctypes
from functools import cache

from deep_moe.errors import DeepMoEError

# Of the packages that kernels are compiled with.
CUDA_MAJOR = 13
# The driver that runs a cubin of this CUDA, of any of its minor versions.
MIN_DRIVER_OF_CUDA = {12: "525", 13: "580"}


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


@cache
def require_driver() -> None:
    """Raise DeepMoEError unless the driver can load what the compiler makes: it takes cubins of its
    own major version of CUDA, and of older ones."""
    supported = driver_cuda_version()
    if supported is not None and supported[0] < CUDA_MAJOR:
        raise DeepMoEError(
            f"the NVIDIA driver must be one for CUDA {CUDA_MAJOR}, "
            f"{MIN_DRIVER_OF_CUDA[CUDA_MAJOR]} or newer; got one for CUDA {supported[0]}."
            f"{supported[1]}, which cannot load the kernels"
        )
