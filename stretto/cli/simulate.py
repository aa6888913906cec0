"""`stretto simulate`: the exact schedule of a script, or what a request trace would have seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.failures import reported_failures
from stretto.cli.text import read_file

if TYPE_CHECKING:
    from stretto.simulate.load import LoadReport
    from stretto.simulate.schedule import Turn

SCRIPT, LOAD, POLICY, COSTS = "Script", "Load", "Scheduler (load only)", "Cost model (load only)"


def simulate(
    script: Annotated[Path | None, typer.Argument(help="A script: prints the schedule, turn by turn.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A request trace (JSON lines or CSV).", rich_help_panel=LOAD)
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="sharegpt, long-context or shared-prefix.", rich_help_panel=LOAD)
    ] = None,
    num_requests: Annotated[int, typer.Option(help="Requests of the workload.", rich_help_panel=LOAD)] = 10_000,
    request_rate: Annotated[
        float, typer.Option(help="Requests per second (0: all at once).", rich_help_panel=LOAD)
    ] = 20.0,
    seed: Annotated[int, typer.Option(help="Of the workload.", rich_help_panel=LOAD)] = 0,
    max_num_seqs: Annotated[int, typer.Option(rich_help_panel=POLICY)] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(rich_help_panel=POLICY)] = 8192,
    max_model_len: Annotated[int, typer.Option(rich_help_panel=POLICY)] = 32_768,
    page_size: Annotated[int, typer.Option(rich_help_panel=POLICY)] = 16,
    num_pages: Annotated[int, typer.Option(rich_help_panel=POLICY)] = 32_768,
    overlap_depth: Annotated[int, typer.Option(rich_help_panel=POLICY)] = 1,
    batch_policy: Annotated[str, typer.Option(help="mixed or prefill-first.", rich_help_panel=POLICY)] = "mixed",
    prefix_cache: Annotated[bool, typer.Option(rich_help_panel=POLICY)] = True,
    step_us: Annotated[float, typer.Option(help="Every step.", rich_help_panel=COSTS)] = 2000.0,
    prefill_token_us: Annotated[float, typer.Option(help="Each prompt token.", rich_help_panel=COSTS)] = 2.0,
    decode_row_us: Annotated[float, typer.Option(help="Each decoding request.", rich_help_panel=COSTS)] = 5.0,
    context_token_us: Annotated[float, typer.Option(help="Each token of KV read.", rich_help_panel=COSTS)] = 0.025,
    host_turn_us: Annotated[float, typer.Option(help="Host, each turn.", rich_help_panel=COSTS)] = 200.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, typer.Option(help="Show where an error comes from.")] = False,
) -> None:
    """Run the real scheduler without a model: a SCRIPT step by step, or a load in virtual time."""
    with reported_failures(debug):
        from stretto.errors import InvalidRequest

        if sum(source is not None for source in (script, trace, workload)) != 1:
            raise InvalidRequest("give one of: a SCRIPT, --trace FILE, --workload NAME")
        if script is not None:
            _show_script(script, as_json)
            return
        from stretto.config import SchedulerConfig
        from stretto.simulate.engine import MOST_COST_S, CostModel
        from stretto.simulate.trace import generate, read_trace
        from stretto.simulate.values import MOST_TOKENS, check_size, number, whole_number

        whole_number("num_pages", num_pages, 1, MOST_TOKENS)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            page_size=page_size,
            num_pages=num_pages + 1,
            overlap_depth=overlap_depth,
            batch_policy=batch_policy,  # type: ignore[arg-type]  # SchedulerConfig checks it
            enable_prefix_caching=prefix_cache,
            vocab_size=2**31 - 1,
        )
        check_size(config)
        given = {
            "step_us": step_us,
            "prefill_token_us": prefill_token_us,
            "decode_row_us": decode_row_us,
            "context_token_us": context_token_us,
            "host_turn_us": host_turn_us,
        }
        costs = CostModel(*(number(name, us, 0, MOST_COST_S * 1e6) * 1e-6 for name, us in given.items()))
        load = read_trace(trace) if trace is not None else generate(workload or "", num_requests, request_rate, seed)
        _show_load(_run_load(load, config, costs), as_json)


def _run_load(load: Any, config: Any, costs: Any) -> LoadReport:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from stretto.simulate.load import simulate_load

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=len(load))
        return simulate_load(load, config, costs, lambda done, total: bar.update(task, completed=done))


def _show_script(path: Path, as_json: bool) -> None:
    from stretto.simulate.schedule import ScriptedRun
    from stretto.simulate.script import parse_script

    turns = ScriptedRun(parse_script(read_file(path))).run()
    if as_json:
        from dataclasses import asdict

        print(json.dumps([asdict(turn) for turn in turns], indent=1))
    else:
        _print_turns(turns)


def _print_turns(turns: list[Turn]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("turn", justify="right")
    table.add_column("happens", no_wrap=True)
    table.add_column("step", justify="right")
    for name in ("launched rows", "processed"):
        table.add_column(name, no_wrap=True)
    for name in ("in flight", "running", "waiting", "free pages"):
        table.add_column(name, justify="right")
    for t in turns:
        step = "" if t.step is None else str(t.step)
        counts = map(str, (t.in_flight, t.running, t.waiting, t.free_pages))
        table.add_row(str(t.turn), "\n".join(t.happened), step, "  ".join(t.rows), "\n".join(t.processed), *counts)
    console = Console(soft_wrap=True)
    console.width = max(console.width, console.measure(table, options=console.options.update(width=10_000)).maximum)
    console.print(table)


def _show_load(report: LoadReport, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.as_dict(), indent=1))
        return
    print(
        f"requests        {report.requests} served, {report.refused} refused, in {report.seconds:.1f} s of virtual time"
    )
    print(f"throughput      {report.output_tokens_per_s:.0f} output tokens/s over {report.steps} steps")
    print(f"prefix cache    {report.cached_tokens} of {report.input_tokens} prompt tokens")
    print(f"preemptions     {report.preemptions}")
    print(f"bubble share    {report.bubble_share:.2%}")
    for name, values in (("TTFT", report.ttft_s), ("TPOT", report.tpot_s), ("E2E", report.e2e_s)):
        print(
            f"{name:<15} mean {values.mean * 1e3:.1f} ms, p50 {values.p50 * 1e3:.1f}, p90 {values.p90 * 1e3:.1f}, "
            f"p99 {values.p99 * 1e3:.1f}"
        )
