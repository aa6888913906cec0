#!/usr/bin/env bash
# compute-sanitizer over every kernel at small odd shapes (scripts/sanitize_kernels.py): memcheck (accesses outside of
# allocations) and racecheck (hazards in shared memory), or the tools named as arguments. Writes what was found, with
# date, GPU and versions, to $SANITIZER_REPORT (default benchmarks/results/gpu_sanitizer.json); fails if there was
# anything. PYTHON names the interpreter, COMPUTE_SANITIZER the tool.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
SANITIZER="${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}"
REPORT="${SANITIZER_REPORT:-benchmarks/results/gpu_sanitizer.json}"
[ -x "$SANITIZER" ] || { echo "no compute-sanitizer: it comes with the CUDA toolkit; COMPUTE_SANITIZER names it" >&2; exit 1; }
export PYTHONPATH=".:${PYTHONPATH:-}"
[ $# -gt 0 ] || set -- memcheck racecheck
logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT
"$PYTHON" scripts/sanitize_kernels.py # without a tool: compiles the kernels
watch() { # TOOL
  local began=$SECONDS status=0 own=()
  # What torch tries and is refused by the driver is no access of a kernel.
  [ "$1" = memcheck ] && own=(--report-api-errors no)
  # Without torch's caching each tensor is an allocation of its own, past whose end nothing may be touched.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$SANITIZER" --tool "$1" "${own[@]}" --log-file "$logs/$1.log" --error-exitcode 99 \
    "$PYTHON" scripts/sanitize_kernels.py >"$logs/$1.out" 2>&1 || status=$?
  echo "$status $((SECONDS - began))" >"$logs/$1.status"
}
for tool in "$@"; do watch "$tool" & done # side by side: they take long, and little of the GPU
wait
tail -n 3 "$logs"/*.log "$logs"/*.out || true
"$SANITIZER" --version | tail -n 1 >"$logs/version"
"$PYTHON" scripts/sanitizer_report.py "$REPORT" "$logs" "$@"
