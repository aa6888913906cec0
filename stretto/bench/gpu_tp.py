"""The benchmark of tensor parallelism on GPUs: several ranks against one in the same run, and that they stay alike.

`python -m stretto.bench.gpu_tp --help`. For each number of ranks and overlap depth: decode time per step, throughput,
the idle share of every rank's GPU, and what the control plane costs. Then long runs of a mixed load under
STRETTO_CHECK, in which every step's digests must be equal. Requests are `workloads.py`'s, random weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from stretto.bench import workloads
from stretto.bench.gpu import by_tenth, engine_config, environment, requests_of, run
from stretto.distributed.link import Beat
from stretto.distributed.turns import LeaderTurns
from stretto.request import Request, SamplingParams
from stretto.runtime import Runtime

BEAT_WAIT_S = 0.8
"""After a run: until every rank's figures of its end have come."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine to measure."""

    model: str
    ranks: int
    overlap_depth: int
    max_num_seqs: int = 256
    peer_memory: bool = True
    """Sums and candidates through memory that the ranks write; else all through NCCL."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One workload on one engine."""

    workload: str
    setup: Setup
    seconds: float
    steps: int
    output_tokens_per_s: float
    input_tokens_per_s: float
    ms_per_output: float
    """Wall milliseconds per output token of the longest request: the step time where all decode together."""
    idle_share: list[float]
    """Of each rank: device time between steps in which nothing was queued although something was runnable."""
    publish_us: float
    """Host time of rank 0 in which a step's turn was encoded and handed to the transport; 0 with one rank."""
    publish_share: float
    """Of the wall time."""
    step_ms_by_tenth: list[float]


@dataclass(frozen=True, slots=True)
class Agreement:
    """A mixed load under STRETTO_CHECK; it raises if two ranks differ, so there is one only if none did."""

    setup: Setup
    steps: int
    compared: int
    """Steps whose digests were compared on all ranks."""
    requests: int
    output_tokens: int


def with_engine(setup: Setup, root: Path, use: Callable[[Runtime], None], *, check: bool = False) -> None:
    """Let `use` use an engine of `setup`, all of its ranks; it must not keep it. Nothing is left of it afterwards."""
    variables = {
        "STRETTO_CHECK": "1" if check else "0",
        "STRETTO_DISABLE_PEER_MEMORY": "0" if setup.peer_memory else "1",
    }
    with _environment(variables):
        _start_and_use(setup, root, use, prefix_cache=check)
    gc.collect()  # only now is no frame left that knows the engine, whose memory the next one needs
    torch.cuda.empty_cache()


def _start_and_use(setup: Setup, root: Path, use: Callable[[Runtime], None], *, prefix_cache: bool) -> None:
    began = time.perf_counter()
    runtime = Runtime.start(
        engine_config(
            setup.model,
            root,
            max_num_seqs=setup.max_num_seqs,
            overlap_depth=setup.overlap_depth,
            tensor_parallel_size=setup.ranks,
            enable_prefix_caching=prefix_cache,
        )
    )
    print(f"{setup} started in {time.perf_counter() - began:.1f} s", flush=True)
    try:
        use(runtime)
    finally:
        runtime.close()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def measure(runtime: Runtime, setup: Setup, name: str) -> Measurement:
    """Run a workload once."""
    requests = requests_of(name)
    before, sums = _publishing(runtime), _sums(runtime)
    seconds, marks = run(runtime, requests)
    after = _publishing(runtime)
    if setup.ranks > 1:
        time.sleep(BEAT_WAIT_S)
    idle = [_idle(begin, end) for begin, end in zip(sums, _sums(runtime), strict=True)]
    steps = marks[-1][0] - marks[0][0] + 1
    longest = max(request.max_tokens for request in requests)
    return Measurement(
        workload=name,
        setup=setup,
        seconds=seconds,
        steps=steps,
        output_tokens_per_s=sum(request.max_tokens for request in requests) / seconds,
        input_tokens_per_s=sum(len(request.prompt_ids) for request in requests) / seconds,
        ms_per_output=1e3 * seconds / longest,
        idle_share=idle,
        publish_us=1e6 * (after - before) / steps,
        publish_share=(after - before) / seconds,
        step_ms_by_tenth=by_tenth(marks),
    )


def agree(runtime: Runtime, setup: Setup, steps: int) -> Agreement:
    """Requests of all kinds come and go until `steps` steps are done. Raises RanksDiffer where ranks do."""
    rng = random.Random(setup.overlap_depth)
    first, added = runtime.stats(), 0
    running: list[Request] = []
    with runtime.running():
        while True:
            going = runtime.stats().steps - first.steps < steps
            running = [request for request in running if request.uid in runtime.requests]
            while going and len(running) < 40 and (len(running) < 8 or rng.random() < 0.2):
                prompt = [rng.randrange(workloads.VOCABULARY_CAP) for _ in range(int(rng.triangular(1, 1500, 100)))]
                running.append(runtime.add(prompt, _random_params(rng), seed=added))
                added += 1
            if going and running and rng.random() < 0.01:
                runtime.end(rng.choice(running))
            if not runtime.has_work:
                break
            runtime.step()
    time.sleep(BEAT_WAIT_S)
    after = runtime.stats()
    return Agreement(
        setup, after.steps - first.steps, _num_compared(runtime), added, after.output_tokens - first.output_tokens
    )


