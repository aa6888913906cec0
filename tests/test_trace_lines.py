"""The line of a blocking call: exact where a guard wrote it into the trace, else guessed from the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto.observe.trace import DeviceReport, Finding, analyze
from stretto.observe.trace.report_json import as_json
from stretto.observe.trace.report_text import where
from stretto.observe.trace.source_lines import probable_lines
from tests.helpers.traces import Host, write


def report_of(path: Path, host: Host) -> DeviceReport:
    return analyze(write(path / "trace.json", host)).devices[0]


def hidden(report: DeviceReport) -> list[tuple[str, bool, int]]:
    return sorted((f.location, f.exact_line, f.count) for f in report.findings if f.is_hidden_sync)


def looped(*, inside: str = "", after: str = "", every: int = 1, steps: int = 6) -> Host:
    """Steps that read a value in `sample`; a guard annotates the call, or tells of it afterwards, in one of `every`."""
    host = Host()
    for number in range(steps):
        host.launch(500.0)
        tells = number % every == 0
        with host.within("python_function", "engine/sampler.py(41): sample"):
            with host.within("user_annotation", *([inside] if inside and tells else [])):
                host.item("aten::item", "aten::_local_scalar_dense")
            host.now += 20
            if after and tells:
                host.span("user_annotation", after, host.now, host.now + 1)
        host.work(100.0, "engine/loop.py(7): process")
    host.launch(10.0)
    return host


LINE = "engine/sampler.py(44): sample"


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    "told",
    [
        {"inside": "stretto.sync item at /srv/with space/engine/sampler.py:44 Sampler.sample"},
        {"after": "stretto.synced at /srv/with space/engine/sampler.py:44 Sampler.sample"},
    ],
)
def test_the_line_that_the_guard_saw_is_named(tmp_path: Path, told: dict[str, str], every: int) -> None:
    # Where it looks at some steps only, the others are of the same function and kind.
    assert hidden(report_of(tmp_path, looped(every=every, **told))) == [(LINE, True, 6)]


def test_a_place_of_another_function_is_not_taken(tmp_path: Path) -> None:
    host = looped(after="stretto.synced at /srv/engine/loop.py:9 Loop.process")
    assert hidden(report_of(tmp_path, host)) == [("engine/sampler.py(41): sample", False, 6)]


def test_without_frames_the_place_is_all_there_is(tmp_path: Path) -> None:
    host = looped(inside="stretto.sync item at /srv/engine/sampler.py:44 Sampler.sample")
    host.events = [event for event in host.events if event["cat"] != "python_function"]
    assert hidden(report_of(tmp_path, host)) == [("/srv/engine/sampler.py(44): Sampler.sample", True, 6)]


def test_two_lines_of_a_function_are_two_findings(tmp_path: Path) -> None:
    host = Host()
    for number in range(6):
        host.launch(500.0)
        with host.within("python_function", "engine/sampler.py(41): sample"):
            for line in (44, 47)[: 1 + (number < 4)]:
                with host.within("user_annotation", f"stretto.sync item at /srv/engine/sampler.py:{line} sample"):
                    host.item("aten::item")
        host.work(100.0, "engine/loop.py(7): process")
    host.launch(10.0)
    assert hidden(report_of(tmp_path, host)) == [(LINE, True, 6), ("engine/sampler.py(47): sample", True, 4)]


SOURCE = """
import torch


class Sampler:
    def sample(self, logits, greedy):
        logits = logits.float()

        def inner(x):
            return x.item()

        if greedy is None:
            return inner
        if self.is_greedy.all():
            return logits.argmax(-1).tolist()
        return {
            "first": logits[0]
            .sum()
            .item(),
        }

    @torch.inference_mode()
    @staticmethod
    def decorated(mask, values):
        kept = values[mask > 0]
        torch.cuda.synchronize()
        return float(kept.mean())


def flag(flag, names):
    while flag and names == "x":
        names = [name for name in names if name]
    return 1 if len(names) else 2


