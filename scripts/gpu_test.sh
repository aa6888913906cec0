#!/usr/bin/env bash
# All tests that need a CUDA GPU, and those of the kernels compiled instead of interpreted. PYTHON names the interpreter;
# "$@" goes to pytest (for example --noconftest where only the engine's own dependencies are installed). What passed, with
# date, GPU and versions, goes to $GPU_TEST_REPORT (default benchmarks/results/gpu_tests.json), also if the run is stopped:
# the report says what did not run. $GPU_TEST_WORKERS processes (default: by cores and GPUs) share all visible GPUs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
REPORT="${GPU_TEST_REPORT:-benchmarks/results/gpu_tests.json}"
export PYTHONPATH=".:${PYTHONPATH:-}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # so many processes have no cores for more
gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')"
[ "$gpus" -gt 0 ] || { echo "no CUDA GPU: nothing to test here" >&2; exit 1; }
visible="${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}"
cores="$(env -u OMP_NUM_THREADS nproc)" # nproc takes that variable for the number of cores
most=$((14 * gpus < cores ? 14 * gpus : cores))
workers="${GPU_TEST_WORKERS:-$most}"
# Tests that judge how busy or how full a GPU is have one to themselves, those of several GPUs and those that fill a
# good part of one run a few at once, on a machine that does nothing else. All others are dealt out to the GPUs one by
# one, those first that took longest in the last report.
alone=(tests/gpu/test_overlap_gates_gpu.py tests/gpu/test_memory_gpu.py)
several=tests/gpu/test_tp_gpu.py
large=tests/gpu/test_shapes_gpu.py
# shellcheck disable=SC2207
others=($({ grep -rl --include='*.py' 'mark\.gpu' tests; ls tests/test_kernels*.py tests/test_fused_engine.py tests/test_deterministic.py; } |
  sort -u | grep -vxF -f <(printf '%s\n' "${alone[@]}" "$several" "$large")))
folder="$REPORT.lines" # beside the report, where it outlives a kill: `gpu_report.py REPORT FOLDER` reads it
rm -rf "$folder"
mkdir -p "$folder"
touch "$folder"/{together,alone,large,several}.jsonl
"$PYTHON" scripts/gpu_report.py --about >"$folder/about.json"
finish() {
  local status=$?
  trap - EXIT
  "$PYTHON" scripts/gpu_report.py "$REPORT" "$folder" || status=$((status > 0 ? status : 1))
  rm -r "$folder"
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
run() { # NAME OPTIONS...; pytest's status 2: it was stopped
  local name="$1" status=0
  shift
  "$PYTHON" -m pytest -q -p scripts.finished_tests --finished "$folder/$name.jsonl" --continue-on-collection-errors "$@" || status=$?
  [ "$status" -ne 2 ] || exit 2
}
run together -n "$workers" --maxschedchunk 1 --share-gpus "$visible" --slow-first benchmarks/results/gpu_tests.json \
  "${others[@]}" "$@"
run alone -n $((8 * gpus <= cores ? gpus : 1)) --share-gpus "$visible" "${alone[@]}" "$@"
run large -n $((3 * gpus)) --share-gpus "$visible" "$large" "$@"
run several -n 6 "$several" "$@"