def _random_params(rng: random.Random) -> SamplingParams:
    options: dict[str, object] = rng.choice(
        [
            {"temperature": 0},
            {"temperature": 0.8},
            {"temperature": 1.2, "top_k": 20},
            {"temperature": 0.9, "top_p": 0.9},
            {"temperature": 0.9, "min_p": 0.05, "logprobs": 2},
            {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        ]
    )
    if rng.random() < 0.5:
        options = {"temperature": rng.choice([0, 0.8])}
    return SamplingParams(max_tokens=rng.randint(1, 200), ignore_eos=True, detokenize=False, **options)  # type: ignore[arg-type]


def _sums(runtime: Runtime) -> list[tuple[float, float]]:
    """(busy, idle) device seconds since the start of each rank."""
    own = runtime.stats()
    others: Mapping[int, Beat] = runtime.beats()
    return [(own.busy_s, own.bubble_s), *((others[rank].busy_s, others[rank].bubble_s) for rank in sorted(others))]


def _idle(begin: tuple[float, float], end: tuple[float, float]) -> float:
    busy, idle = end[0] - begin[0], end[1] - begin[1]
    return idle / (busy + idle) if busy + idle else 0.0


def _publishing(runtime: Runtime) -> float:
    turns = runtime.loop.turns
    return turns.publish_s if isinstance(turns, LeaderTurns) else 0.0


def _num_compared(runtime: Runtime) -> int:
    from stretto.distributed.digest import DigestCheck

    witness = runtime.loop.witness
    return witness.num_compared if isinstance(witness, DigestCheck) else 0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b", choices=sorted(workloads.SHAPES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--depth", action="append", type=int, help="overlap depths (default 1, 0, 2)")
    parser.add_argument("--workload", action="append", help="of depth 1, as in stretto.bench.gpu")
    parser.add_argument("--ablation", action="append", help="workloads of all depths and of NCCL alone")
    parser.add_argument("--check-steps", type=int, default=2000)
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    depths = options.depth or [1, 0, 2]
    full = options.workload or ["w2:1:128", "w2:32:256", "w2:128:256", "w1", "w3"]
    short = options.ablation or ["w2:1:128", "w2:32:128", "w2:128:128", "w3"]
    compared = [(Setup(options.model, ranks, depths[0]), full) for ranks in (1, options.ranks)]
    ablation = [(Setup(options.model, options.ranks, depth, 128), short) for depth in depths]
    ablation.append((Setup(options.model, options.ranks, depths[0], 128, peer_memory=False), short))
    report: dict[str, object] = {"environment": environment()}
    rows: list[Measurement] = []
    checks: list[Agreement] = []

    def write() -> None:
        report["measurements"] = [asdict(row) for row in rows]
        report["digests"] = [asdict(row) for row in checks]
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(report, indent=1))

    def measure_all(setups: Sequence[tuple[Setup, Sequence[str]]], root: Path) -> None:
        for setup, names in setups:

            def use(runtime: Runtime, setup: Setup = setup, names: Sequence[str] = names) -> None:
                run(runtime, workloads.warm_up())
                for name in names:
                    rows.append(measure(runtime, setup, name))
                    print(_line(rows[-1]), flush=True)
                    write()

            with_engine(setup, root, use)

    with tempfile.TemporaryDirectory() as root:
        measure_all(compared, Path(root))
        for depth in depths if options.check_steps else ():

            def use(runtime: Runtime, setup: Setup = Setup(options.model, options.ranks, depth, 48)) -> None:
                checks.append(agree(runtime, setup, options.check_steps))
                print(checks[-1], flush=True)
                write()

            with_engine(Setup(options.model, options.ranks, depth, 48), Path(root), use, check=True)
        measure_all(ablation, Path(root))


def _line(m: Measurement) -> str:
    idle = ", ".join(f"{100 * share:.2f}" for share in m.idle_share)
    return (
        f"{m.setup.ranks} ranks, depth {m.setup.overlap_depth}, peer memory {m.setup.peer_memory}, {m.workload}: "
        f"{m.ms_per_output:.3f} ms/output, {m.output_tokens_per_s:.0f} out/s, {m.input_tokens_per_s:.0f} in/s, "
        f"idle {idle} %, publish {m.publish_us:.1f} us a step ({100 * m.publish_share:.2f} %), {m.steps} steps of "
        f"{'/'.join(f'{x:.2f}' for x in m.step_ms_by_tenth)} ms"
    )


if __name__ == "__main__":
    main()
