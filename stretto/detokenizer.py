"""Turns arriving tokens into text that may be shown at once, and finds stop strings in it.

Owns the few bytes and characters that are held back. Concatenated, what it gives out is what Tokenizer.decode gives for
all tokens together, whatever the portions in which they came. One object per request and sample.
"""

import codecs
from collections.abc import Iterable, Sequence

from stretto.errors import InvalidRequest
from stretto.tokenizer import Tokenizer

# For decoders whose text of a token depends on its neighbours: how many tokens are decoded again as context, and how
# many are held at most while the text ends in an incomplete character. Bounds, so that the work per token stays O(1).
_CONTEXT_TOKENS = 4
_HELD_TOKENS = 8


class IncrementalDetokenizer:
    """Gives out the text of tokens as soon as its characters are complete."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        # The decoder keeps an incomplete sequence of at most three bytes, and replaces what can no longer become one.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._spaces_to_drop = tokenizer.leading_spaces_dropped
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, ids: Iterable[int]) -> str:  # hot path
        """Take further tokens; return the text that has become certain ("" if none has)."""
        shown = [token_id for token_id in ids if token_id not in self._hidden]
        if not self._tokenizer.has_token_bytes:
            # An id without a token would take a real token's place in the context.
            return "".join([self._push_by_window(index) for index in shown if self._tokenizer.has_token(index)])
        data = b"".join(map(self._tokenizer.token_bytes, shown))
        if self._spaces_to_drop and data:
            data = data.removeprefix(b" " * self._spaces_to_drop)
            self._spaces_to_drop = 0
        return self._utf8.decode(data)

    def finish(self) -> str:
        """The rest, once no more tokens will come: what was an incomplete character is U+FFFD."""
        text = self._utf8.decode(b"", final=True)
        if self._held:
            text += self._new_text()
            self._held.clear()
        return text

    def _push_by_window(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._held) < _HELD_TOKENS:
            return ""
        self._context = (self._context + self._held)[-_CONTEXT_TOKENS:]
        self._held.clear()
        return text

    def _new_text(self) -> str:
        decode = self._tokenizer.decode_window
        return decode(self._context + self._held)[len(decode(self._context)) :]


class StopChecker:
    """Finds the first stop string in the text of one answer and holds back what may still become one.

    The stop string that is complete first wins; of those that end at the same character the longest. So the result does
    not depend on how the text was cut into portions, and no more text is needed to decide.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop`: the text given out ends with the stop string instead of before it."""
        if isinstance(stop, str) or not all(isinstance(string, str) and string for string in stop):
            raise InvalidRequest(f"stop must be a list of strings that are not empty, not {stop!r:.100}")
        self._stops = [_Matcher(string) for string in stop]
        self._include_stop = include_stop
        self._pending = ""
        self.matched: str | None = None
        """The stop string that was found; nothing is given out after it."""

    def push(self, text: str) -> str:  # hot path
        """Take further text; return what can be shown now. Once `matched` is set, everything further is ignored."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        for index, character in enumerate(text):
            found = [matcher.string for matcher in self._stops if matcher.advance(character)]
            if found:
                self.matched = max(found, key=len)
                shown = self._pending + text[: index + 1]
                self._pending = ""
                return shown if self._include_stop else shown.removesuffix(self.matched)
        self._pending += text
        # Exactly the longest suffix that is the beginning of a stop string stays.
        certain = len(self._pending) - max(matcher.length for matcher in self._stops)
        shown, self._pending = self._pending[:certain], self._pending[certain:]
        return shown

    def finish(self) -> str:
        """What was held back, once no more text will come."""
        shown, self._pending = self._pending, ""
        return shown


class _Matcher:
    """Follows one string through a text (Knuth, Morris, Pratt 1977): constant work per character on average."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.length = 0
        """How many characters at the end of the text so far are the beginning of the string."""
        # _border[n]: the longest proper beginning of the first n characters that they also end with.
        self._border = [0] * (len(string) + 1)
        border = 0
        for index in range(1, len(string)):
            while border and string[index] != string[border]:
                border = self._border[border]
            border += string[index] == string[border]
            self._border[index + 1] = border

    def advance(self, character: str) -> bool:
        """Take one character; whether the string is complete now. Not to be called again after that."""
        while self.length and self.string[self.length] != character:
            self.length = self._border[self.length]
        self.length += self.string[self.length] == character
        return self.length == len(self.string)
