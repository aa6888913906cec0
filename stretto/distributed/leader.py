"""Leader: rank 0 of a tensor-parallel engine. Brings the ranks together, and ends them together.

Owns the watch over all ranks, the transport of the turns and the tensor group. The engine itself is a Runtime like any
other; this is what it asks while it is assembled, what it gets its turns from, and whom it tells that it ends.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from stretto.config import EngineConfig, SchedulerConfig
from stretto.device.base import Device
from stretto.distributed import transport as control
from stretto.distributed.agreement import (
    MINIMUM,
    checks,
    environment_facts,
    model_facts,
    option_facts,
    size_facts,
    version_facts,
)
from stretto.distributed.digest import DigestCheck, RanksDiffer
from stretto.distributed.forks import keep_for_good, tell_forked_children
from stretto.distributed.group import TensorGroup, connect_group
from stretto.distributed.launch import start_ranks
from stretto.distributed.link import Beat
from stretto.distributed.place import Place
from stretto.distributed.rendezvous import join_store, open_listener, open_store
from stretto.distributed.turns import LeaderTurns
from stretto.distributed.watch import Watch
from stretto.errors import EngineBroken, InvalidRequest, StrettoError
from stretto.interrupts import ignored_interrupts
from stretto.scheduler.loop import Witness
from stretto.scheduler.scheduler import Scheduler
from stretto.scheduler.turns import Inbox, TurnSource

if TYPE_CHECKING:
    from stretto.models.config import ModelConfig
    from stretto.models.resolve import ResolvedModel

CONNECT_SECONDS = 60.0
LOADING_SECONDS = 24 * 3600.0
"""No limit of its own: a rank that is dead or hangs is seen, and one that reads a large model is not."""

LeadingRuntime = TypeVar("LeadingRuntime", bound="_Runtime")


class _Runtime(Protocol):
    """The leader's engine."""

    device: Device

    def beat(self, phase: str) -> Beat:
        """What its loop does, in this phase of the rank's life. Any thread."""


Progress = Callable[[str, float], None]


