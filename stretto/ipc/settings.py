"""What the parent hands to the engine process, as a file of the private directory: secrets never stand in a command."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from stretto.config import EngineConfig


class EngineSettings(msgspec.Struct, frozen=True):
    """Options of the engine process."""

    engine: EngineConfig
    max_queued_requests: int
    parent_pid: int
    log_level: str


def write_settings(directory: Path, name: str, settings: object) -> None:
    """Write `settings` to a new file that only this user can read."""
    with open(os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(settings))


def read_engine_settings(directory: Path) -> EngineSettings:
    """The settings of the engine process. Raises msgspec.ValidationError if they are none."""
    return msgspec.json.decode((directory / "engine.json").read_bytes(), type=EngineSettings)
