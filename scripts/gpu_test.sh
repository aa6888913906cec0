#!/usr/bin/env bash
# All tests that need a CUDA GPU, and those of the kernels compiled instead of interpreted. PYTHON names the interpreter.
# "$@" goes to pytest (for example --noconftest where only the engine's own dependencies are installed).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
"$PYTHON" -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else "no CUDA GPU: nothing to test here")'
PYTHONPATH=".:${PYTHONPATH:-}" "$PYTHON" -m pytest -q -n "${GPU_TEST_WORKERS:-4}" tests/test_kernels.py tests/test_fused_engine.py tests/gpu "$@"
