#!/usr/bin/env bash
# The benchmarks of several GPUs (two at least): one model over them against one GPU, digests under load, and what an
# exchange costs. JSON in benchmarks/results/. RANKS=2 by default; NVLink multicast is never used.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
OUT="${OUT:-benchmarks/results}"
export PYTHONPATH=".:${PYTHONPATH:-}"
"$PYTHON" -m stretto.bench.gpu_tp --ranks "${RANKS:-2}" --output "$OUT/gpu_tp.json"
"$PYTHON" -m stretto.bench.gpu_exchange --ranks "${RANKS:-2}" --output "$OUT/gpu_exchange.json"
"$PYTHON" benchmarks/server_load.py --model qwen3-8b --concurrency 128 --clients 8 --ranks "${RANKS:-2}" \
  --json "$OUT/gpu_server_8b_tp.json"
