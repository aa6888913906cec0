#!/usr/bin/env bash
# The GPU benchmarks: W1, W2, W3 on the Qwen3 shapes, ablations, kernels against the roofline. JSON in benchmarks/results/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
OUT="${OUT:-benchmarks/results}"
export PYTHONPATH=".:${PYTHONPATH:-}"
bench() { "$PYTHON" -m stretto.bench.gpu "$@"; }
short=(--repeats 1 --workload w2:1:128 --workload w2:32:128 --workload w2:256:128)
online=(--workload online:8:128 --workload online:32:128 --workload online:32:512 --workload online:128:128)
bench --model qwen3-0.6b --output "$OUT/gpu_0.6b.json"
bench --model qwen3-8b --workload w2:1 --workload w2:32 --workload w2:128 --workload w1 --workload w3 --output "$OUT/gpu_8b.json"
"$PYTHON" -m stretto.bench.gpu_kernels --output "$OUT/gpu_kernels.json"
# What each part is worth: overlap depth and graphs; dependent launch; fused layers and kernels; batch invariance.
bench --depth 1 --depth 0 --depth 2 --no-graphs "${short[@]}" "${online[@]}" --output "$OUT/gpu_ablation.json"
STRETTO_DISABLE_PDL=1 bench "${short[@]}" --output "$OUT/gpu_ablation_no_pdl.json"
bench --attention-backend torch "${short[@]}" --output "$OUT/gpu_ablation_plain.json"
if "$PYTHON" -c 'import flashinfer' 2>/dev/null; then
  bench --attention-backend flashinfer "${short[@]}" --workload w1 --workload w3 --output "$OUT/gpu_flashinfer.json"
else
  echo "FlashInfer is not installed: not compared"
fi
bench --deterministic "${short[@]}" --workload w3 --output "$OUT/gpu_deterministic.json"
# Starting, with 512 rows: without any compiled kernel, and with them.
cache="$(mktemp -d)"
for state in cold warm; do
  TRITON_CACHE_DIR="$cache" bench --rows 512 --repeats 1 --workload w2:1:16 --output "$OUT/gpu_start_$state.json"
done
rm -r "$cache"
# What serving costs: the same requests over HTTP and offline.
load() { "$PYTHON" benchmarks/server_load.py --clients 8 "$@"; }
load --model qwen3-0.6b --concurrency 64 --json "$OUT/gpu_server_0.6b.json"
load --model qwen3-8b --concurrency 128 --json "$OUT/gpu_server_8b.json"