def many(a):
    return a.item(), (
        a.item(),
        a.item(),
        a.item(),
    )
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "engine").mkdir()
    path = tmp_path / "engine" / "sampler.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(
    ("place", "kind", "lines"),
    [
        ("(6): sample", "truth-value", [(14, "if")]),
        ("(6): sample", "tolist", [(15, ".tolist()")]),
        ("(6): sample", "item", [(19, ".item()")]),
        ("(6): sample", "compare", []),
        ("(9): inner", "item", [(10, ".item()")]),
        ("(22): decorated", "nonzero", [(25, "[mask]")]),
        ("(22): decorated", "device-sync", [(26, ".synchronize()")]),
        ("(22): decorated", "item", [(27, "float()")]),
        ("(30): flag", "truth-value", [(31, "and"), (32, "if")]),
        ("(36): many", "item", []),  # four lines: no help
        ("(7): sample", "item", []),  # the file has changed since
        ("(6): gone", "item", []),
        ("(?): sample", "item", []),
    ],
)
def test_the_source_tells_which_lines_can_be_meant(
    source: Path, tmp_path: Path, place: str, kind: str, lines: list[tuple[int, str]]
) -> None:
    for location in (f"engine/sampler.py{place}", f"{source}{place}"):
        guesses = probable_lines(location, kind, (Path("/nowhere"), tmp_path))
        assert [(guess.line, guess.what) for guess in guesses] == lines


def test_what_cannot_be_read_gives_no_guess(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "binary.py").write_bytes(b"\x00\xff")
    for name in ("missing.py", "broken.py", "binary.py", "data.txt"):
        assert probable_lines(f"{name}(1): f", "item", (tmp_path,)) == ()
    assert probable_lines("aten::item", "item", (tmp_path,)) == ()


def test_a_guess_is_told_as_one(source: Path, tmp_path: Path) -> None:
    host = Host()
    for _ in range(6):
        host.launch(500.0)
        with host.within("python_function", "engine/sampler.py(6): sample"):
            host.item("aten::is_nonzero", "aten::item")
        host.work(100.0, "engine/loop.py(7): process")
    host.launch(10.0)
    analysis = analyze(write(tmp_path / "trace.json", host))
    (finding,) = [finding for finding in analysis.devices[0].findings if finding.is_hidden_sync]
    assert (finding.location, finding.exact_line) == ("engine/sampler.py(6): sample", False)
    assert where(finding) == ", probably line 14 (if)"
    (told,) = [one for one in as_json(analysis)["devices"][0]["findings"] if one["hidden_sync"]]
    assert told["probable_lines"] == [{"line": 14, "what": "if"}]
    assert told["exact_line"] is False


def test_an_exact_line_needs_no_guess(source: Path, tmp_path: Path) -> None:
    host = looped(inside=f"stretto.sync item at {source}:19 Sampler.sample")
    found: list[Finding] = [one for one in report_of(tmp_path, host).findings if one.is_hidden_sync]
    assert [where(one) for one in found] == [""]


def test_a_guard_in_any_program_writes_its_lines_into_the_trace(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    from stretto.observe import SyncGuard

    def look(x: Any) -> None:
        x.sum().item()  # here

    x = torch.ones(3)
    guard = SyncGuard("count", cpu_as_device=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as recorder:
        for number in range(4):
            with torch.profiler.record_function(f"stretto.step {number}"), guard:
                torch.mm(torch.ones(200, 200), torch.ones(200, 200))
                look(x)
            torch.mm(x[None], x[:, None])
    recorder.export_chrome_trace(str(tmp_path / "trace.json"))
    analysis = analyze(tmp_path / "trace.json")
    source = Path(__file__).read_text().splitlines()
    line = 1 + source.index("        x.sum().item()  # here")
    (place,) = {one.location for one in analysis.devices[0].blocking}
    assert place.endswith(f"test_trace_lines.py({line}): look")
