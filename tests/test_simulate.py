"""Scripts give exact schedules, traces give what their clients would have seen; both through the real scheduler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from stretto.cli.app import app
from stretto.config import SchedulerConfig
from stretto.errors import InvalidRequest
from stretto.simulate.engine import CostModel
from stretto.simulate.load import simulate_load
from stretto.simulate.schedule import ScriptedRun, Turn
from stretto.simulate.script import parse_script
from stretto.simulate.trace import Trace, generate, read_trace


def run(text: str) -> list[Turn]:
    return ScriptedRun(parse_script(text)).run()


def test_a_script_gives_the_exact_schedule() -> None:
    turns = run(
        """
        config max_num_seqs=2 page_size=4 num_pages=9 overlap_depth=1 max_model_len=32
        at 0 arrive A prompt=10 max_tokens=5
        at 1 arrive B prompt=3 max_tokens=8 priority=-1   # goes before A from here on
        at 3 finish B
        at 5 abort A
        """
    )
    assert [turn.rows for turn in turns] == [
        ("A:prefill 0+10",),
        ("A:decode 10", "B:prefill 0+3"),
        ("B:decode 3", "A:decode 11"),
        ("B:decode 4", "A:decode 12"),
        ("B:decode 5", "A:decode 13"),
        (),
    ]
    assert turns[4].processed == ("step 3: B+1, A+1, B ends (stop)",)
    assert turns[5].happened == ("A aborts",)
    assert turns[5].processed == ("A ends (abort)", "step 4: nothing")
    assert turns[-1].free_pages == 8


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_overlap_launches_that_many_steps_ahead(depth: int) -> None:
    turns = run(f"config overlap_depth={depth}\nat 0 arrive A prompt=4 max_tokens=9")
    assert max(turn.in_flight for turn in turns) == depth
    assert sum(turn.step is not None for turn in turns) == 9


def test_a_late_end_costs_as_many_steps_as_the_loop_is_deep() -> None:
    for depth in (0, 1, 2, 3):
        turns = run(f"config overlap_depth={depth}\nat 0 arrive A prompt=4 max_tokens=30\nat 2 finish A")
        assert sum(turn.step is not None for turn in turns) == 3 + depth
        told = [line for turn in turns for line in turn.processed if "A" in line]
        assert len(told) == 3
        assert told[-1] == "step 2: A+1, A ends (stop)"


def test_a_failed_row_fails_alone() -> None:
    turns = run("at 0 arrive A prompt=4 max_tokens=4\nat 0 arrive B prompt=5 max_tokens=4\nat 1 fail A")
    told = [line for turn in turns for line in turn.processed]
    assert "step 1: B+1, A ends (error)" in told
    assert "step 3: B+1, B ends (length)" in told


def test_few_pages_make_the_latest_wait_or_give_way() -> None:
    turns = run(
        """
        config num_pages=9 page_size=4 max_num_seqs=4 max_model_len=32 enable_prefix_caching=0
        at 0 arrive A prompt=8 max_tokens=16
        at 0 arrive B prompt=7 max_tokens=16
        """
    )
    ends = [line for turn in turns for line in turn.processed if "ends" in line]
    assert ["A ends" in line for line in ends] == [True, False]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("arrive A", "line 1, 'arrive A': allowed: 'config NAME=VALUE ...' or 'at TURN"),
        ("at x arrive A prompt=3", "the turn is 'x'"),
        ("at 0 leave A prompt=3", "'leave' is not known; allowed: arrive, abort, finish, fail"),
        ("at 0 arrive A", "needs prompt=TOKENS"),
        ("at 0 arrive A prompt=many", "prompt is 'many'; allowed: a whole number"),
        ("at 0 arrive A prompt=3 colour=1", "'colour=1' is not known"),
        ("at 0 abort A now=1", "'now=1' is not known; allowed: nothing"),
        ("at 3 abort A x=1", "allowed: nothing"),
        ("config pages=3", "'pages=3' is not known"),
        ("at 3 abort A", "needs|never arrives|allowed"),
        ("at 0 arrive A prompt=3\nat 1 arrive A prompt=3", "line 2, .*: A arrives twice"),
        ("at 0 arrive A prompt=3 max_tokens=0", "line 1, .*: max_tokens is 0; allowed: a whole number from 1 to"),
        ("at 0 arrive A prompt=10 max_tokens=-3", "line 1, .*: max_tokens is -3; allowed: a whole number from 1 to"),
        (f"at 0 arrive A prompt=1{'0' * 23}", "line 1, .*: prompt is 10+; allowed: a whole number from 1 to"),
        pytest.param(
            f"at 0 arrive A prompt=3 priority=-{'9' * 5000}",
            r"line 1, .*: priority is '-9+\.\.\.; allowed",
            id="too many digits",
        ),
        ("at 0 arrive A prompt=0", "line 1, .*: prompt is 0; allowed: a whole number from 1"),
        ("at 0 arrive A prompt=64", "line 1, .*: prompt is 64; allowed: up to 63, as max_model_len is 64"),
        ("at 0 arrive A prompt=3 prompt=4", "line 1, .*: prompt is given twice, 3 and '4'; allowed: once"),
        ("config page_size=4\nconfig page_size=8", "line 2, .*: page_size is given twice, 4 and '8'"),
        ("config page_size=3", r"config \(line 1\): page_size is 3; allowed: 1, 2"),
        (
            "config num_pages=19000001 max_model_len=70000000 max_num_seqs=16",
            r"config \(line 1\): max_num_seqs is 16 and max_model_len",
        ),
        ("config enable_prefix_caching=2", "enable_prefix_caching is 2; allowed: a whole number from 0 to 1"),
        ("at 0 arrive 'A prompt=3", "line 1, .*: no closing quotation; allowed: quotes in pairs"),
        ("at 0 arrive A prompt=3 \\", "line 1, .*: no escaped character"),
        ("at \u00b2 arrive A prompt=3", "line 1, .*: the turn is '\u00b2'; allowed: a whole number from 0"),
        ("at 0 arrive A prompt=\u0663", "line 1, .*: prompt is '\u0663'; allowed: a whole number"),
        ("at 1_0 arrive A prompt=3", "line 1, .*: the turn is '1_0'; allowed: a whole number"),
        ("at -1 arrive A prompt=3", "line 1, .*: the turn is -1; allowed: a whole number from 0"),
        ("at 100000 arrive A prompt=3", "line 1, .*: the turn is 100000; allowed: a whole number from 0 to 99999"),
        ("at 2 abort A\nat 3 arrive A prompt=3", "line 1, .*: A arrives later, at turn 3 in line 2; allowed"),
        ("at 3 finish A\nat 3 arrive A prompt=3", "line 1, .*: A arrives later, at turn 3 in line 2; allowed"),
        ("at 0 arrive A prompt=3\nat 1 fail A\nat 1 finish A", "line 3, .*: line 2 already says 'fail' of it then"),
        ("at 0 arrive A prompt=3\nat 1 abort A\nat 1 abort A", "line 3, .*: line 2 already says 'abort' of it then"),
    ],
)
def test_a_bad_script_is_refused_with_its_line(line: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_script(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("at 9 abort A", r"line 2, 'at 9 abort A': A has ended before \(length\)"),
        ("at 9 finish A", r"line 2, 'at 9 finish A': no step .* samples a token of A \(it is finished\); allowed"),
        ("at 0 fail A", r"line 2, 'at 0 fail A': no step launched at turn 0 samples a token of A \(it is prefill\)"),
    ],
)
def test_what_a_script_says_to_no_effect_is_refused_with_its_line(line: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        run(f"at 0 arrive A prompt=20 max_tokens=3\n{line}")


COSTS = CostModel(step_s=1.0, prefill_token_s=0.01, decode_row_s=0.1, context_token_s=0.0, host_turn_s=0.0)


def small(**options: object) -> SchedulerConfig:
    defaults: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 4096,
        "num_pages": 2049,
        "vocab_size": 2**31 - 1,
    }
    return SchedulerConfig(**{**defaults, **options})  # type: ignore[arg-type]


def test_one_request_takes_what_the_cost_model_says() -> None:
    trace = Trace(np.array([0.0]), np.array([100]), np.array([4]))
    report = simulate_load(trace, small(), COSTS)
    assert report.steps == 2 + 3
    assert report.ttft_s.mean == pytest.approx(2 * 1.0 + 100 * 0.01)
    assert report.tpot_s.mean == pytest.approx(1.1)
    assert report.output_tokens_per_s == pytest.approx(4 / (3.0 + 3 * 1.1))
    assert report.bubble_share == 0


def test_overlap_hides_the_host() -> None:
    costs = CostModel(step_s=1.0, host_turn_s=0.5)
    trace = generate("sharegpt", 20, 0)
    serial = simulate_load(trace, small(overlap_depth=0), costs)
    overlapped = simulate_load(trace, small(overlap_depth=1), costs)
    assert serial.bubble_share == pytest.approx(1 / 3, abs=0.02)
    assert overlapped.bubble_share == 0
    assert overlapped.seconds < serial.seconds


def test_shared_prefixes_are_computed_once() -> None:
    trace = generate("shared-prefix", 200, 50.0)
    with_cache = simulate_load(trace, small(), CostModel())
    without = simulate_load(trace, small(enable_prefix_caching=False), CostModel())
    assert with_cache.cached_tokens > 0.5 * with_cache.input_tokens
    assert without.cached_tokens == 0
    assert with_cache.ttft_s.mean < without.ttft_s.mean


def test_a_load_is_reproducible_and_complete() -> None:
    trace = generate("long-context", 30, 5.0, seed=7)
    config = small(max_model_len=32_768, num_pages=4000, max_num_batched_tokens=2048)
    first = simulate_load(trace, config, CostModel())
    assert first == simulate_load(generate("long-context", 30, 5.0, seed=7), config, CostModel())
    assert first.requests == 30
    assert first.output_tokens == trace.output_length.sum()


def test_what_cannot_fit_is_counted_as_refused() -> None:
    trace = Trace(np.array([0.0, 0.0]), np.array([5000, 10]), np.array([1, 1]))
    report = simulate_load(trace, small(), COSTS)
    assert (report.requests, report.refused) == (1, 1)


def test_public_trace_formats_are_read(tmp_path: Path) -> None:
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text(
        '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}\n'
        '{"timestamp": 26482, "input_length": 700, "output_length": 1, "hash_ids": [46, 48]}\n'
    )
    trace = read_trace(mooncake)
    assert trace.arrival_s.tolist() == [0.0, 1.0]
    assert trace.input_length.tolist() == [700, 600]
    assert (trace.prompt(0)[:512] == trace.prompt(1)[:512]).all()
    assert trace.prompt(0)[512] != trace.prompt(1)[512]
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    )
    assert read_trace(azure).arrival_s[1] == pytest.approx(0.052, abs=1e-4)
    plain = tmp_path / "plain.csv"
    plain.write_text("arrival_s,input_length,output_length\n0.5,10,20\n")
    assert read_trace(plain).output_length.tolist() == [20]


COLUMNS = "arrival_s,input_length,output_length\n"


def json_line(**values: str) -> str:
    fields = {"timestamp": "1", "input_length": "2", "output_length": "3", **values}
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"timestamp": 1}\n', "line 1: input_length is missing; allowed: a whole number from 1"),
        ("a.jsonl", "not json\n", "line 1: it is no JSON: Expecting value"),
        ("a.jsonl", "[1]\n", "line 1: it is '.1.'; allowed: a JSON object"),
        pytest.param("a.jsonl", "[" * 100_000, "line 1: it is nested too deeply", id="nested"),
        ("a.jsonl", json_line(timestamp="NaN"), "line 1: timestamp is nan; allowed: a number from -1e"),
        ("a.jsonl", json_line(timestamp="-Infinity"), "line 1: timestamp is -inf; allowed"),
        ("a.jsonl", json_line(timestamp="1e300"), r"line 1: timestamp is 1e\+300; allowed"),
        ("a.jsonl", json_line(timestamp="true"), "line 1: timestamp is True; allowed"),
        ("a.jsonl", json_line(timestamp="null"), "line 1: timestamp is missing; allowed"),
        ("a.jsonl", json_line() + json_line(input_length="0"), "line 2: input_length is 0; allowed"),
        ("a.jsonl", json_line(input_length="1" + "0" * 23), "line 1: input_length is 10+; allowed"),
        ("a.jsonl", json_line(output_length="3.0"), "line 1: output_length is 3.0; allowed: a whole number"),
        ("a.jsonl", json_line(hash_ids='["a"]'), r"line 1: hash_ids\[0\] is 'a'; allowed: a whole number"),
        ("a.jsonl", json_line(hash_ids="[1, 2.5]"), r"line 1: hash_ids\[1\] is 2.5; allowed: a whole number"),
        ("a.jsonl", json_line(hash_ids="7"), "line 1: hash_ids is '7'; allowed: a list"),
        ("a.jsonl", "", "has no requests"),
        ("a.csv", "time,tokens\n1,2\n", "line 2: arrival_s is missing; allowed: a number"),
        ("a.csv", f"{COLUMNS}1,two,3\n", "line 2: input_length is 'two'; allowed: a whole number"),
        ("a.csv", f"{COLUMNS}1,2,3\n\nnan,2,3\n", "line 4: arrival_s is 'nan'; allowed: a number"),
        ("a.csv", f"{COLUMNS}inf,2,3\n", "line 2: arrival_s is 'inf'; allowed: a number"),
        ("a.csv", f"{COLUMNS}1,2\n", "line 2: output_length is missing; allowed"),
        ("a.csv", f"{COLUMNS}1,-2,3\n", "line 2: input_length is -2; allowed"),
        pytest.param("a.csv", f"{COLUMNS}{'1' * 200_000},2,3\n", "line 2: field larger", id="long field"),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n",
            "line 2: TIMESTAMP is 'noon'; allowed: a date",
        ),
    ],
)
def test_a_foreign_trace_is_refused_with_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        read_trace(path)


def test_hashes_of_64_bits_stand_for_blocks_as_small_numbers_do(tmp_path: Path) -> None:
    def trace(*hash_ids: list[int]) -> Trace:
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(json_line(input_length="1100", hash_ids=str(ids)) for ids in hash_ids))
        return read_trace(path)

    large = trace([2**64 - 1, 2**63, 5], [2**64 - 1, -(2**62)], [2**100])
    few = trace([1, 2, 3], [1, 4], [5])
    for index in range(3):
        assert large.prompt(index).tolist() == few.prompt(index).tolist()
        assert len(large.prompt(index)) == 1100
    assert simulate_load(large, small(), COSTS) == simulate_load(few, small(), COSTS)
    negative = trace([-1, -2], [])
    assert set(negative.prompt(0)[:1024]).isdisjoint(negative.prompt(1)), "what has no hash is nobody else's"


@pytest.mark.parametrize("value", [-1e-3, float("nan"), float("inf"), 1e9])
@pytest.mark.parametrize("name", ["step_s", "prefill_token_s", "decode_row_s", "context_token_s", "host_turn_s"])
def test_a_cost_that_no_step_can_have_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is .*; allowed: a number from 0 to 3600"):
        CostModel(**{name: value})


def test_a_load_that_costs_nothing_ends_at_once() -> None:
    report = simulate_load(generate("sharegpt", 20, 0), small(), CostModel(0, 0, 0, 0, 0))
    assert (report.requests, report.seconds, report.bubble_share) == (20, 0.0, 0.0)


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), 1e-300])
def test_a_rate_that_no_load_can_have_is_refused(rate: float) -> None:
    with pytest.raises(InvalidRequest, match=r"request_rate .* is .*; allowed: a number from 1e-06 to 1e\+09"):
        generate("sharegpt", 10, rate)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step-us=-1000"], "step_us is -1000.0; allowed: a number from 0"),
        (["--host-turn-us=nan"], "host_turn_us is nan; allowed: a number from 0"),
        (["--request-rate=nan"], "request_rate (0: all at once) is nan; allowed"),
        (["--seed=-1"], "seed is -1; allowed: a whole number from 0"),
        (["--num-requests=0"], "num_requests is 0; allowed: a whole number from 1"),
        (["--num-requests=1000000000000"], "num_requests is 1000000000000; allowed"),
        (["--num-pages=0"], "num_pages is 0; allowed: a whole number from 1"),
        (["--num-pages=1000000000"], "num_pages is 1000000001; allowed: up to"),
        (["--max-num-seqs=1000000", "--max-num-batched-tokens=1000000"], "max_num_seqs is 1000000 and max_model_len"),
    ],
)
def test_a_load_with_options_that_cannot_be_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["simulate", "--workload", "sharegpt", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_command_prints_a_schedule_and_a_load(tmp_path: Path) -> None:
    script = tmp_path / "schedule.txt"
    script.write_text("at 0 arrive A prompt=3 max_tokens=2\n")
    command = [sys.executable, "-m", "stretto", "simulate"]
    printed = subprocess.run([*command, str(script)], capture_output=True, text=True, check=True).stdout
    assert "A:prefill 0+3" in printed
    assert "A ends (length)" in printed
    load = [*command, "--workload", "sharegpt", "--num-requests", "50", "--json"]
    assert json.loads(subprocess.run(load, capture_output=True, text=True, check=True).stdout)["requests"] == 50
    wrong = subprocess.run([*command, "--workload", "nonsense"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "workload is 'nonsense'; allowed: sharegpt, long-context, shared-prefix" in wrong.stderr
