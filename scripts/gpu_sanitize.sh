#!/usr/bin/env bash
# compute-sanitizer over every kernel at small odd shapes (scripts/sanitize_kernels.py): memcheck (accesses outside of
# allocations) and racecheck (hazards in shared memory), or the tools named as arguments. Each tool watches each case of
# the script in a process of its own, $JOBS of them (default: the number of cores) side by side. After each the report
# $SANITIZER_REPORT (default benchmarks/results/gpu_sanitizer.json) is written anew, so one that was cut short tells how
# far it got. Fails unless all was watched and nothing found. PYTHON names the interpreter, COMPUTE_SANITIZER the tool.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
SANITIZER="${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}"
REPORT="${SANITIZER_REPORT:-benchmarks/results/gpu_sanitizer.json}"
[ -x "$SANITIZER" ] || { echo "no compute-sanitizer: it comes with the CUDA toolkit; COMPUTE_SANITIZER names it" >&2; exit 1; }
export PYTHONPATH=".:${PYTHONPATH:-}"
[ $# -gt 0 ] || set -- racecheck memcheck # what takes longest first
logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT
"$PYTHON" scripts/sanitize_kernels.py >"$logs/about.json"
"$SANITIZER" --version | tail -n 1 >"$logs/version"
printf '%s\n' "$@" >"$logs/tools"
report() { flock "$logs/lock" "$PYTHON" scripts/sanitizer_report.py "$REPORT" "$logs"; }
watch() { # TOOL CASE
  local name="$1.$2" began=$SECONDS status=0 own=()
  if [ "$1" = memcheck ]; then
    own=(--report-api-errors no) # what torch tries and is refused by the driver is no access of a kernel
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # each tensor an allocation, past whose end nothing may be touched
  fi
  "$SANITIZER" --tool "$1" "${own[@]}" --target-processes application-only --log-file "$logs/$name.log" \
    --error-exitcode 99 "$PYTHON" scripts/sanitize_kernels.py "$2" >"$logs/$name.out" 2>&1 || status=$?
  echo "$status $((SECONDS - began))" >"$logs/$name.status"
  report >/dev/null || true
  echo "$1 $2: status $status after $((SECONDS - began)) s"
}
export -f report watch
export PYTHON SANITIZER REPORT logs
report >/dev/null || true
cases="$("$PYTHON" -c 'import json, sys; print(*json.load(open(sys.argv[1]))["cases"], "control")' "$logs/about.json")"
for tool in "$@"; do
  for case in $cases; do echo "$tool $case"; done
done | xargs -P "${JOBS:-$(nproc)}" -L 1 bash -c 'watch "$@"' watch
report
