#!/usr/bin/env bash
# Runs a small call on one GPU under NVIDIA's compute-sanitizer and fails on any finding. Arguments:
# the tools to run, by default memcheck. Logs go to build/sanitizer. What is wanted to be installed:
# see run_on_gpus.sh; and compute-sanitizer, of the CUDA toolkit.
#
# The other tools do not know what this kernel is made of, and report it (seen with CUDA 13.0):
# racecheck orders nothing by an mbarrier, so every ring of stages looks like a race; synccheck wants
# all warps of a CTA at a named barrier; initcheck does not see PyTorch zero the symmetric buffer. The
# emulator follows all of that, so races and reads of what nobody wrote are its to find.
#
#   tests/sanitize_on_gpu.sh memcheck synccheck
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export DEEP_MOE_CACHE_DIR="${DEEP_MOE_CACHE_DIR:-$PWD/build/gpu-cache}"
# Each tensor gets memory of its own, so that what lies beside it is out of bounds.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
python="${PYTHON:-python3}"
sanitizer="$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)"
logs=build/sanitizer
mkdir -p "$logs"

# Without a tool first: compiles both kernels, and shows that the call is right.
"$python" -m tests.layer.sanitized_call || exit 1
"$python" -m tests.layer.sanitized_call --full-tiles || exit 1

tools=("$@")
((${#tools[@]})) || tools=(memcheck)
failed=()
for tool in "${tools[@]}"; do
    echo "== $tool"
    log="$logs/$tool.log"
    rm -f "$log"
    options=(--tool "$tool" --kernel-name kns=mega_moe_kernel --print-limit 1000 --log-file "$log")
    call=("$python" -m tests.layer.sanitized_call)
    # Libraries ask the driver for functions that it may not have: no finding of ours.
    [[ "$tool" != memcheck ]] || options+=(--report-api-errors no)
    # racecheck's reports are sorted below.
    [[ "$tool" == racecheck ]] || options+=(--error-exitcode 9)
    # Of partly filled tiles it reports reads of what nobody wrote; see sanitized_call.py.
    [[ "$tool" != initcheck ]] || call+=(--full-tiles)
    "$sanitizer" "${options[@]}" "${call[@]}" || failed+=("$tool")
    grep SUMMARY "$log" || failed+=("$tool")
    if [[ "$tool" == racecheck ]]; then
        "$python" -m tests.layer.racecheck "$log" || failed+=("$tool")
    fi
done
if ((${#failed[@]})); then
    echo "findings by $(printf '%s\n' "${failed[@]}" | sort -u | tr '\n' ' ')-- logs are in $logs"
    exit 1
fi
echo "no findings"
