"""`stretto trace`: what it prints and writes, and with which exit code."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto.cli import main
from tests.helpers.traces import SAMPLE, Host, overlap_loop, write, write_nsight


class Result:
    """What a command left behind."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `stretto trace` in this process on a wide terminal that is none."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["stretto", "trace", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        monkeypatch.setenv("COLUMNS", "160")
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return Result(exit_.value.code if isinstance(exit_.value.code, int) else 0, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("traces")
    return {
        "good": write(folder / "good.json.gz", overlap_loop()),
        "lost": write(folder / "lost.json", overlap_loop(bug="sync@sample")),
        "late": write(folder / "late.json", overlap_loop(forward=300, process=700)),
        "nsight": write_nsight(folder / "lost.sqlite", overlap_loop(bug="sync@sample")),
    }


def test_the_worst_line_comes_first_with_its_remedy_and_its_gain(trace: Any, files: dict[str, Path]) -> None:
    result = trace("analyze", files["lost"])
    assert (result.code, result.err) == (0, "")
    lines = [line.strip() for line in result.out.splitlines()]
    assert "Overlap is lost: a hidden sync makes the host wait for the device inside the step." in lines
    first = next(i for i, line in enumerate(lines) if line.startswith("1."))
    assert "LOST" in lines[first]
    assert lines[first + 1] == f"at {SAMPLE}"
    assert "torch.where" in " ".join(lines[first : first + 8])
    assert "1.21x" in " ".join(lines[first : first + 8])


def test_a_good_trace_is_called_good(trace: Any, files: dict[str, Path]) -> None:
    out = trace("analyze", files["good"]).out
    assert "The device never waits for the host; no hidden syncs." in out
    assert "fix:" not in out


def test_json_says_what_the_summary_says(trace: Any, files: dict[str, Path], tmp_path: Path) -> None:
    document = json.loads(trace("analyze", files["lost"], "--json", "-").out)
    device = document["devices"][0]
    assert (document["format"], document["source"]) == (1, "PyTorch profiler")
    assert (
        device["findings"][0] | {"location": SAMPLE, "severity": "lost", "kind": "truth-value"} == device["findings"][0]
    )
    assert len(device["steps"]) == 20
    assert device["busy_share"] == pytest.approx(0.824, abs=0.01)
    target = tmp_path / "new" / "a.json"
    assert trace("analyze", files["lost"], "--json", target).code == 0
    assert json.loads(target.read_text()) == document


def test_several_files_are_analysed_one_after_the_other(trace: Any, files: dict[str, Path]) -> None:
    documents = json.loads(trace("analyze", files["lost"], files["nsight"], "--json", "-").out)
    assert [document["source"] for document in documents] == ["PyTorch profiler", "Nsight Systems"]
    assert documents[0]["devices"][0]["idle_us"] == documents[1]["devices"][0]["idle_us"]
    refused = trace("analyze", files["lost"], files["good"], "--html", "x.html")
    assert (refused.code, "take one trace" in refused.err) == (2, True)


def test_damage_is_one_line_and_a_code(trace: Any, files: dict[str, Path], tmp_path: Path) -> None:
    short = tmp_path / "short.json.gz"
    short.write_bytes(files["good"].read_bytes()[:2000])
    result = trace("analyze", short)
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert result.err.startswith(f"stretto: error: {short} is cut short")


def test_diff_shows_what_became_slower_and_why(trace: Any, files: dict[str, Path]) -> None:
    out = trace("diff", files["good"], files["lost"]).out
    assert "came: truth value of a device tensor" in out
    assert "went:" not in out
    back = trace("diff", files["lost"], files["good"]).out
    assert "went: truth value of a device tensor" in back
    document = json.loads(trace("diff", files["good"], files["late"], "--json").out)
    assert document["step_mean_us"][1] > 0
    assert "host-late" in document["idle_by_cause_us"]
    assert document["kernels_us"]["forward"] == pytest.approx([1000.0, 300.0])


def test_the_average_of_the_steps_is_named_and_its_unit_is_the_same_everywhere(trace: Any, tmp_path: Path) -> None:
    host = Host()
    for number, length in enumerate([2000.0, 2000.0, 2000.0, 2000.0, 12000.0]):  # median 2 ms, mean 4 ms
        with host.step(number):
            host.launch(length)
            host.item("aten::item")
    path = write(tmp_path / "uneven.json", host)
    assert "5 steps, median 2 ms, by" in trace("analyze", path).out
    rows = [line.split() for line in trace("diff", path, path).out.splitlines()]
    assert ["mean", "per", "step", "before", "after", "change"] in rows
    assert ["time", "4", "ms", "4", "ms", "+0", "ns"] in rows


def test_a_trace_does_not_differ_from_itself(trace: Any, files: dict[str, Path]) -> None:
    document = json.loads(trace("diff", files["lost"], files["lost"], "--json").out)
    assert (document["came"], document["went"], document["kernels_us"]) == ([], [], {})


@pytest.mark.parametrize("name", ["found.json", "found.json.gz"])
def test_perfetto_gets_the_lanes_and_what_was_found(
    trace: Any, files: dict[str, Path], tmp_path: Path, name: str
) -> None:
    target = tmp_path / name
    assert trace("analyze", files["nsight"], "--perfetto", target).code == 0
    data = target.read_bytes()
    events = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)["traceEvents"]
    names = [event["name"] for event in events]
    assert names.count("cudaGraphLaunch") == names.count("forward") == 20
    assert "host blocked in a sync" in names
    assert names.count("lost: to-host") == 20
    assert {event["ph"] for event in events} == {"X", "M", "C", "s", "f"}
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"steps", "gaps, by cause", "blocking calls", "stream 7"} <= tracks


def test_help_needs_neither_torch_nor_numpy() -> None:
    code = "import sys; from stretto.cli import main\ntry: main()\nfinally: print(sorted(sys.modules), file=sys.stderr)"
    for arguments in (["trace", "--help"], ["trace", "analyze", "--help"], ["trace", "diff", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert done.stdout
        assert not {"torch", "numpy"} & set(done.stderr.split("'"))


def test_explaining_a_stored_trace_loads_no_torch(files: dict[str, Path], tmp_path: Path) -> None:
    told = f"""
import sys
sys.argv = ["stretto", "trace", "analyze", {str(files["lost"])!r}, "--html", {str(tmp_path / "t.html")!r},
            "--json", {str(tmp_path / "t.json")!r}, "--perfetto", {str(tmp_path / "p.json")!r}]
from stretto.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
loaded = [name for name in ("torch", "transformers") if name in sys.modules]
assert not loaded, loaded
"""
    ended = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert all((tmp_path / name).stat().st_size for name in ("t.html", "t.json", "p.json"))


def test_the_names_of_observe_come_when_they_are_used() -> None:
    import stretto.observe

    assert stretto.observe.SyncGuard.__module__ == "stretto.observe.sync_guard"
    assert set(dir(stretto.observe)) >= {"HiddenSync", "SyncFinding", "SyncGuard", "profile"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = stretto.observe.nothing  # type: ignore[attr-defined]
