"""LLM: the offline API, with the names of vLLM's class of the same name, so that code moves over unchanged.

Owns one Runtime and who may use it when. How prompts are read is prompts.py, how answers become text is output.py.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from stretto.config import EngineConfig, SchedulerConfig
from stretto.errors import EngineBroken, InvalidRequest, NotSupported, StrettoError
from stretto.interrupts import InterruptGate, held_interrupts
from stretto.jobs import JobRunner, Work
from stretto.models.decoder import weight_format_of
from stretto.observe.step_times import RecentSteps
from stretto.observe.sync_guard import SyncFinding
from stretto.output import Job
from stretto.progress import AnswerProgress
from stretto.prompts import Prompt, PromptType, parse_prompt, parse_prompts
from stretto.request import RequestOutput, SamplingParams
from stretto.runtime import Runtime
from stretto.runtime_stats import RuntimeStats
from stretto.vllm_options import translate

if TYPE_CHECKING:
    from stretto.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
"""A turn of a conversation: {"role": "user", "content": text}."""
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model in this process that answers prompts.

    One thread at a time may call it. Close it, or use it in a `with` block, to give its memory and thread back early.
    """

    def __init__(self, model: str, *, on_progress: Callable[[str, float], None] | None = None, **options: Any) -> None:
        """Load a model: a directory, a .gguf file, a hub id, or the alias `smollm2-135m`.

        `options` are the fields of `EngineConfig`: dtype, device, max_model_len, max_num_seqs, seed, overlap_depth and
        so on. Further options of vLLM's class are taken where they mean something here. `on_progress` is told what is
        being done and the fraction of it that is. Blocks until the model is ready.
        Raises ModelLoadError (no such model, bad file), InvalidRequest (bad option), NotSupported (an option that is
        not built), TypeError (an unknown option).
        """
        self.config = EngineConfig(model=model, **translate(options))
        self._runtime = Runtime.start(self.config, on_progress)
        self._runner = JobRunner(self._runtime)
        self._lock = threading.Lock()
        self._left: deque[Job] = deque()
        """Jobs whose stream was left while the engine was in use; ended at the next use."""
        self._closed = False

    # -- answers ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: object | None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts; the outputs are in the order of the prompts. Blocks until the last one has ended.

        `sampling_params`: one for all prompts, or one for each; None is SamplingParams(). `priority`: one number for
        each prompt, smaller runs earlier. `use_tqdm` shows a progress bar on standard error; a callable makes it.
        All prompts are checked before any runs: InvalidRequest says what is wrong with which. Whatever exception ends
        this call, Ctrl-C too, ends all of its requests and leaves the LLM usable.
        """
        _not_built(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        with self._in_use() as gate:
            return self._answer(gate, parse_prompts(prompts, self._encode), sampling_params, priority, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: object | None = None,
        chat_template: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the model's chat template (or `chat_template`). As `generate`.

        `continue_final_message` lets the model go on with the last message; set `add_generation_prompt=False` then.
        """
        _not_built(lora_request=lora_request)
        conversations: Sequence[Any] = messages
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise InvalidRequest(
                f"messages is a {type(messages).__name__}; allowed: a list of messages, or of such lists"
            )
        if messages and isinstance(messages[0], Mapping):
            conversations = [messages]
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        with self._in_use() as gate:
            prompts = [self._parse_chat(conversation, options) for conversation in conversations]
            return self._answer(gate, prompts, sampling_params, None, use_tqdm)

    def stream(
        self, prompt: PromptType, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> Generator[RequestOutput, None, None]:
        """Answer one prompt bit by bit: each output holds what is new, of the samples that have something new.

        The texts of all outputs together are the text that `generate` gives, and so are the token ids; the last output
        is `finished`. Each `next` blocks until something is new. Leaving the generator early ends its requests.
        Several streams may be open at once; whichever is asked carries the others on.
        """
        with self._in_use():
            works = self._runner.prepare([parse_prompt(prompt, self._encode)], sampling_params, [priority])
        return self._stream(works)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **template_options: Any,
    ) -> Generator[RequestOutput, None, None]:
        """`stream` for a conversation; `template_options` as in `Tokenizer.apply_chat_template`."""
        with self._in_use():
            works = self._runner.prepare([self._parse_chat(messages, template_options)], sampling_params, [priority])
        return self._stream(works)

    def _answer(
        self,
        gate: InterruptGate,
        prompts: Sequence[Prompt],
        sampling_params: Params,
        priority: Sequence[int] | None,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        jobs = self._runner.submit(self._runner.prepare(prompts, sampling_params, priority), watched=False)
        unfinished = {sample for job in jobs for sample in job.samples}
        try:
            with AnswerProgress(len(unfinished), use_tqdm) as progress:
                while unfinished:
                    for sample in unfinished.intersection(self._runner.turn()):
                        unfinished.remove(sample)
                        progress.ended(sample.num_tokens)
                    gate.check()
        except BaseException:
            with suppress(EngineBroken):  # what broke it is raised here
                self._runner.abort(jobs)
            raise
        self._runner.settle()
        return [job.output() for job in jobs]

    def _stream(self, works: Sequence[Work]) -> Generator[RequestOutput, None, None]:
        jobs: list[Job] = []
        try:
            with self._in_use():
                jobs += self._runner.submit(works, watched=True)
            while jobs:
                with self._in_use() as gate:
                    while not jobs[0].has_news:
                        self._runner.turn()
                        gate.check()
                    delta = jobs[0].take_delta()
                yield delta
                if delta.finished:
                    break
        finally:
            self._leave(jobs)

    def _leave(self, jobs: Sequence[Job]) -> None:
        """End what a stream has left. That may happen at any time and in any thread: when its generator is freed."""
        self._left.extend(jobs)
        if not self._closed and self._lock.acquire(blocking=False):
            try:
                # An engine that has failed, or a forked child's copy, has nothing to end; a generator that is freed
                # cannot tell it, and the next call does.
                with suppress(StrettoError), held_interrupts(), self._runtime.running():
                    self._end_left()
                    self._runner.settle()
            finally:
                self._lock.release()

    def _end_left(self) -> None:
        while self._left:
            self._runner.abort([self._left.popleft()])

    # -- what it is -------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._runtime.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; vLLM's name for it."""
        return self._runtime.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where no sampling parameters are given."""
        return SamplingParams()

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The sizes that the options, the model and the machine led to."""
        return self._runtime.scheduler_config

    @property
    def dtype(self) -> str:
        """The weight format in use; what `auto` led to."""
        return weight_format_of(self._runtime.engine.model)

    @property
    def device(self) -> str:
        """The device in use: `cpu` or `cuda:N`."""
        return str(self._runtime.device.torch_device)

    def stats(self) -> RuntimeStats:
        """Figures of the engine since it was started."""
        return self._runtime.stats()

    def recent_steps(self, count: int | None = None) -> RecentSteps:
        """Host and device times of the last steps, oldest first."""
        return self._runtime.timeline.recent(count)

    def hidden_syncs(self) -> list[SyncFinding]:
        """Where the host waited for the device without a plan, worst first; nothing unless `sync_guard` watches."""
        guard = self._runtime.guard
        return [] if guard is None else guard.findings()

    # -- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all requests and give memory and threads back. May be called again; nothing else may."""
        if self._closed:
            return
        with self._in_use():
            self._closed = True
            self._runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _in_use(self) -> Iterator[InterruptGate]:
        """Use of the engine by one caller; Ctrl-C waits for the gate's check or the end."""
        if self._closed:
            raise StrettoError("this LLM is closed")
        if not self._lock.acquire(blocking=False):
            raise StrettoError(
                "this LLM is in use by another thread (or by the call that this one was made from); "
                "give all prompts to one call, or take turns with a lock"
            )
        try:
            with held_interrupts() as gate, self._runtime.running():
                self._end_left()
                yield gate
        finally:
            self._lock.release()

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def _parse_chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Prompt:
        text = self.tokenizer.apply_chat_template(messages, **options)
        return Prompt(text, self.tokenizer.encode(text, add_special_tokens=False))


def _not_built(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise NotSupported(f"{name}: not built yet; leave it at None")
