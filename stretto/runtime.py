"""Runtime: one engine in this process. Assembles device, model, scheduler and loop, and is how requests get in."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

from stretto.admission import Admission
from stretto.assembly import Progress, assemble
from stretto.attention.base import AttentionBackend
from stretto.cache.base import NO_KEY, CacheKey, NoCache, PrefixCache
from stretto.cache.page_pool import PagePool
from stretto.cache.radix import RadixCache
from stretto.config import EngineConfig, SchedulerConfig
from stretto.device.base import Device
from stretto.distributed.heartbeat import beat_of
from stretto.distributed.link import Beat
from stretto.distributed.member import ALONE, Member
from stretto.distributed.place import place_of
from stretto.engine.engine import Engine, StepModel
from stretto.engine.runner import EagerRunner, MakeRunner
from stretto.errors import EngineBroken, NotSupported, StrettoError
from stretto.observe.annotations import mark
from stretto.observe.engine import ObservedEngine
from stretto.observe.faults import Faults
from stretto.observe.sync_guard import SyncGuard
from stretto.observe.timeline import Timeline
from stretto.request import FinishReason, Request, RequestState, SamplingParams, TokenArray
from stretto.runtime_stats import RuntimeStats
from stretto.scheduler.batch import StepOutput
from stretto.scheduler.loop import Loop, Witness
from stretto.scheduler.scheduler import Scheduler
from stretto.scheduler.turns import AddRequest, EndRequest, Inbox, LocalTurns, Message, TurnSource
from stretto.tokenizer import Tokenizer

MakeTurns = Callable[[Inbox, Callable[[], float]], TurnSource]
"""(messages of this process, its clock) -> where the loop gets its turns."""

logger = logging.getLogger("stretto.ranks")


class _Outbox:
    """Messages from the owner of the runtime to its loop, in this process."""

    def __init__(self) -> None:
        self._messages: list[Message] = []

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def arriving(self) -> list[Request]:
        """Requests on their way."""
        return [message.request for message in self._messages if isinstance(message, AddRequest)]

    def put(self, message: Message) -> None:
        """Leave a message for the loop's next turn."""
        self._messages.append(message)

    def receive(self, block: bool) -> Iterable[Message]:
        """All messages; nobody else can bring one, so it never blocks."""
        messages, self._messages = self._messages, []
        return messages


