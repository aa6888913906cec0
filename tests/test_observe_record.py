"""Recording: the trace has steps, phases, works and requests, and our own analysis finds what was injected."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from stretto import InvalidRequest, SamplingParams
from stretto.cli.app import app
from stretto.device.checking import CheckingDevice
from stretto.observe import inject as inject_source
from stretto.observe import profile
from stretto.observe.record import request_spans
from stretto.observe.timeline import LAUNCH, SCHEDULE, Timeline
from stretto.observe.trace import Cause, Severity, analyze
from tests.helpers.dummy_model import write_dummy_model
from tests.helpers.llm_fixture import dummy_llm

STEPS = 8
PARAMS = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)


def _record(directory: Path, **options: object) -> Path:
    with dummy_llm(directory, overlap_depth=1, **options) as llm:
        llm.generate({"prompt_token_ids": [5]}, PARAMS, use_tqdm=False)  # not recorded
        with profile(directory / "trace.json"):
            llm.generate([{"prompt_token_ids": [3, 4, 5]}, {"prompt_token_ids": [7]}], PARAMS, use_tqdm=False)
    return directory / "trace.json"


def test_a_trace_has_steps_phases_works_and_requests(tmp_path: Path) -> None:
    events = json.loads(_record(tmp_path).read_text())["traceEvents"]
    names = Counter(event.get("name", "") for event in events if event.get("cat") == "user_annotation")
    steps = [name for name in names if name.startswith("stretto.step ")]
    assert {f"stretto.step {STEPS + index}" for index in range(STEPS)} <= set(steps)
    for phase in ("receive", "schedule", "launch", "wait", "process"):
        assert names[f"stretto.{phase}"] >= STEPS
    works = [event for event in events if event.get("name", "").startswith("stretto.work engine ")]
    assert len(works) == STEPS
    launches = [event for event in events if event.get("name") == "stretto.launch"]
    assert {work["tid"] for work in works}.isdisjoint({launch["tid"] for launch in launches})  # the worker's thread
    spans = [event for event in events if event.get("cat") == "stretto.request"]
    assert Counter(event["ph"] for event in spans) == {"b": 2, "e": 2}
    assert {event["args"]["finish_reason"] for event in spans if event["ph"] == "e"} == {"length"}
    assert {event["name"] for event in spans} == {"request 1: 3 prompt tokens", "request 2: 1 prompt tokens"}


def test_a_request_without_its_end_or_its_begin_gives_no_span() -> None:
    arrives = {"name": "stretto.request 1 arrives: 2 prompt tokens", "ts": 1.0, "pid": 1, "tid": 1}
    ends = {"name": "stretto.request 2 ends: stop", "ts": 2.0, "pid": 1, "tid": 1}
    assert request_spans([arrives, ends, {"name": "stretto.request", "ts": 0.0}, {"ph": "M"}]) == []


def test_without_a_recorder_nothing_is_annotated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"annotated {name} although nobody records")

    monkeypatch.setattr("stretto.observe.annotations.record_function", refuse)
    with dummy_llm(tmp_path) as llm:
        llm.generate({"prompt_token_ids": [5]}, PARAMS, use_tqdm=False)


def test_the_trace_is_written_even_if_the_program_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), profile(tmp_path / "deep" / "trace.json.gz"):
        _ = torch.ones(3).sum().item() / 0
    assert (tmp_path / "deep" / "trace.json.gz").stat().st_size > 0


def test_other_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"\.json, \.json\.gz"), profile(tmp_path / "trace.txt"):
        pass


def test_without_injection_the_analysis_finds_no_hidden_sync(tmp_path: Path) -> None:
    assert not [one for one in analyze(_record(tmp_path)).devices[0].findings if one.is_hidden_sync]


@pytest.mark.parametrize("sync_guard", ["off", "count"])
@pytest.mark.parametrize(
    ("inject", "kind", "severity", "function", "innocent"),
    [
        ("sync@sample", "truth-value", Severity.LOST, "look_at_samples", "if (tokens_S >= 0).all():"),
        (
            *("pageable@stage", "pageable-upload", Severity.SHORTENED),
            *("stage_from_pageable_memory", "torch.tensor(numbers, device=device)"),
        ),
    ],
)
def test_an_injected_sync_is_found_in_the_trace(
    tmp_path: Path, inject: str, kind: str, severity: Severity, function: str, innocent: str, sync_guard: str
) -> None:
    trace = _record(tmp_path, inject=f"{inject},slow-device=2ms", sync_guard=sync_guard)
    found = [one for one in analyze(trace).devices[0].findings if one.is_hidden_sync]
    assert [(one.kind, one.severity) for one in found] == [(kind, severity)]
    assert found[0].exact_line
    assert found[0].location == f"stretto/observe/inject.py({_line_of(innocent)}): {function}"
    assert STEPS - 1 <= found[0].count <= STEPS  # the last launch delays nothing any more


def _line_of(text: str) -> int:
    """Of the injecting source: the only line with this text."""
    lines = Path(inject_source.__file__).read_text().splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if text in line]
    return found


@pytest.mark.parametrize(
    ("inject", "innocent"), [("sync@sample", "if (tokens_S >= 0).all():"), ("pageable@stage", "torch.tensor(numbers,")]
)
def test_the_commands_name_the_injecting_line(tmp_path: Path, inject: str, innocent: str) -> None:
    model, trace = str(write_dummy_model(tmp_path)), tmp_path / "out.json.gz"
    command = ["generate", "the fox", "--model", model, "--load-format", "dummy", "--max-tokens", "6"]
    command += ["--max-model-len", "256", "--overlap-depth", "1", "--inject", "slow-device=2ms", "--inject", inject]
    recorded = CliRunner().invoke(app, ["trace", "record", "-o", str(trace), "--", *command])
    assert recorded.exit_code == 0, recorded.output
    told = CliRunner().invoke(app, ["trace", "analyze", str(trace)])
    assert f"at stretto/observe/inject.py({_line_of(innocent)}): " in told.output


def test_a_slow_host_is_named_in_the_trace(tmp_path: Path) -> None:
    findings = analyze(_record(tmp_path, inject="slow-host=20ms")).devices[0].findings
    late = max(findings, key=lambda one: one.idle_ns)
    assert late.cause is Cause.HOST_LATE
    assert "compute_on_the_host" in late.location
    assert not any(one.is_hidden_sync for one in findings)


def test_nvtx_ranges_carry_the_same_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    open_ranges: list[str] = []
    seen: list[tuple[str, ...]] = []

    def push(name: str) -> None:
        open_ranges.append(name)
        seen.append(tuple(open_ranges))

    monkeypatch.setattr("stretto.observe.annotations._NVTX", True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nvtx.range_push", push)
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", open_ranges.pop)
    timeline = Timeline(CheckingDevice(0))
    timeline.begin_turn()
    timeline.enter(SCHEDULE)
    timeline.enter(LAUNCH)
    timeline.launched(SimpleNamespace(index=0))
    timeline.end_turn()
    step = "stretto.step 0"
    phases = ("stretto.receive", "stretto.schedule", "stretto.launch")
    assert seen == [(step,), *((step, phase) for phase in phases)]
    assert open_ranges == []


def test_the_command_records_another_command(tmp_path: Path) -> None:
    model, trace = str(write_dummy_model(tmp_path)), tmp_path / "out.json"
    command = ["generate", "the fox", "--model", model, "--load-format", "dummy", "--max-tokens", "6"]
    result = CliRunner().invoke(app, ["trace", "record", "-o", str(trace), "--", *command, "--max-model-len", "256"])
    assert result.exit_code == 0, result.output
    assert any(e.get("name") == "stretto.launch" for e in json.loads(trace.read_text())["traceEvents"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--", "serve"], "generate, bench"), (["-o", "x.txt", "--", "generate", "x"], ".json.gz")],
)
def test_the_command_refuses_what_it_cannot_record(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["trace", "record", *arguments])
    assert result.exit_code == 2
    assert told in result.output


def test_the_command_runs_nothing_if_its_trace_can_have_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(**options: object) -> None:
        raise AssertionError("loaded a model although its trace cannot be written")

    monkeypatch.setattr("stretto.llm.LLM", load)
    (tmp_path / "file").touch()
    target = tmp_path / "file" / "out.json"
    result = CliRunner().invoke(app, ["trace", "record", "-o", str(target), "--", "generate", "the fox"])
    assert result.exit_code == 1
    assert str(target.parent) in result.output
