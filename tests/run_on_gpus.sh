#!/usr/bin/env bash
# Runs every test that needs a GPU, from a source checkout and with the Python that is there: nothing
# is installed or built. Wanted: torch with CUDA, pytest, pytest-timeout, pytest-xdist, hypothesis,
# jinja2, filelock, cuda-bindings, cuda-core, NVRTC, CUDA's headers, and CUTLASS's, by the package
# nvidia-cutlass or DEEP_MOE_CUTLASS_INCLUDE. With arguments for pytest it runs what they select.
#
#   DEEP_MOE_CUTLASS_INCLUDE=/opt/cutlass/include tests/run_on_gpus.sh
#   tests/run_on_gpus.sh tests/layer/test_gpu_ranks.py -x
#
# It prints the commit, and tests/gpu_record.json keeps of each test file at which commit it
# last passed on which GPUs. Without git, DEEP_MOE_COMMIT says the commit.
#
# Most of the time goes into compiling kernels. Tests of one GPU compile for themselves, so several
# run at once; those in tests/layer compile on all CPUs before they begin, and need the GPUs alone.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export DEEP_MOE_CACHE_DIR="${DEEP_MOE_CACHE_DIR:-$PWD/build/gpu-cache}"
python="${PYTHON:-python3}"
"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"' || exit 1
run=("$python" -m pytest -m gpu -q -p tests.gpu_record)
"$python" -c 'from tests import gpu_record; print("commit", gpu_record.commit(), "on", gpu_record.machine())'
if (($#)); then
    exec "${run[@]}" -p no:xdist "$@"
fi
without=(--ignore tests/layer --ignore tests/arguments)
if ! "$python" -c 'import mkdocs' 2>/dev/null; then
    echo "without tests/test_docs.py, which needs mkdocs"
    without+=(--ignore tests/test_docs.py)
fi
"${run[@]}" -n 6 --dist worksteal tests "${without[@]}"
one_gpu=$?
"${run[@]}" -p no:xdist tests/layer
several_gpus=$?
exit $((one_gpu | several_gpus))
