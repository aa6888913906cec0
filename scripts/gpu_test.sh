#!/usr/bin/env bash
# All tests that need a CUDA GPU, and those of the kernels compiled instead of interpreted. PYTHON names the interpreter;
# "$@" goes to pytest (for example --noconftest where only the engine's own dependencies are installed). Writes what
# passed, with date, GPU and versions, to $GPU_TEST_REPORT (default benchmarks/results/gpu_tests.json).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
REPORT="${GPU_TEST_REPORT:-benchmarks/results/gpu_tests.json}"
"$PYTHON" -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else "no CUDA GPU: nothing to test here")'
# Tests that judge how busy a GPU is run one after the other, those of several GPUs a few at once, on a machine that does
# nothing else. All others are dealt out to the GPUs; the kernels' own, which take longest, have the first to themselves.
busy=tests/gpu/test_overlap_gates_gpu.py
several=tests/gpu/test_tp_gpu.py
kernels=tests/test_kernels.py
# shellcheck disable=SC2207
others=($({ grep -rl --include='*.py' 'mark\.gpu' tests; ls tests/test_kernels*.py tests/test_fused_engine.py tests/test_deterministic.py; } |
  sort -u | grep -vxF -e "$busy" -e "$several" -e "$kernels"))
folder="$(mktemp -d)"
status=0
export PYTHONPATH=".:${PYTHONPATH:-}"
run() { # NAME WORKERS FILES AND OPTIONS...
  local name="$1" workers="$2"
  shift 2
  "$PYTHON" -m pytest -q -n "$workers" --junitxml "$folder/$name.xml" "$@"
}
workers="${GPU_TEST_WORKERS:-4}"
if [ "$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" -gt 1 ]; then
  IFS=, read -ra visible <<< "${CUDA_VISIBLE_DEVICES:-0,1}"
  CUDA_VISIBLE_DEVICES="${visible[0]}" run kernels "$workers" "$kernels" "$@" > "$folder/kernels.txt" 2>&1 & first=$!
  CUDA_VISIBLE_DEVICES="${visible[1]}" run others "$workers" "${others[@]}" "$@" || status=$?
  wait "$first" || status=$?
  cat "$folder/kernels.txt"
else
  run together "$workers" "$kernels" "${others[@]}" "$@" || status=$?
fi
run busy 0 "$busy" "$@" || status=$?
run several 4 "$several" "$@" || status=$?
"$PYTHON" scripts/gpu_report.py "$REPORT" "$folder"/*.xml
rm -r "$folder"
exit "$status"
