"""`stretto serve`: the OpenAI-compatible server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import options as o
from stretto.cli.engine_options import ALIASES, DEFAULT_MODEL, EngineArguments, engine_command
from stretto.cli.failures import fail, reported_failures
from stretto.cli.text import read_file
from stretto.errors import InvalidRequest

if TYPE_CHECKING:
    from stretto.ipc.control import EngineInfo

_SERVER, _LIMITS, _FILE = "Server", "Limits", "Configuration file"


def _load_file(context: typer.Context, path: Path | None) -> Path | None:
    """Options of a YAML file become the defaults; the command line wins."""
    if path is None or context.resilient_parsing:
        return path
    known = {
        name.lstrip("-"): param for param in context.command.params for name in (*param.opts, *param.secondary_opts)
    }
    context.default_map = {**(context.default_map or {}), **read_config_file(path, known)}
    return path


def read_config_file(path: Path, known: dict[str, Any]) -> dict[str, Any]:
    """The file's options under the names of the parameters. Raises typer.BadParameter: it names what is wrong."""
    import yaml

    try:
        values = yaml.safe_load(read_file(path))
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"{path} is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise typer.BadParameter(f"{path} must map option names to values")
    given = {}
    for name, value in values.items():
        option = str(name).replace("_", "-")
        param = known.get(ALIASES.get(option, option))
        if param is None or param.name in ("config", "help"):
            raise typer.BadParameter(f"{path}: there is no option '{name}'")
        if param.name in given:
            raise typer.BadParameter(f"{path}: '{name}' is given twice, under two names")
        if f"--{option}" in param.secondary_opts:  # the flag's negative form
            if not isinstance(value, bool):
                raise typer.BadParameter(f"{path}: '{name}' is {value!r}; allowed: true or false")
            value = not value
        given[param.name] = [value] if param.multiple and not isinstance(value, list) else value
    return given


@engine_command()
def serve(
    model_tag: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The model; the same as --model.", show_default=False)
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with options under their long names; the command line wins.",
            rich_help_panel=_FILE,
            callback=_load_file,
            is_eager=True,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name of the model in the API; may be repeated.", rich_help_panel="Model"),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", rich_help_panel=_SERVER)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that clients must give; may be repeated. STRETTO_API_KEY in the environment keeps it out of "
            "process lists.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_workers: Annotated[int, typer.Option(help="HTTP front end processes.", rich_help_panel=_SERVER)] = 1,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(help="Web origin that may call from browsers (CORS); may be repeated.", rich_help_panel=_SERVER),
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="One line per request.", rich_help_panel=_SERVER)
    ] = True,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.", rich_help_panel=_SERVER)] = "info",
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests have after SIGTERM.", rich_help_panel=_SERVER)
    ] = 30.0,
    engine_timeout: Annotated[
        float, typer.Option(help="Seconds without an answer after which the engine is stuck.", rich_help_panel=_SERVER)
    ] = 120.0,
    max_queued_requests: Annotated[
        int, typer.Option(help="Requests that may wait; more get a 429.", rich_help_panel=_LIMITS)
    ] = 1024,
    max_queued_tokens: Annotated[
        int | None, typer.Option(help="Open prompt tokens per front end; more get a 429.", rich_help_panel=_LIMITS)
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body.", rich_help_panel=_LIMITS)] = 16 * 2**20,
    max_header_bytes: Annotated[int, typer.Option(help="Largest request head.", rich_help_panel=_LIMITS)] = 65536,
    max_connections: Annotated[int, typer.Option(help="Connections per front end.", rich_help_panel=_LIMITS)] = 16384,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds that a request may take in all.", rich_help_panel=_LIMITS)
    ] = None,
    slow_client_timeout: Annotated[
        float, typer.Option(help="Seconds that a client may neither read nor send.", rich_help_panel=_LIMITS)
    ] = 60.0,
    clamp_max_tokens: Annotated[
        bool,
        typer.Option(
            "--clamp-max-tokens/--no-clamp-max-tokens",
            help="Cut max_tokens to the context length, or refuse it.",
            rich_help_panel=_LIMITS,
        ),
    ] = True,
    *,
    engine: EngineArguments,
    debug: o.Debug = False,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API."""
    with reported_failures(debug):
        if model_tag is not None and engine["model"] not in (DEFAULT_MODEL, model_tag):
            raise InvalidRequest(f"two models: {model_tag} and --model {engine['model']}; give one of them")
        from stretto.config import EngineConfig
        from stretto.server.settings import ServerConfig

        if model_tag is not None:
            engine["model"] = model_tag
        engine_config = EngineConfig(**engine, request_timeout_s=request_timeout, hf_token=os.environ.get("HF_TOKEN"))
        server = ServerConfig(
            host=host,
            port=port,
            api_workers=api_workers,
            served_model_names=tuple(served_model_name or ()),
            api_keys=tuple(api_key or filter(None, [os.environ.get("STRETTO_API_KEY")])),
            allowed_origins=tuple(allowed_origins or ()),
            max_queued_requests=max_queued_requests,
            max_queued_tokens=max_queued_tokens,
            max_body_bytes=max_body_bytes,
            max_header_bytes=max_header_bytes,
            max_connections=max_connections,
            slow_client_timeout=slow_client_timeout,
            engine_timeout=engine_timeout,
            drain_timeout=drain_timeout,
            clamp_max_tokens=clamp_max_tokens,
            access_log=access_log,
            log_level=log_level,
        )
        code = _run(engine_config, server)
    raise typer.Exit(code)


def _run(engine: Any, server: Any) -> int:
    import logging

    from stretto.cli.loading import LoadProgress
    from stretto.server.supervisor import Supervisor

    logging.basicConfig(level=server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with LoadProgress() as progress:
        shown = [True]

        def on_progress(what: str, fraction: float) -> None:
            if shown[0]:
                progress(what, fraction)

        def on_ready(info: EngineInfo, url: str) -> None:
            shown[0] = False
            progress.__exit__(None, None, None)
            print(summary(info, url, server.api_workers, bool(server.api_keys)), file=sys.stderr, flush=True)

        supervisor = Supervisor(engine, server, on_progress=on_progress, on_ready=on_ready)
        code = supervisor.run()
    if supervisor.error is not None:
        raise fail(supervisor.error, code)
    return code


def summary(info: EngineInfo, url: str, api_workers: int, has_keys: bool) -> str:
    """What an operator wants to know when the server is up."""
    cached = info.num_pages * info.page_size
    rows = [
        ("model", f"{info.model}, {info.dtype} on {info.device}"),
        ("context", f"{info.max_model_len} tokens"),
        ("KV cache", f"{info.num_pages} pages of {info.page_size}: {cached} tokens"),
        ("batch", f"up to {info.max_num_seqs} requests, {info.max_num_batched_tokens} tokens a step"),
        ("overlap depth", f"{info.overlap_depth}"),
        ("front ends", f"{api_workers}"),
        ("API key", "needed" if has_keys else "none: whoever reaches the port may use the model"),
        ("address", f"{url}/v1"),
    ]
    return "\n".join(["stretto is ready", *(f"  {name:<14}{value}" for name, value in rows)])
