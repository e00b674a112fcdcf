"""What holds for every test: one thread per worker, one compile cache, GPU tests only on GPUs."""

import os
import time
from pathlib import Path

import pytest

# Kernels that tests compile are kept in the build folder: shared by the workers and by later runs,
# and apart from the user's own cache.
os.environ.setdefault("DEEP_MOE_CACHE_DIR", str(Path(__file__).parent / "build" / "test-cache"))

# Minutes from the start in which slow tests may begin; without it all run. For CI, whose time is
# bounded on whatever machine it is.
SLOW_MINUTES = os.environ.get("SLOW_TEST_MINUTES")
_STARTED = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if SLOW_MINUTES is None or item.get_closest_marker("slow") is None:
        return
    if time.monotonic() - _STARTED > 60 * float(SLOW_MINUTES):
        pytest.skip(f"the {SLOW_MINUTES} minutes in which slow tests may begin are over")


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
