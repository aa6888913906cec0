"""Ctrl-C that goes to a whole group of processes, of which one decides what it means."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.interrupts import starting_children

ROOT = Path(__file__).parent.parent
CHILD = """
import os
os.write(1, b"starts")
os.read(0, 1)  # as long as it takes to import
from stretto.interrupts import leave_signals_to_parent
leave_signals_to_parent()
os.write(1, b"goes on")
"""


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_child_that_still_starts_leaves_signals_of_its_group_to_its_parent(sig: signal.Signals) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with starting_children():
        child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    assert child.stdout is not None
    assert os.read(child.stdout.fileno(), 6) == b"starts"
    child.send_signal(sig)
    said, _ = child.communicate(b"x", timeout=60)
    assert (said, child.returncode) == (b"goes on", 0)
