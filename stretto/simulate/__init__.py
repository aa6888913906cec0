"""Drives the real scheduler and loop over a made-up device: scripts step by step, traces by a cost model."""
