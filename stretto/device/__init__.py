"""Devices: streams, events and pinned buffers (`base.py`) on the CPU, on CUDA, and checked for hazards in tests."""
