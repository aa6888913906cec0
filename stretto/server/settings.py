"""ServerConfig: every option of the HTTP side, its default and its check. The engine's options are in config.py."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stretto.errors import InvalidRequest

LOG_LEVELS = ("debug", "info", "warning", "error")
MIB = 2**20


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Options of the HTTP side as the user gives them. Times are in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_workers: int = 1
    served_model_names: tuple[str, ...] = ()
    """Names that requests may use for the model; the first is the one that answers carry."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_origins: tuple[str, ...] = ()
    """Web origins that browsers may call from (CORS); none: off."""
    max_queued_requests: int = 1024
    """Samples that may wait beyond those that run; more get a 429."""
    max_queued_tokens: int | None = None
    """Prompt tokens that one front end may have open at once; more get a 429. None: no limit but that of requests."""
    max_body_bytes: int = 16 * MIB
    max_header_bytes: int = 64 * 1024
    max_connections: int = 16_384
    """Connections that one front end holds at once."""
    slow_client_timeout: float = 60.0
    """How long a client may read nothing while there is something for it, or send nothing of its request."""
    engine_timeout: float = 120.0
    """How long the engine may leave a front end's question without answer before it counts as stuck."""
    drain_timeout: float = 30.0
    """How long running requests may go on after SIGTERM."""
    clamp_max_tokens: bool = True
    """A max_tokens beyond the context length is cut to it; False refuses such requests."""
    access_log: bool = True
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name, least, most in (
            ("port", 0, 65535),
            ("api_workers", 1, 64),
            ("max_queued_requests", 0, 1_000_000),
            ("max_body_bytes", 1024, 2**31),
            ("max_header_bytes", 1024, MIB),
            ("max_connections", 1, 1_000_000),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise InvalidRequest(f"{name} is {value}; allowed: {least} to {most}")
        for name in ("slow_client_timeout", "engine_timeout", "drain_timeout", "max_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidRequest(f"{name} is {value}; allowed: at least 0")
        if self.log_level not in LOG_LEVELS:
            raise InvalidRequest(f"log_level is {self.log_level!r}; allowed: {', '.join(LOG_LEVELS)}")
        if any(not key or not key.isascii() or key != key.strip() for key in self.api_keys):
            raise InvalidRequest("an API key is empty or holds characters that an HTTP header cannot carry")

    @property
    def url_host(self) -> str:
        """The host as it stands in a URL."""
        try:
            return f"[{self.host}]" if ipaddress.ip_address(self.host).version == 6 else self.host
        except ValueError:
            return self.host


class WorkerSettings(msgspec.Struct, frozen=True):
    """What the parent hands to a front end, in a file of the private directory."""

    server: ServerConfig
    model: str


def read_worker_settings(directory: Path) -> WorkerSettings:
    """The settings in the private directory. Raises msgspec.ValidationError if they are none."""
    return msgspec.json.decode((directory / "worker.json").read_bytes(), type=WorkerSettings)
