#!/usr/bin/env bash
# The CPU benchmarks whose figures the docs give: first what runs without a model, then one engine, then the peers.
# Each prints its figures and writes them as JSON into $OUT (benchmarks/results/). Nothing else should run meanwhile.
#
#   file                  figures of
#   host_cost.json        docs/scheduling.md: microseconds of a decode step on the host, without a model
#   prefix_cache.json     docs/prefix-cache.md: the radix tree against two simpler designs
#   server_frontend.json  docs/server.md: what the HTTP front end costs, on a no-op engine
#   start_up.json         docs/cpu-formats.md: seconds until the embedded model is ready
#   timeline_cost.json    docs/observe.md: what the step timeline and the hidden-sync guard cost
#   prefix_sharing.json   what requests that share a prefix save
#   overlap.json          docs/scheduling.md: overlap depth 1 and 2 against 0
#   cpu_throughput.json   docs/cpu-formats.md: tokens per second in every format, beside transformers
#
# scripts/bench.sh NAME... runs only those (scripts/bench.sh host_cost overlap).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
OUT="${OUT:-benchmarks/results}"
ALL=(host_cost prefix_cache server_frontend start_up timeline_cost prefix_sharing overlap cpu_throughput)
mkdir -p "$OUT"
for name in "${@:-${ALL[@]}}"; do
  case "$name" in
    host_cost | prefix_cache) run=(env OMP_NUM_THREADS=1 "$PYTHON" "benchmarks/$name.py" --json) ;;
    server_frontend | prefix_sharing | start_up) run=("$PYTHON" "benchmarks/$name.py" --json) ;;
    timeline_cost) run=("$PYTHON" benchmarks/timeline_cost.py --device cpu --out) ;;
    overlap) run=("$PYTHON" benchmarks/overlap.py --rounds 3 --out) ;;
    cpu_throughput) run=("$PYTHON" benchmarks/throughput.py --out) ;;
    *) echo "no benchmark '$name'; there are: ${ALL[*]}" >&2; exit 2 ;;
  esac
  echo "== $name"
  "${run[@]}" "$OUT/$name.json"
done
