#!/usr/bin/env bash
# The GPU benchmarks: W1, W2, W3 on the Qwen3 shapes, ablations, kernels against the roofline. JSON in benchmarks/results/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
OUT="${OUT:-benchmarks/results}"
export PYTHONPATH=".:${PYTHONPATH:-}"
"$PYTHON" -m stretto.bench.gpu_kernels --output "$OUT/gpu_kernels.json"
"$PYTHON" -m stretto.bench.gpu --model qwen3-0.6b --output "$OUT/gpu_0.6b.json"
"$PYTHON" -m stretto.bench.gpu --model qwen3-8b --workload w2:1 --workload w2:32 --workload w2:128 --workload w1 --workload w3 \
  --output "$OUT/gpu_8b.json"
"$PYTHON" -m stretto.bench.gpu --model qwen3-0.6b --depth 0 --depth 1 --depth 2 --no-graphs --repeats 1 \
  --workload w2:1:128 --workload w2:256:128 --output "$OUT/gpu_ablation.json"
