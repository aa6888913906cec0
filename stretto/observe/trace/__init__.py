"""Trace analysis: why was the device idle? For traces of any engine or training loop, by several profilers."""

from stretto.observe.trace.analysis import Analysis, DeviceReport, analyze, analyze_trace
from stretto.observe.trace.errors import TraceError
from stretto.observe.trace.findings import Finding
from stretto.observe.trace.kinds import Cause, Severity
from stretto.observe.trace.model import Trace
from stretto.observe.trace.read import read_trace

__all__ = [
    "Analysis",
    "Cause",
    "DeviceReport",
    "Finding",
    "Severity",
    "Trace",
    "TraceError",
    "analyze",
    "analyze_trace",
    "read_trace",
]