class Leader:
    """`Member` for rank 0. `give_up` or `close` ends it."""

    def __init__(self, config: EngineConfig, place: Place, progress: Progress | None = None) -> None:
        """Open the meeting place, where ranks of other hosts may come at once; those of this host start with `join`.

        Raises InvalidRequest if the ranks cannot meet at the given address.
        """
        self.place = place
        self._config = config
        self._progress = progress or (lambda what, share: None)
        listener = open_listener(place)
        host, port = listener.getsockname()[:2]
        self._host = host
        neighbours = [] if place.launched else [replace(p, address=(host, port)) for p in place.neighbours()]
        facts = {**version_facts(), **environment_facts(), **option_facts(config)}
        self._transport: control.LeaderTransport | None = None
        self._store: object | None = None
        self._group: TensorGroup | None = None
        self._turns: LeaderTurns | None = None
        self._digests: DigestCheck | None = None
        self.watch = Watch(place, listener, facts, lambda: start_ranks(config, neighbours))
        self.watch.on_failure(self._drop_store)
        # Called after what is registered later: the device, which comes later, has ended then, or given up waiting.
        atexit.register(self._end_with_process)
        tell_forked_children(self._forget)

    # -- while the engine is assembled ------------------------------------------------------------------------------

    def join(self, resolved: ResolvedModel, model: ModelConfig, device: Device) -> TensorGroup:
        """See `Member`."""
        watch, size = self.watch, self.place.size
        check_gpus(self.place, device)
        watch.start()  # not before: a model that cannot be split so often is refused without starting as many processes
        others = "the other rank" if size == 2 else f"the other {size - 1} ranks"
        watch.gather("hello", lambda: self._progress(f"waiting for {others}", 0.0))
        name = control.choose(self._config.control_transport.replace("-", "_"), self.place.single_host)
        self._transport = control.listen(name, size, None if self.place.single_host else self._host)
        self._store, store = open_store(self._host)
        watch.agree("hello", {"store": store, "control": self._transport.address})
        watch.gather("model")
        watch.compare("model", model_facts(self._config, resolved, model, device.torch_device))
        watch.agree("model", {})
        self._wait_for_followers(self._transport)
        host, kind = self._host, device.torch_device
        self._group = device.call(lambda: connect_group(join_store(store), 0, size, kind, host=host, look=watch.check))
        watch.on_failure(self._group.abort)
        return self._group

    def _wait_for_followers(self, transport: control.LeaderTransport) -> None:
        """Until the control plane is complete, or a rank is lost before it ever came."""
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                transport.wait_for_followers(CONNECT_SECONDS)
            except StrettoError as error:
                errors.append(error)

        thread = threading.Thread(target=wait, name="stretto-control-plane", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.05)
            self.watch.check()
        if errors:
            raise errors[0]

    def agree_on_sizes(self, sizes: SchedulerConfig) -> SchedulerConfig:
        """See `Member`."""
        self.watch.gather("sizes", lambda: self._progress("loading weights", self.watch.loading(1.0)), LOADING_SECONDS)
        self.watch.compare("sizes", size_facts(sizes))
        num_pages = min(sizes.num_pages, *(int(facts[MINIMUM]) for facts in self.watch.facts_of("sizes")))
        self.watch.agree("sizes", {MINIMUM: str(num_pages)})
        return replace(sizes, num_pages=num_pages)

    def loading(self, what: str, fraction: float) -> float:
        """See `Member`."""
        return self.watch.loading(fraction) if what == "loading weights" else fraction

    def turns(self, inbox: Inbox, now: Callable[[], float]) -> TurnSource:
        """See `Member`."""
        assert self._transport is not None
        self._turns = LeaderTurns(inbox, now, self._transport.publish)
        return self._turns

    def witness(self, scheduler: Scheduler) -> Witness | None:
        """See `Member`: under STRETTO_CHECK, the comparison with the other ranks."""
        if not checks():
            return None
        self._digests = DigestCheck(scheduler, range(1, self.place.size))
        self.watch.on_digest = self._digests.take
        return self._digests

    # -- while it runs ----------------------------------------------------------------------------------------------

    def ready(self, own_beat: Callable[[str], Beat]) -> None:
        """The engine is complete: wait for those of the others. `own_beat`: what the leader's loop does. Blocks."""
        self.watch.gather("ready", lambda: None, LOADING_SECONDS)
        self.watch.own_beat = own_beat
        self.watch.rest(True)
        self.watch.agree("ready", {})

    def beats(self) -> Mapping[int, Beat]:
        """See `Member`."""
        return self.watch.beats()

    def rest(self, resting: bool) -> None:
        """See `Member`."""
        self.watch.rest(resting)

    def check(self) -> None:
        """Raise EngineBroken if a rank is lost, RanksDiffer if one did something else. hot path"""
        if self.watch.failure is not None:
            raise self._error()

    def broken(self, error: Exception) -> EngineBroken:
        """See `Member`: names the rank that is the cause."""
        self.watch.explain(error)
        return self._error()

    def _error(self) -> EngineBroken:
        if self._digests is not None and self._digests.difference is not None:
            return RanksDiffer(self._digests.difference)
        return EngineBroken(str(self.watch.failure))

    # -- its end ----------------------------------------------------------------------------------------------------

    def on_failure(self, tell: Callable[[str], None]) -> None:
        """See `Member`."""
        self.watch.on_failure(lambda: tell(str(self.watch.failure)))

    def stop(self) -> bool:
        """See `Member`; False as well after a failure: then there is no turn any more."""
        if self.watch.failure is not None or self._turns is None:
            return False
        self._turns.stop()
        return True

    def give_up(self, error: BaseException) -> EngineBroken | None:
        """The engine could not be assembled: end all ranks; returns what to raise instead. Blocks for some seconds."""
        own = self.watch.failure is None and not _is_echo(error)
        cause = self.watch.explain(error)
        self.close(orderly=False)
        return None if own or str(error) == cause else EngineBroken(cause)

    def close(self, *, orderly: bool) -> None:
        """End all ranks and let go of everything; the device must have no work any more. Blocks for some seconds.

        `orderly`: the last turn is done, and the followers are doing it.
        """
        atexit.unregister(self._end_with_process)
        self.watch.close(orderly=orderly)
        if self._transport is not None:
            self._transport.close()
        if self._group is not None:
            self._group.close()
        self._drop_store()

    def abandon(self) -> None:
        """End all ranks without a last turn, and without waiting for it: nobody has the engine any more."""
        self.watch.on_end = self._let_go
        self.watch.abandon()

    def _end_with_process(self) -> None:
        """The interpreter ends with an engine that nobody has closed. Blocks for some seconds at most."""
        with ignored_interrupts():  # one more Ctrl-C would leave half of it
            self.watch.close(orderly=False)
            self._let_go()

    def _let_go(self) -> None:
        """All ranks have ended, and nobody closes the engine: leave nothing to a torn-down interpreter."""
        atexit.unregister(self._end_with_process)
        if self._transport is not None:
            self._transport.close()
        if self._group is not None:
            self._group.end_with_process()

    def _forget(self) -> None:
        """A forked child ends, or drops its copy of the engine, without touching the parent's connections."""
        atexit.unregister(self._end_with_process)
        keep_for_good(self)

    def _drop_store(self) -> None:
        """Whoever waits in the store for a rank that will not come is set free."""
        self._store = None


def lead(
    config: EngineConfig, place: Place, progress: Progress | None, build: Callable[[Leader], LeadingRuntime]
) -> LeadingRuntime:
    """The engine of rank 0, with all others around it. Blocks until all have loaded.

    Raises what `build` raises, InvalidRequest if a rank does not fit to the others, EngineBroken if one is lost.
    """
    leader = Leader(config, place, progress)
    runtime = None
    try:
        runtime = build(leader)
        leader.ready(_beat_of(weakref.ref(runtime)))  # an engine that nobody has must go, closed or not
    except BaseException as error:
        cause = leader.give_up(error)
        if runtime is not None:
            runtime.device.close()
        if cause is None:
            raise
        raise cause from error
    weakref.finalize(runtime, leader.abandon).atexit = False
    return runtime


def _beat_of(runtime: weakref.ref[LeadingRuntime]) -> Callable[[str], Beat]:
    def beat(phase: str) -> Beat:
        alive = runtime()
        return Beat(phase) if alive is None else alive.beat(phase)

    return beat


def check_gpus(place: Place, device: Device) -> None:
    """Raises InvalidRequest if the ranks that this process starts have not a GPU each."""
    if device.torch_device.type != "cuda" or place.launched:
        return
    there = torch.cuda.device_count()
    if there < place.num_local:
        raise InvalidRequest(
            f"tensor_parallel_size is {place.size}, so {place.num_local} GPUs are needed on this host, one a rank, but "
            f"{there} are visible: lower it, spread the ranks over more hosts, or see CUDA_VISIBLE_DEVICES"
        )


def _is_echo(error: BaseException) -> bool:
    """Whether the error may come from the end of another rank."""
    own = isinstance(error, StrettoError) and not isinstance(error, (EngineBroken, control.TransportError))
    return isinstance(error, Exception) and not own
