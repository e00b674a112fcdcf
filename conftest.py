"""What holds for every test: one thread per worker, one compile cache, GPU tests only on GPUs."""

import os
from pathlib import Path

import pytest

# Kernels that tests compile are kept in the build folder: shared by the workers and by later runs,
# and apart from the user's own cache.
os.environ.setdefault("DEEP_MOE_CACHE_DIR", str(Path(__file__).parent / "build" / "test-cache"))


def pytest_configure(config: pytest.Config) -> None:
    import torch

    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
