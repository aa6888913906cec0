"""A whole engine over a checking device and the exact model, driven turn by turn, and the serial reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stretto.config import SchedulerConfig
from stretto.device.base import Device
from stretto.device.checking import CheckingDevice
from stretto.request import FinishReason, Request, SamplingParams
from stretto.runtime import Runtime
from stretto.scheduler.batch import StepOutput
from tests.helpers.adjustment import adjusted_logits
from tests.helpers.exact_model import ExactAttention, ExactModel, next_logits

VOCAB = 11
EOS = 0


def small_config(**options: object) -> SchedulerConfig:
    """A scheduler for tiny sequences; every option can be overridden."""
    defaults: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_model_len": 24,
        "page_size": 4,
        "num_pages": 25,
        "overlap_depth": 1,
        "eos_ids": (EOS,),
        "vocab_size": VOCAB,
        "max_logprobs": 4,
        "max_stop_ids": 4,
    }
    return SchedulerConfig(**{**defaults, **options})  # type: ignore[arg-type]


def expected_output(prompt: list[int], params: SamplingParams, max_model_len: int) -> tuple[list[int], str]:
    """(output tokens, finish reason) of a greedy request by the serial loop: one request, one token at a time."""
    tokens = list(prompt)
    limit = max_model_len if params.max_tokens is None else min(max_model_len, len(prompt) + params.max_tokens)
    stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (EOS,))}
    while True:
        logits = adjusted_logits(next_logits(tokens, VOCAB), prompt, tokens[len(prompt) :], params)
        tokens.append(int(logits.argmax()))
        if tokens[-1] in stops:
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= limit:
            return tokens[len(prompt) :], "length"


@dataclass
class Stream:
    """What a client of one request was told."""

    request: Request
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    terminal: list[FinishReason | None] = field(default_factory=list)


class Simulation:
    """Runs requests on a fresh engine and records what each client is told."""

    def __init__(
        self,
        config: SchedulerConfig,
        device: Device | None = None,
        make_runtime: Callable[[SchedulerConfig, Device, ExactModel, ExactAttention], Runtime] = Runtime,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.device = device or CheckingDevice(seed)
        self.attention = ExactAttention(config.num_pages, config.page_size)
        if isinstance(self.device, CheckingDevice):
            self.device.on_release("page", self.attention.poison_page)
        self.runtime = make_runtime(config, self.device, ExactModel(config.vocab_size), self.attention)
        if isinstance(self.device, CheckingDevice):
            tables = self.runtime.engine.tables
            self.device.on_release("row", lambda slot: tables.token_ids_RL[slot].fill_(VOCAB - 1))
        self.streams: dict[int, Stream] = {}

    def add(self, prompt: list[int], params: SamplingParams | None = None, **options: int) -> Stream:
        request = self.runtime.add(prompt, params or SamplingParams(temperature=0), **options)
        self.streams[request.uid] = Stream(request, prompt)
        return self.streams[request.uid]

    def turn(self) -> list[StepOutput]:
        outputs = self.runtime.step()
        for output in outputs:
            for uid, token in zip(output.uids.tolist(), output.tokens.tolist(), strict=True):
                assert not self.streams[uid].terminal, f"request {uid} got a token after its end"
                self.streams[uid].tokens.append(token)
            for request in output.finished:
                self.streams[request.uid].terminal.append(request.finish_reason)
        self.runtime.scheduler.check()
        return outputs

    def run(self, max_turns: int = 5_000) -> None:
        """Turn until nothing is left to do."""
        for _ in range(max_turns):
            if not self.runtime.has_work:
                self.assert_at_rest()
                return
            self.turn()
        raise AssertionError(f"still work after {max_turns} turns: {self.runtime.stats()}")

    def assert_at_rest(self) -> None:
        """Every request has its one terminal result; all pages and slots are free."""
        for stream in self.streams.values():
            assert len(stream.terminal) == 1, f"request {stream.request.uid} has terminal results {stream.terminal}"
        stats = self.runtime.stats()
        assert stats.num_free_pages == stats.num_pages
        assert self.runtime.scheduler.slots.num_free == self.config.num_slots - 1

    def assert_as_expected(self, stream: Stream, *, aborted: bool = False) -> None:
        """The stream is the serial loop's; an aborted one is a beginning of it."""
        tokens, reason = expected_output(stream.prompt, stream.request.params, self.config.max_model_len)
        told = stream.terminal[0]
        if aborted and told is FinishReason.ABORT:
            assert stream.tokens == tokens[: len(stream.tokens)]
            return
        assert stream.tokens == tokens
        assert told == reason
        assert stream.request.token_ids.tolist() == [*stream.prompt, *tokens]
