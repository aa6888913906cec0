"""Weights are moved to huge pages without a change in them, and nothing but what was mapped for them is touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.models import huge_pages
from stretto.models.huge_pages import HUGE, anonymous_areas, back_with_huge_pages, whole_pages, without

MB = 1 << 20
SMAPS = """\
00400000-00c00000 r-xp 00000000 fd:00 123 /usr/bin/python3
Rss:                8192 kB
01000000-02000000 rw-p 00000000 00:00 0                                  [heap]
Size:              16384 kB
Rss:               12000 kB
03000000-04000000 rw-p 00000000 00:00 0
Rss:               16384 kB
VmFlags: rd wr mr mw me ac
05000000-05800000 rw-p 00000000 00:00 0
Rss:                 132 kB
06000000-06800000 rw-p 00000000 fd:00 77 /some/weights.gguf
Rss:                8192 kB
07000000-07200000 rw-p 00000000 00:00 0
Rss:                2048 kB
08000000-08800000 rw-s 00000000 00:01 99 /dev/zero (deleted)
Rss:                8192 kB
09000000-09800000 rw-p 00000000 00:00 0                                  [anon: glibc: malloc]
Rss:                8192 kB
0a000000-0a800000 rw-p 00000000 00:00 0                                  [stack]
Rss:                8192 kB
"""


def test_areas_are_the_large_anonymous_ones_in_use() -> None:
    expected = [(0x1000000, 0x2000000), (0x3000000, 0x4000000), (0x9000000, 0x9800000)]
    assert anonymous_areas(SMAPS) == expected


areas = st.lists(st.integers(0, 60), max_size=12, unique=True).map(
    lambda ends: list(zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)


@given(areas, areas)
def test_what_is_left_is_every_address_of_the_one_and_none_of_the_other(
    new: list[tuple[int, int]], old: list[tuple[int, int]]
) -> None:
    def addresses(of: list[tuple[int, int]]) -> list[int]:
        return [address for begin, end in of for address in range(begin, end)]

    left = without(new, old)
    assert all(begin < end for begin, end in left)
    assert addresses(left) == [address for address in addresses(new) if address not in addresses(old)]


def test_only_whole_huge_pages_are_meant() -> None:
    assert whole_pages((3 * MB, 9 * MB)) == (4 * MB, 8 * MB)
    assert whole_pages((4 * MB, 8 * MB)) == (4 * MB, 8 * MB)
    begin, end = whole_pages((5 * MB, 6 * MB))
    assert end - begin < HUGE


FRESH = """
import torch
from stretto.models.huge_pages import anonymous_areas, back_with_huge_pages, without

torch.ones(8).sum()
before = anonymous_areas()
weights = torch.arange(8 << 20, dtype=torch.int32)
address = weights.data_ptr()
new = without(anonymous_areas(), before)
assert any(begin <= address and address + weights.nbytes <= end for begin, end in new), (address, new)
thread = back_with_huge_pages(before)
if thread is not None:  # the administrator allows it
    thread.join()
assert weights.data_ptr() == address
assert torch.equal(weights, torch.arange(8 << 20, dtype=torch.int32))
assert back_with_huge_pages(anonymous_areas()) is None
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no Linux")
def test_memory_mapped_since_then_keeps_its_contents() -> None:
    """In a process of its own: one that has run for a while may give out memory that it had mapped before."""
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_happens_where_huge_pages_are_forbidden_or_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting = tmp_path / "enabled"
    monkeypatch.setattr(huge_pages, "_SETTING", setting)
    weights = torch.ones(8 * MB)
    assert back_with_huge_pages([]) is None  # no such file: not Linux
    setting.write_text("always madvise [never]\n")
    assert back_with_huge_pages([]) is None
    assert bool((weights == 1).all())
