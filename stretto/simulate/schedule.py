"""Runs a script through the real scheduler and loop, and writes down what each turn did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np

from stretto.cache.base import NoCache, PrefixCache
from stretto.cache.page_pool import PagePool
from stretto.cache.radix import RadixCache
from stretto.device.base import Device
from stretto.engine.engine import Engine
from stretto.errors import InvalidRequest
from stretto.observe.timeline import Timeline
from stretto.request import FinishReason, Request, RequestState, SamplingParams
from stretto.scheduler.batch import IntArray, StepOutput, StepPlan
from stretto.scheduler.loop import Loop
from stretto.scheduler.scheduler import Scheduler
from stretto.scheduler.turns import AddRequest, EndRequest, LocalTurns, Message
from stretto.simulate.engine import Clock, CostModel, SimulatedEngine, SimulatedStep
from stretto.simulate.script import EOS, MAX_TURNS, OTHER, Happening, Script


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of the loop did."""

    turn: int
    happened: tuple[str, ...]
    """Arrivals and aborts, as in the script."""
    step: int | None
    """The step that it launched."""
    rows: tuple[str, ...]
    """The launched rows: `A:prefill 0+8`, `B:decode 5`."""
    processed: tuple[str, ...]
    """What came back: `step 0: A+1`, `step 2: B ends (stop)`."""
    in_flight: int
    running: int
    waiting: int
    free_pages: int
    """Cached ones that nobody uses included."""


