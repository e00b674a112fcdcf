#!/usr/bin/env bash
# Runs every test that needs a GPU, from a source checkout and with the Python that is there: nothing
# is installed or built. Wanted: torch with CUDA, pytest, pytest-timeout, hypothesis, jinja2,
# filelock, cuda-bindings, cuda-core, NVRTC, CUDA's headers, and CUTLASS's, by the package
# nvidia-cutlass or DEEP_MOE_CUTLASS_INCLUDE. Arguments go to pytest.
#
#   DEEP_MOE_CUTLASS_INCLUDE=/opt/cutlass/include tests/run_on_gpus.sh -x
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export DEEP_MOE_CACHE_DIR="${DEEP_MOE_CACHE_DIR:-$PWD/build/gpu-cache}"
"${PYTHON:-python3}" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"'
exec "${PYTHON:-python3}" -m pytest -m gpu -q "$@"  # pyproject.toml says where tests are