class Runtime:
    """Scheduler, engine and loop over one device. Used by one thread at a time."""

    def __init__(
        self,
        config: SchedulerConfig,
        device: Device,
        model: StepModel,
        attention: AttentionBackend,
        *,
        cache: PrefixCache | None = None,
        tokenizer: Tokenizer | None = None,
        scheduler_type: Callable[..., Scheduler] = Scheduler,
        engine_type: Callable[..., Engine] = Engine,
        loop_type: type[Loop] = Loop,
        make_runner: MakeRunner = EagerRunner,
        make_turns: MakeTurns = LocalTurns,
        make_witness: Callable[[Scheduler], Witness | None] | None = None,
        member: Member = ALONE,
    ) -> None:
        """From parts; `start` makes the parts from options. The types are for who studies what a guard is worth.

        `make_turns` is given this process's messages and clock; `make_witness` makes what is told each processed step.
        """
        self.scheduler_config = config
        self.device = device
        self._admission = Admission(config)
        self._pool = PagePool(config.num_pages)
        if cache is None:
            cache = RadixCache(self._pool, config.page_size) if config.enable_prefix_caching else NoCache()
        check = os.environ.get("STRETTO_CHECK", "0") not in ("", "0")
        checked = check or device.checking
        self.engine = device.call(
            lambda: engine_type(config, device, model, attention, checked=checked, make_runner=make_runner)
        )
        if make_runner is not EagerRunner:
            self.engine.prepare()
        self.scheduler = scheduler_type(
            config,
            device,
            self._pool,
            cache,
            wants_host_pages=attention.wants_host_pages or device.checking,
            checked=checked,
            on_released=self.engine.poison if check and not device.checking else None,
        )
        self._timeline = Timeline(device)
        self._tokenizer = tokenizer
        self._outbox = _Outbox()
        self.loop = loop_type(
            self.scheduler,
            self.engine,
            make_turns(self._outbox, device.now),
            self._timeline,
            None if make_witness is None else make_witness(self.scheduler),
        )
        self._member = member
        self._requests: dict[int, Request] = {}
        self._num_arrived = 0
        self._pid = os.getpid()
        self._turning_in: int | None = None
        """Ident of the thread in which a turn is under way."""
        self._resting = True
        """Other ranks have been told that nothing is under way."""
        self._closed = False
        self._output_tokens = 0

    @classmethod
    def start(cls, config: EngineConfig, progress: Progress | None = None) -> Runtime:
        """Find and load the model that `config` names and set everything up. Blocks on network, disk and other ranks.

        `progress` is told what is being done and how much of it is. With more than one rank this process becomes the
        leader, and starts the others of its host. If it is another rank (on a further host, or by torchrun), it serves
        the leader until that one stops, and then leaves: raises SystemExit(0).
        Raises ModelLoadError or InvalidRequest; EngineBroken if a rank is lost.
        """
        if config.tensor_parallel_size == 1:
            return cls.assemble(config, progress)
        # What a single rank never needs.
        from stretto.distributed.leader import lead
        from stretto.distributed.lend import lend_process

        place = place_of(config)
        if not place.leads:
            lend_process(config, place, lambda member: cls.assemble(config, None, member), progress)
        return lead(config, place, progress, lambda member: cls.assemble(config, progress, member))

    @classmethod
    def assemble(cls, config: EngineConfig, progress: Progress | None = None, member: Member = ALONE) -> Runtime:
        """The engine of one rank: `start` for a rank that has its place among the others."""
        faults = Faults.parse(config.inject)
        parts = assemble(config, progress, member)
        guard = SyncGuard(config.sync_guard, cpu_as_device=parts.device.torch_device.type == "cpu")
        observed = partial(ObservedEngine, guard=guard, faults=faults)
        return cls(
            parts.config,
            parts.device,
            parts.model,
            parts.attention,
            tokenizer=parts.tokenizer,
            engine_type=observed,
            make_runner=parts.make_runner,
            make_turns=member.turns,
            make_witness=member.witness,
            member=member,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises NotSupported for a model that came without one (token ids work)."""
        if self._tokenizer is None:
            raise NotSupported("this model came without a tokenizer: give token ids and detokenize=False")
        return self._tokenizer

    @property
    def timeline(self) -> Timeline:
        """Times of the last steps, and sums since the start."""
        return self._timeline

    @property
    def guard(self) -> SyncGuard | None:
        """What watches the engine for hidden syncs; None: nothing does."""
        guard = self.engine.guard if isinstance(self.engine, ObservedEngine) else None
        return None if guard is None or guard.mode == "off" else guard

    @property
    def requests(self) -> Mapping[int, Request]:
        """Requests that have not ended, by uid."""
        return self._requests

    def add(
        self,
        prompt_ids: Sequence[int] | TokenArray,
        params: SamplingParams,
        *,
        seed: int | None = None,
        priority: int = 0,
        cache_key: CacheKey = NO_KEY,
        timeout_s: float | None = None,
    ) -> Request:
        """Queue one sample of a prompt; it starts with the next `step`. `params.n` is the caller's.

        `seed` None takes fresh entropy; `timeout_s` None takes the config's. Raises InvalidRequest or Overloaded,
        saying what was given and what is allowed; then nothing is queued.
        """
        ids = self.check(prompt_ids, params)
        if self._admission.limits_queue:
            prefill, arriving = self.scheduler.lifecycle.prefill, self._outbox.arriving
            self._admission.check_queue(
                len(ids),
                prefill.num_waiting + len(arriving),
                prefill.num_waiting_tokens + sum(len(request.prompt_ids) for request in arriving),
                self.scheduler.num_running,
            )
        request = self._admission.request(
            self._num_arrived, ids, params, seed=seed, priority=priority, cache_key=cache_key
        )
        self._num_arrived += 1
        self._requests[request.uid] = request
        mark(f"stretto.request {request.uid} arrives: {len(ids)} prompt tokens")
        timeout_s = self.scheduler_config.request_timeout_s if timeout_s is None else timeout_s
        self._outbox.put(AddRequest(request, None if timeout_s is None else self.device.now() + timeout_s))
        return request

    def check(self, prompt_ids: Sequence[int] | TokenArray, params: SamplingParams) -> TokenArray:
        """`prompt_ids` as int32 if the engine can run them with `params`; otherwise raises InvalidRequest."""
        return self._admission.check(prompt_ids, params)

    def end(self, request: Request, reason: FinishReason = FinishReason.ABORT, num_output: int | None = None) -> None:
        """End a request with the next `step`: an abort, or a stop string complete with `num_output` output tokens.

        Idempotent, and harmless after it has ended by itself.
        """
        self._outbox.put(EndRequest(request, reason, num_output))

    def step(self) -> list[StepOutput]:
        """One turn of the loop; may give no output or several. May block on the oldest step in flight.

        Raises EngineBroken in a forked child, which has none of the device's threads, and after an exception broke off
        an earlier turn.
        """
        if os.getpid() != self._pid:
            raise EngineBroken("the engine belongs to the process that made it; make one in each process")
        self._member.check()
        if self._resting and self.has_work:
            self._rest(False)
        try:
            self._turning_in = threading.get_ident()
            outputs = self.loop.turn()
        except Exception as error:
            if (cause := self._member.broken(error)) is not None:
                raise cause from error
            raise
        finally:
            self._turning_in = None
        self._member.check()  # once a rank is lost, what others were waiting for has come to an end as garbage
        for output in outputs:
            self._output_tokens += len(output.tokens)
            for request in output.finished:
                self._requests.pop(request.uid, None)  # a follower's requests were added elsewhere
                mark(f"stretto.request {request.uid} ends: {request.finish_reason}")
        if not self._resting and not self.has_work:
            self._rest(True)
        return outputs

    def _rest(self, resting: bool) -> None:
        self._resting = resting
        self._member.rest(resting)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.loop.has_work or len(self._outbox) > 0

    def running(self) -> AbstractContextManager[None]:
        """The scope in which to call `step` in a row (tunes the interpreter where the device needs it)."""
        return self.device.running()

    def output_ids(self, request: Request) -> TokenArray:
        """int32 output tokens of `request` so far (a copy)."""
        known = request.token_ids if request.state is RequestState.FINISHED or not request.slot else None
        if known is None:
            known = self.scheduler.slots.known_tokens(request)
        return known[len(request.prompt_ids) :]

    def stats(self) -> RuntimeStats:
        """Figures since the start."""
        totals = self._timeline.totals()
        return RuntimeStats(
            steps=totals.steps,
            prompt_tokens=self.scheduler.num_prefill_tokens,
            output_tokens=self._output_tokens,
            busy_s=totals.busy_s,
            bubble_s=totals.bubble_s,
            bubble_share=totals.bubble_share,
            launching_s=totals.launching_s,
            launching_share=totals.launching_share,
            runnable_s=totals.runnable_s,
            occupancy=totals.occupancy,
            overlap_window_s=totals.overlap_window_s,
            receive_s=totals.receive_s,
            schedule_s=totals.schedule_s,
            launch_s=totals.launch_s,
            blocked_s=totals.blocked_s,
            process_s=totals.process_s,
            hidden_syncs=None if self.guard is None else self.guard.num_syncs,
            preemptions=self.scheduler.lifecycle.num_preemptions,
            overlap_depth=self.scheduler_config.overlap_depth,
            num_pages=self.scheduler_config.num_pages - 1,
            num_free_pages=self._pool.num_free + self.scheduler.cache.num_evictable,
            num_cached_pages=self.scheduler.cache.num_held,
            cached_tokens=self.scheduler.lifecycle.num_cached_tokens,
            queried_tokens=self.scheduler.lifecycle.num_queried_tokens,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
        )

    def on_failure(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with the cause, from a thread of its own, once a rank is lost; `step` raises it as well."""
        self._member.on_failure(tell)

    def follow(self) -> int:
        """Do the turns that come, up to the last one; the number of steps. Blocks for as long as the engine lives."""
        with self.running():
            self._turning_in = threading.get_ident()
            while not self.loop.stopped:
                self.loop.turn()
            self._turning_in = None
        return self._timeline.steps

    def beat(self, phase: str) -> Beat:
        """What the loop does, in this phase of the rank's life. Any thread."""
        return beat_of(phase, self._timeline, self._turning_in)

    def beats(self) -> Mapping[int, Beat]:
        """What each other rank last told about itself, by rank: half a second old at most. Never blocks."""
        return self._member.beats()

    def close(self) -> None:
        """Let launched steps end, on all ranks the same ones, then end the device. Idempotent."""
        if self._closed:
            return
        self._closed = True
        orderly = self._last_turn()
        self.device.close()
        self.engine.close()
        if isinstance(self.engine, ObservedEngine):
            self.engine.stop_listening()
        if os.getpid() == self._pid:
            self._member.close(orderly=orderly)

    def _last_turn(self) -> bool:
        """Stop with other ranks at the same step; False if the engine can do no turn any more."""
        if os.getpid() != self._pid or not self._member.stop():
            return False
        try:
            while not self.loop.stopped:
                self.step()
        except StrettoError as error:
            logger.warning("the ranks end without a last turn: %s", str(error))  # its frames hold a lot
            return False
        return True