class ScriptedRun:
    """A script in motion. `turn` goes one turn further; `run` to the end."""

    def __init__(self, script: Script) -> None:
        self.script = script
        config = script.config
        self._clock = Clock()
        device = cast(Device, self._clock)
        self.pool = PagePool(config.num_pages)
        cache: PrefixCache = RadixCache(self.pool, config.page_size) if config.enable_prefix_caching else NoCache()
        self.scheduler = Scheduler(config, device, self.pool, cache, checked=True)
        self._engine = SimulatedEngine(self._clock, _COSTS, self._sample)
        launches = cast(Engine, _Recorder(self._engine, self))
        self.loop = Loop(self.scheduler, launches, LocalTurns(self, device.now), Timeline(device))
        self.requests: dict[str, Request] = {}
        self.names: dict[int, str] = {}
        self.launched: StepPlan | None = None
        self._launched_rows: tuple[str, ...] = ()
        self._sampled: set[str] = set()
        """Who samples a token in the step of this turn."""
        self._turn = 0
        self._launched_at: dict[int, int] = {}
        self._happened: list[str] = []
        self._by_turn: dict[int, list[Happening]] = {}
        for happening in script.happenings:
            self._by_turn.setdefault(happening.turn, []).append(happening)
        self._last_turn = max(self._by_turn, default=-1)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do or to come."""
        return not self.loop.has_work and self._last_turn < self._turn

    def run(self) -> list[Turn]:
        """All turns. Raises InvalidRequest if the script does not end within MAX_TURNS."""
        turns: list[Turn] = []
        while not self.is_over:
            if len(turns) == MAX_TURNS:
                raise InvalidRequest(f"the script has not ended after {MAX_TURNS} turns")
            turns.append(self.turn())
        return turns

    def turn(self) -> Turn:
        """One turn of the real loop. Raises InvalidRequest where the script's line for it has nothing to act on."""
        self._happened.clear()
        self._sampled.clear()
        self.launched = None
        outputs = self.loop.turn()
        plan = self.launched
        self._check_sampled()
        done = Turn(
            turn=self._turn,
            happened=tuple(self._happened),
            step=None if plan is None else plan.index,
            rows=() if plan is None else self._launched_rows,
            processed=tuple(self._told(outputs)),
            in_flight=len(self.loop.in_flight),
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            free_pages=self.pool.num_free + self.scheduler.cache.num_evictable,
        )
        self._turn += 1
        return done

    def receive(self, block: bool) -> Iterable[Message]:
        """The messages of this turn (the loop's inbox)."""
        self._clock.time += _COSTS.host_turn_s
        messages = (self._message(happening) for happening in self._by_turn.get(self._turn, ()))
        return [message for message in messages if message is not None]

    def note_launch(self, plan: StepPlan) -> None:
        """The loop launched `plan` in this turn."""
        self.launched = plan
        self._launched_rows = tuple(self._rows(plan))
        self._launched_at[plan.index] = self._turn
        slots = plan.slots_B[plan.sampled_S].tolist()
        self._sampled = {self.names[self.scheduler.slots.holder(slot).uid] for slot in slots}

    def _message(self, happening: Happening) -> Message | None:
        if happening.verb == "arrive":
            self._happened.append(f"{happening.name} arrives")
            return AddRequest(self._request(happening))
        if happening.verb != "abort":
            return None
        request = self.requests[happening.name]
        if request.state is RequestState.FINISHED:
            raise happening.refusal(f"{happening.name} has ended before ({request.finish_reason})")
        self._happened.append(f"{happening.name} aborts")
        return EndRequest(request, FinishReason.ABORT)

    def _check_sampled(self) -> None:
        for happening in self._by_turn.get(self._turn, ()):
            if happening.verb in ("finish", "fail") and happening.name not in self._sampled:
                request = self.requests[happening.name]
                raise happening.refusal(
                    f"no step launched at turn {self._turn} samples a token of {happening.name} (it is "
                    f"{request.state}); allowed: turns whose step does"
                )

    def _request(self, happening: Happening) -> Request:
        length = happening.options["prompt"]
        limit = self.script.config.max_model_len
        uid = len(self.requests)
        wanted = length + happening.options.get("max_tokens", limit)
        # Prompts of equal length are equal, so that sharing can be seen.
        prompt = np.arange(length, dtype=np.int32) % 97 + 2
        params = SamplingParams(temperature=0)
        request = Request(
            uid, prompt, params, 0, min(wanted, limit), (EOS,), priority=happening.options.get("priority", 0)
        )
        self.requests[happening.name] = request
        self.names[uid] = happening.name
        return request

    def _sample(self, plan: StepPlan) -> IntArray:
        """Tokens that stop nothing, but for what the script says of the turn at which the step was launched."""
        turn = self._launched_at[plan.index]
        tokens = np.full(len(plan.sampled_S), OTHER, np.int64)
        for row, slot in enumerate(plan.slots_B[plan.sampled_S].tolist()):
            name = self.names[self.scheduler.slots.holder(slot).uid]
            for happening in self._by_turn.get(turn, ()):
                if happening.name == name and happening.verb in ("finish", "fail"):
                    tokens[row] = EOS if happening.verb == "finish" else -1
        return tokens

    def _rows(self, plan: StepPlan) -> Iterable[str]:
        for row, slot in enumerate(plan.slots_B.tolist()):
            name = self.names[self.scheduler.slots.holder(slot).uid]
            start, new = int(plan.start_B[row]), int(plan.num_new_B[row])
            yield f"{name}:decode {start}" if row < plan.num_decode else f"{name}:prefill {start}+{new}"

    def _told(self, outputs: list[StepOutput]) -> Iterable[str]:
        for output in outputs:
            parts = [f"{self.names[uid]}+1" for uid in output.uids.tolist()]
            parts += [f"{self.names[request.uid]} ends ({request.finish_reason})" for request in output.finished]
            where = "" if output.index < 0 else f"step {output.index}: "
            yield where + (", ".join(parts) if parts else "nothing")


class _Recorder:
    """Tells the run what the loop launches."""

    def __init__(self, engine: SimulatedEngine, run: ScriptedRun) -> None:
        self.device = engine.device
        self._engine = engine
        self._run = run

    def launch(self, plan: StepPlan) -> SimulatedStep:
        self._run.note_launch(plan)
        return self._engine.launch(plan)

    def results(self, step: SimulatedStep) -> object:
        return self._engine.results(step)


_COSTS = CostModel(step_s=1.0, prefill_token_s=0.0, decode_row_s=0.0, context_token_s=0.0, host_turn_s=1e-3)
"""The device is always slower than the host, so that steps overlap as deep as they may."""
