#!/usr/bin/env bash
# Everything that wants a CUDA machine, in under 6 minutes: builds, runs tests/gpu (and part of it under compute-sanitizer
# where that is there), measures against peers. Needs a CUDA build of torch with its toolkit, ninja, pytest, rich and
# matplotlib; zclip and DeepSpeed are measured where they are installed.
#
#     bash benchmarks/gpu_check.sh                  # writes to runs/gpu
#     OUT=folder PYTHON=python3.11 bash benchmarks/gpu_check.sh
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-runs/gpu}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 ZCLIP_BACKEND=compiled ZCLIP_CUDA=1
TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$(mktemp -d)}
export TORCH_EXTENSIONS_DIR
failed=0

part() { # NAME SECONDS COMMAND...: its output goes to the screen and to NAME.log
    local name=$1 seconds=$2
    shift 2
    echo "== $name"
    timeout "$seconds" "$@" 2>&1 | tee "$OUT/$name.log"
    local code=${PIPESTATUS[0]}
    if [ "$code" != 0 ]; then
        echo "== $name FAILED (exit $code)"
        failed=1
    fi
    return "$code"
}

part machine 20 "$PYTHON" -c "
import torch
assert torch.cuda.is_available(), 'torch sees no GPU'
for index in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_properties(index))
print('torch', torch.__version__, 'cuda', torch.version.cuda, 'driver', torch._C._cuda_getDriverVersion())
" || exit 1
# For this machine's cards only, which is all that is run here: faster than all that torch is for.
if [ -z "${TORCH_CUDA_ARCH_LIST:-}" ]; then
    TORCH_CUDA_ARCH_LIST=$("$PYTHON" -c "import torch; print('%d.%d' % torch.cuda.get_device_capability())")
    export TORCH_CUDA_ARCH_LIST
fi
part build 80 "$PYTHON" -c "import zclip_ext; print(zclip_ext.backend('cuda'))" || exit 1
part tests 90 "$PYTHON" -m pytest tests/gpu -p no:cacheprovider
part time 90 "$PYTHON" benchmarks/step_time.py --device cuda --rounds 11 --out "$OUT"
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        part "$tool" 30 compute-sanitizer --tool "$tool" --error-exitcode 9 "$PYTHON" -m pytest tests/gpu \
            -p no:cacheprovider -k "usual_spike or (bits_of_the_cpu and 2049)"
    done
fi
exit "$failed"
