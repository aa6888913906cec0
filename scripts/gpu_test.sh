#!/usr/bin/env bash
# All tests that need a CUDA GPU, and those of the kernels compiled instead of interpreted. PYTHON names the interpreter;
# "$@" goes to pytest (for example --noconftest where only the engine's own dependencies are installed). Writes what
# passed, with date, GPU and versions, to $GPU_TEST_REPORT (default benchmarks/results/gpu_tests.json).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
REPORT="${GPU_TEST_REPORT:-benchmarks/results/gpu_tests.json}"
"$PYTHON" -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else "no CUDA GPU: nothing to test here")'
xml="$(mktemp)"
status=0
# shellcheck disable=SC2046
PYTHONPATH=".:${PYTHONPATH:-}" "$PYTHON" -m pytest -q -n "${GPU_TEST_WORKERS:-4}" --junitxml "$xml" \
  tests/test_kernels.py tests/test_kernels_sampling.py tests/test_fused_engine.py $(grep -rl --include='*.py' 'mark\.gpu' tests | sort) "$@" || status=$?
PYTHONPATH=. "$PYTHON" scripts/gpu_report.py "$xml" "$REPORT"
rm -f "$xml"
exit "$status"
