"""Streamed text: to the byte what decoding all at once gives, however the tokens arrive; and stop strings in it."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from stretto.detokenizer import IncrementalDetokenizer, StopChecker
from stretto.errors import InvalidRequest
from stretto.models.gguf_file import GGUFFile
from stretto.tokenizer import Tokenizer


def byte_level(path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(path).metadata)


def sentencepiece_like() -> Tokenizer:
    """A vocabulary as in Llama 2: spaces as "▁", all bytes, the space before a text dropped."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁▁",
        "▁a",
        "b",
        "é",
        "語",
        "▁é",
    ]
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:3]])
    return Tokenizer(backend, eos_id=2)


def word_piece() -> Tokenizer:
    """A decoder whose text of a token depends on the one before it, and which has no bytes."""
    tokens = ["[UNK]", "[SEP]", "hello", "wor", "##ld", "##s", ".", "'", "s", "a", "##é"]
    backend = Backend(models.WordPiece(vocab={token: index for index, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    backend.add_special_tokens(["[SEP]"])
    return Tokenizer(backend)


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece", "word pieces"])
def tokenizer(request: pytest.FixtureRequest, smollm2_path: Path) -> Tokenizer:
    match request.param:
        case "byte-level":
            return byte_level(smollm2_path)
        case "sentencepiece":
            return sentencepiece_like()
        case _:
            return word_piece()


def portions(items: Sequence[int], cuts: list[int]) -> list[Sequence[int]]:
    edges = [0, *sorted(cut % (len(items) + 1) for cut in cuts), len(items)]
    return [items[begin:end] for begin, end in itertools.pairwise(edges)]


# Any ids: mostly of single bytes (in the first hundreds of each vocabulary), so that broken UTF-8 is common.
any_ids = st.lists(st.one_of(st.integers(0, 280), st.integers(0, 50_000)), max_size=40)


@settings(deadline=None, max_examples=300)
@given(ids=any_ids, cuts=st.lists(st.integers(0, 50), max_size=10), skip=st.booleans())
def test_the_stream_is_the_decoded_text_for_any_tokens_in_any_portions(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    whole = tokenizer.decode(ids, skip)
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    shown = ""
    for portion in portions(ids, cuts):
        shown += detokenizer.push(portion)
        # What was shown once is final: in particular no U+FFFD that a later byte would have completed.
        assert whole.startswith(shown)
    assert shown + detokenizer.finish() == whole
    assert detokenizer.finish() == ""


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=20))
def test_no_part_of_a_character_is_ever_shown(text: str) -> None:
    tokenizer = sentencepiece_like()
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = ""
    for byte in text.encode():
        shown += detokenizer.push([3 + byte])
        assert text.removeprefix(" ").startswith(shown)
    assert shown == text.removeprefix(" ")


def test_characters_appear_as_soon_as_they_are_complete() -> None:
    tokenizer = sentencepiece_like()
    detokenizer = IncrementalDetokenizer(tokenizer)
    arrived = [detokenizer.push([3 + byte]) for byte in "aé語👋".encode()]
    assert arrived == ["a", "", "é", "", "", "語", "", "", "", "👋"]


def test_bytes_that_can_no_longer_become_a_character_are_replaced_at_once() -> None:
    detokenizer = IncrementalDetokenizer(sentencepiece_like())
    assert [detokenizer.push([3 + byte]) for byte in b"\xe8\xaax\xff"] == ["", "", "\ufffdx", "\ufffd"]


def test_half_a_character_at_the_end_is_shown_as_replaced() -> None:
    tokenizer = sentencepiece_like()
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = [3 + byte for byte in "語".encode()[:2]]
    assert detokenizer.push(ids) == ""
    assert detokenizer.finish() == "\ufffd" == tokenizer.decode(ids)


def test_only_the_first_space_of_a_sentencepiece_text_is_dropped() -> None:
    tokenizer = sentencepiece_like()
    a = 3 + 256 + 2
    for ids, text in (([a, a], "a a"), ([1, a], "a"), ([a - 1, a], "  a"), ([3 + 0x20, a], " a")):
        assert tokenizer.decode(ids) == text == tokenizer._backend.decode(ids)


def test_decoding_equals_the_tokenizers_library_where_the_text_is_valid() -> None:
    tokenizer = sentencepiece_like()
    for text in ("é a語", " x", "\n\n", "👋"):
        ids = [3 + byte for byte in text.encode()]
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)


def test_work_per_token_is_bounded_even_if_the_text_never_resolves() -> None:
    decoded: list[int] = []

    class Recording(Tokenizer):
        def decode_window(self, ids: Sequence[int]) -> str:
            decoded.append(len(ids))
            return super().decode_window(ids)

    vocabulary = {"\ufffd": 0, "a": 1}
    backend = Backend(models.WordLevel(vocab=vocabulary, unk_token="a"))
    backend.decoder = decoders.Fuse()
    detokenizer = IncrementalDetokenizer(Recording(backend))
    text = "".join(detokenizer.push([0]) for _ in range(2000)) + detokenizer.finish()
    assert text == "\ufffd" * 2000
    assert max(decoded) <= 12
    assert len(decoded) <= 2 * 2000 + 2


# Stop strings

letters = st.text("ab", min_size=1, max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By trying every end in turn."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(letters, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    include=st.booleans(),
)
def test_the_first_stop_is_found_for_any_portions_and_nothing_else_is_held_back(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    shown, stop = expected(text, stops, include)
    checker = StopChecker(stops, include)
    given_out, arrived = "", ""
    for portion in portions(text, cuts):
        given_out += checker.push(str(portion))
        arrived += str(portion)
        if checker.matched is None:
            held = max((n for s in stops for n in range(len(s)) if arrived.endswith(s[:n])), default=0)
            assert given_out == arrived[: len(arrived) - held]
    assert checker.matched == stop
    assert given_out + checker.finish() == shown


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["#", "#"], ["###"], ["", ""]),
        (["#", "# x"], ["###"], ["", "## x"]),
        (["a\n", "\nb"], ["\n\n"], ["a", ""]),
        (["abc"], ["abcd", "bc"], ["a"]),  # complete first
        (["abc"], ["bc", "abc"], [""]),  # complete at the same time: the longest
        (["aab"], ["ab"], ["a"]),
        (["日本", "語"], ["本語"], ["日", ""]),
        (["x"], [], ["x"]),
    ],
)
def test_stop_strings_over_several_tokens(pieces: list[str], stops: list[str], shown: list[str]) -> None:
    checker = StopChecker(stops)
    assert [checker.push(piece) for piece in pieces] == shown


def test_after_a_stop_nothing_more_comes() -> None:
    checker = StopChecker(["."], include_stop=True)
    assert checker.push("one. two") == "one."
    assert (checker.push("three."), checker.finish(), checker.matched) == ("", "", ".")


@pytest.mark.parametrize("stop", ["abc", [""], ["a", ""], [3]])
def test_what_is_no_list_of_stop_strings_is_refused(stop: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        StopChecker(stop)
