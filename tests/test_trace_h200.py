"""Traces of real programs, recorded on an H200 by scripts/record_traces.py: the seeds' two cases are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto.observe.trace import analyze
from stretto.observe.trace.report_json import as_json

TRACES = Path(__file__).parent / "data" / "traces" / "h200"
INJECTED = ("truth-value", "pageable-upload")


def device_of(name: str) -> dict[str, Any]:
    device: dict[str, Any] = as_json(analyze(TRACES / f"{name}.json.gz"))["devices"][0]
    return device


def injected(device: dict[str, Any]) -> list[tuple[str, str, int]]:
    """(severity, function, count) of the findings that only an injected line can cause."""
    return [
        (finding["severity"], finding["location"].split(": ")[-1], finding["count"])
        for finding in device["findings"]
        if finding["kind"] in INJECTED
    ]


@pytest.mark.parametrize("name", ["loop_sync_at_sample", "graph_sync_at_sample"])
def test_a_truth_value_in_the_sampler_loses_the_overlap(name: str) -> None:
    device = device_of(name)
    assert injected(device) == [("lost", "sample", 12)]
    assert len(device["steps"]) == 12


def test_a_pageable_copy_at_staging_shortens_it() -> None:
    assert injected(device_of("loop_pageable_at_stage")) == [("shortened", "stage", 12)]


@pytest.mark.parametrize("name", ["loop_good", "graph_good"])
def test_without_an_injected_line_none_is_reported(name: str) -> None:
    device = device_of(name)
    assert injected(device) == []
    assert len(device["steps"]) == 12


def test_a_generate_loop_of_transformers_is_launch_bound() -> None:
    device = device_of("generate")
    idle = device["idle_by_cause_us"]
    assert max(idle, key=idle.get) == "launch-bound"
    assert device["busy_share"] < 0.1


def test_a_training_loop_waits_for_its_loss() -> None:
    lost = [finding for finding in device_of("training")["findings"] if finding["severity"] == "lost"]
    assert lost
