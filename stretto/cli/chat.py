"""`stretto chat`: a conversation in the terminal, streamed as it arrives."""

from __future__ import annotations

import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from stretto.cli import options as o
from stretto.cli.answers import printable
from stretto.cli.engine_options import EngineArguments, engine_command
from stretto.cli.failures import reported_failures
from stretto.cli.text import stdin_lines
from stretto.errors import InvalidRequest

if TYPE_CHECKING:
    from stretto.llm import LLM
    from stretto.request import SamplingParams

_HELP = """\
/reset  forget the conversation
/help   this list
/quit   leave (also Ctrl-D)
Ctrl-C stops an answer."""
_HEARD_WITHIN_S = 0.1


@engine_command(seed=None, max_num_seqs=1)
def chat(
    system: o.System = None,
    max_tokens: o.MaxTokens = 512,
    temperature: o.Temperature = 0.2,
    top_p: o.TopP = 0.9,
    top_k: o.TopK = 0,
    min_p: o.MinP = 0.0,
    stop: o.Stop = None,
    *,
    engine: EngineArguments,
    debug: o.Debug = False,
) -> None:
    """Talk with the model. Without a terminal, each line of standard input is a message."""
    with reported_failures(debug):
        from stretto.request import SamplingParams

        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=engine.get("seed"),
            stop=stop or None,
            max_tokens=max_tokens,
        )
        with o.loaded(engine) as llm:
            Conversation(llm, params, system).run()
            o.print_hidden_syncs(llm)


class Conversation:
    """One session: the messages so far, and the loop that reads and answers."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = []
        self._interactive = sys.stdin.isatty()
        self._edits_lines = self._interactive and sys.stdout.isatty()
        """Whether `input` reads with readline."""
        self._lines = stdin_lines()
        """What is read without a terminal."""

    def run(self) -> None:
        """Read and answer until /quit or the end of the input. Raises InvalidRequest as `stdin_lines`."""
        if self._interactive:
            import readline  # noqa: F401 - gives input() its line editing

            print(f"{self._llm.config.model}; /help lists the commands")
        while (line := self._read()) is not None:
            command = line.strip()
            if not command:
                continue
            if command == "/quit":
                return
            if command == "/reset":
                self._messages.clear()
                self._note("conversation forgotten")
            elif command == "/help":
                print(_HELP)
            elif command.startswith("/"):
                self._note(f"no command {command.split()[0]}; /help lists them")
            else:
                self._answer(line)

    def _read(self) -> str | None:
        """The next line, or None at the end. On a terminal, Ctrl-C drops what was typed; so does what is no text."""
        if not self._interactive:
            return next(self._lines, None)
        while True:
            try:
                with _hearing_ctrl_c(), _keeping_keys() if self._edits_lines else nullcontext():
                    return input("> ")
            except EOFError:
                print()
                return None
            except UnicodeDecodeError:
                self._note("what was typed is not UTF-8")
            except KeyboardInterrupt:
                print()
                self._note("/quit or Ctrl-D leaves")

    def _answer(self, text: str) -> None:
        """Answer one message and remember both; an answer that was stopped is remembered as far as it came."""
        self._messages.append({"role": "user", "content": text})
        parts: list[str] = []
        cut_off = False
        try:
            self._make_room()
            with closing(self._llm.stream_chat([*self._system, *self._messages], self._params)) as stream:
                for output in stream:
                    parts += [sample.text for sample in output.outputs]
                    sys.stdout.write(printable("".join(sample.text for sample in output.outputs)))
                    sys.stdout.flush()
                    cut_off = output.finished and output.outputs[0].finish_reason == "length"
            print()
            if cut_off:
                self._note("the answer reached its length limit")
        except InvalidRequest as error:
            self._messages.pop()
            self._note(str(error))
            return
        except KeyboardInterrupt:
            print()
            self._note("stopped")
        answer = "".join(parts)
        if answer:
            self._messages.append({"role": "assistant", "content": answer})
        else:
            self._messages.pop()

    def _make_room(self) -> None:
        """Forget the oldest turns until the answer has a quarter of the context, or all that it may take."""
        limit = self._llm.scheduler_config.max_model_len
        wanted = min(self._params.max_tokens or limit, limit // 4)
        while len(self._messages) > 1:
            length = len(self._llm.tokenizer.encode_chat([*self._system, *self._messages]))
            if length + wanted <= limit:
                return
            del self._messages[:2]
            self._note("the context is full; the oldest turn is forgotten")

    def _note(self, text: str) -> None:
        """A line about the session, not from the model: on standard error where standard input is no terminal."""
        sys.stdout.flush()
        print(f"({text})", file=sys.stdout if self._interactive else sys.stderr)


@contextmanager
def _hearing_ctrl_c() -> Iterator[None]:
    """`input` obeys each Ctrl-C within `_HEARD_WITHIN_S`.

    By itself it does not obey one that comes just before it waits: Python looks for signals only where one ends the
    wait. So a timer ends it again and again.
    """
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, _HEARD_WITHIN_S, _HEARD_WITHIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _keeping_keys() -> Iterator[None]:
    """The terminal keeps unread keys at a Ctrl-C, for `input` with readline.

    It waits for a key in select(), where it hears Ctrl-C, and then reads that key, where it hears none. A Ctrl-C that
    dropped the key in between would leave it waiting for another, deaf to each further Ctrl-C. (Without readline the
    terminal itself holds the line that is being typed: there, a Ctrl-C must drop it.)
    """
    terminal = sys.stdin.fileno()
    modes = termios.tcgetattr(terminal)
    keeping = list(modes)
    keeping[tty.LFLAG] |= termios.NOFLSH
    try:
        termios.tcsetattr(terminal, termios.TCSADRAIN, keeping)
        yield
    finally:
        with suppress(termios.error):  # the terminal is gone, as the input says too
            termios.tcsetattr(terminal, termios.TCSADRAIN, modes)
