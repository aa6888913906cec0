"""The engine process: a Runtime behind an EngineService. Started by the server's parent process, never by hand."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from stretto.config import EngineConfig
from stretto.errors import EngineBroken, InvalidRequest, NotSupported, StrettoError
from stretto.interrupts import leave_signals_to_parent
from stretto.ipc.control import ControlLine, EngineInfo, Failed, Progress, die_with_parent
from stretto.ipc.engine_service import EngineService
from stretto.ipc.settings import read_engine_settings
from stretto.ipc.sockets import engine_socket
from stretto.observe.step_times import COLUMNS, Floats

if TYPE_CHECKING:
    from stretto.runtime import Runtime

logger = logging.getLogger(__name__)


def main() -> int:
    """`python -m stretto.ipc.engine_process DIRECTORY CONTROL_FD`; returns the exit code."""
    directory, control = Path(sys.argv[1]), ControlLine.from_fd(int(sys.argv[2]))
    try:
        settings = read_engine_settings(directory)
    except FileNotFoundError:  # a front end has removed them
        sys.stderr.write("stretto: the parent process of the server is gone, and so the engine ends\n")
        return 1
    prepare_process(settings.parent_pid, settings.log_level)
    try:
        runtime, info = _load(settings.engine, control)
    except StrettoError as error:
        control.send(Failed(str(error), isinstance(error, (InvalidRequest, NotSupported))))
        return 1
    from stretto.engine.random import derive_seed

    runtime.on_failure(lambda message: control.send(Failed(message, False)))  # this thread may wait for requests
    try:
        with zmq.Context() as context, engine_socket(context, directory) as socket:
            control.send(info)
            EngineService(
                runtime,
                socket,
                control,
                max_requests=info.max_num_seqs + settings.max_queued_requests,
                figures=lambda: figures(runtime),
                derive_seed=derive_seed,
                recent=RecentSteps(runtime),
            ).run()
    except EngineBroken as error:
        control.send(Failed(str(error), False))
        return 1
    finally:
        runtime.close()
    return 0


def prepare_process(parent_pid: int, log_level: str) -> None:
    """Die with the parent, leave signals for the whole group to the parent, log to standard error."""
    die_with_parent(parent_pid)
    leave_signals_to_parent()
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def figures(runtime: Runtime) -> Mapping[str, float]:
    """The runtime's figures: all of its stats that are numbers."""
    return {name: float(value) for name, value in asdict(runtime.stats()).items() if isinstance(value, (int, float))}


class RecentSteps:
    """The runtime's last steps as front ends are told them: times in seconds since this object was made."""

    MOST = 128
    _TIMES = tuple(place for place, name in enumerate(COLUMNS) if name.endswith(("_begin", "_end")))

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._start = runtime.device.now()

    def __call__(self, after: int) -> tuple[float, Floats]:
        """Now, and the steps whose index is above `after`: the newest, at most MOST."""
        now = self._runtime.device.now() - self._start
        table = self._runtime.loop.timeline.recent(self.MOST).table
        table = table[table[:, 0] > after]
        table[:, self._TIMES] -= self._start
        return now, table


def _load(config: EngineConfig, control: ControlLine) -> tuple[Runtime, EngineInfo]:
    from stretto.models.decoder import weight_format_of
    from stretto.models.resolve import resolve_model
    from stretto.runtime import Runtime

    runtime = Runtime.start(config, lambda what, fraction: control.send(Progress(what, fraction)))
    sizes = runtime.scheduler_config
    source = resolve_model(config.tokenizer or config.model, revision=config.revision, token=config.hf_token)
    try:
        has_tokenizer = runtime.tokenizer is not None
    except NotSupported:
        has_tokenizer = False
    return runtime, EngineInfo(
        model=config.model,
        device=str(runtime.device.torch_device),
        dtype=weight_format_of(runtime.engine.model),
        tokenizer_kind=source.kind if has_tokenizer else None,
        tokenizer_path=str(source.path),
        vocab_size=sizes.vocab_size,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_logprobs=sizes.max_logprobs,
        page_size=sizes.page_size,
        num_pages=sizes.num_pages - 1,
        overlap_depth=sizes.overlap_depth,
    )


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        logging.getLogger("stretto.ipc").exception("the engine process fails")
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # device threads of a failed engine must not keep the process
