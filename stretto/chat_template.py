"""Renders a model's chat template: Jinja in a sandbox, with the helpers that Hugging Face templates expect.

Owns rendering only; which template a model has, and its special tokens, is the tokenizer's business. A template is
code from the model's author and is treated as untrusted: it sees values, never Python.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stretto.errors import InvalidRequest, ModelLoadError, StrettoError

if TYPE_CHECKING:
    import jinja2

# Put behind the text of a message that is to be continued, to find where its rendering ends. No text contains it by
# chance.
_CUT_HERE = "\ue000stretto:continue\ue000"


class ChatTemplate:
    """One template, compiled at its first use (importing jinja2 takes a tenth of a second)."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        on_syntax_error: type[StrettoError] = ModelLoadError,
    ) -> None:
        """`special_tokens` ("bos_token", "eos_token", ...) are in scope; leave out those the model lacks.

        `on_syntax_error` is what a template that is no valid Jinja raises: it is the model's fault, or the user's.
        """
        self.source = source
        self._on_syntax_error = on_syntax_error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for this conversation. `variables` go to the template as they are.

        With `continue_final_message` the prompt ends where the last message's text ends, so that the model goes on
        with it. Raises InvalidRequest with the template's own words if it rejects the conversation, or if messages are
        no mappings; `on_syntax_error` if the template itself is no valid Jinja.
        """
        import jinja2

        conversation = _checked(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message and add_generation_prompt exclude each other: set one to False"
                )
            if not isinstance(conversation[-1].get("content"), str):
                raise InvalidRequest("continue_final_message needs a last message whose content is a string")
            conversation[-1]["content"] += _CUT_HERE
        scope = {**self._special_tokens, **variables}
        template = self._compiled
        try:
            text = template.render(
                messages=conversation,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **scope,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template rejects the conversation: {error.message or error}") from error
        except Exception as error:
            # What a template does with values of a type it does not expect ends in any of Python's errors.
            raise InvalidRequest(
                f"the chat template fails on this conversation ({type(error).__name__}: {error}); "
                "check roles and that every content is a string"
            ) from error
        if continue_final_message:
            text, cut, _ = text.rpartition(_CUT_HERE)
            if not cut:
                raise InvalidRequest(
                    "continue_final_message: the chat template does not show the last message's content"
                )
        return text

    @functools.cached_property
    def _compiled(self) -> "jinja2.Template":
        import jinja2

        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise self._on_syntax_error(
                f"the chat template is no valid Jinja: {error.message} (line {error.lineno})"
            ) from error


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest(
            f"messages must be a list of {{'role': ..., 'content': ...}}, not {type(messages).__name__}"
        )
    if not messages:
        raise InvalidRequest("the conversation is empty: give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"message {index} must be a mapping with a 'role', not {message!r:.100}")
    return [dict(message) for message in messages]


def _environment() -> "jinja2.Environment":
    # Imported here and built per template: jinja2 is needed only by those who chat, and nothing is worth sharing.
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

    class GenerationBlock(jinja2.ext.Extension):
        """`{% generation %}` marks what the assistant wrote, for training. When prompting it means nothing."""

        tags = {"generation"}  # noqa: RUF012  # the base class has it so

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.datetime.now().strftime(pattern)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes for HTML, which a model has not seen in training.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment
