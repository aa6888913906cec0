#!/usr/bin/env bash
# All tests that need a CUDA GPU, and those of the kernels compiled instead of interpreted. PYTHON names the interpreter;
# "$@" goes to pytest (for example --noconftest where only the engine's own dependencies are installed). Writes what
# passed, with date, GPU and versions, to $GPU_TEST_REPORT (default benchmarks/results/gpu_tests.json).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
REPORT="${GPU_TEST_REPORT:-benchmarks/results/gpu_tests.json}"
"$PYTHON" -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else "no CUDA GPU: nothing to test here")'
# Tests that judge how busy a GPU is, or that need several, run one after the other on a machine that does nothing else.
alone="$(find tests/gpu -name 'test_overlap_gates_gpu.py' -o -name 'test_tp_gpu.py' | sort)"
together="$({ grep -rl --include='*.py' 'mark\.gpu' tests; ls tests/test_kernels*.py tests/test_fused_engine.py; } | sort -u | grep -vxF "$alone")"
folder="$(mktemp -d)"
status=0
export PYTHONPATH=".:${PYTHONPATH:-}"
# shellcheck disable=SC2086
"$PYTHON" -m pytest -q -n "${GPU_TEST_WORKERS:-4}" --junitxml "$folder/together.xml" $together "$@" || status=$?
# shellcheck disable=SC2086
"$PYTHON" -m pytest -q -n 0 --junitxml "$folder/alone.xml" $alone "$@" || status=$?
"$PYTHON" scripts/gpu_report.py "$REPORT" "$folder"/*.xml
rm -r "$folder"
exit "$status"
