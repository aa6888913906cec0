"""Tokenizers: ids as in the programs that the models come from, and chats rendered as transformers renders them."""

import io
import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import regex
import sentencepiece
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import InvalidRequest, ModelLoadError, NotSupported
from stretto.models.gguf_file import GGUFFile
from stretto.tokenizer import Tokenizer

SAMPLES = json.loads((Path(__file__).parent / "data" / "smollm2_tokenizer_ids.json").read_text())


@pytest.fixture(scope="module")
def metadata(smollm2_path: Path) -> dict[str, Any]:
    return GGUFFile(smollm2_path).metadata


@pytest.fixture(scope="module")
def smollm2(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(metadata)


@pytest.fixture(scope="module")
def hugging_face(smollm2: Tokenizer) -> transformers.PreTrainedTokenizerFast:
    """transformers' tokenizer around the same vocabulary: the reference for everything but the cutting into words."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=smollm2._backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )


# Vocabulary


def test_ids_equal_those_of_llama_cpp(smollm2: Tokenizer) -> None:
    assert len(SAMPLES) == 2000
    wrong = [sample["text"] for sample in SAMPLES if smollm2.encode(sample["text"]) != sample["ids"]]
    assert wrong == []


def test_decoding_gives_the_text_back(smollm2: Tokenizer) -> None:
    wrong = [sample["text"] for sample in SAMPLES if smollm2.decode(sample["ids"], False) != sample["text"]]
    assert wrong == []


# SmolLM2's vocabulary lacks the bytes that its training text lacked: rare scripts are lost, by every program.
readable = st.text(st.characters(max_codepoint=0x24F, exclude_categories=("Cs", "Cc", "Cn")))


@settings(deadline=None)
@given(text=readable)
def test_every_text_survives_the_round_trip(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 49_151), max_size=30), skip=st.booleans())
def test_decoding_any_ids_equals_the_tokenizers_library(smollm2: Tokenizer, ids: list[int], skip: bool) -> None:
    assert smollm2.decode(ids, skip) == smollm2._backend.decode(ids, skip_special_tokens=skip)


def test_ids_without_a_token_have_no_text(smollm2: Tokenizer) -> None:
    assert smollm2.decode([-1, 49_152, 10**12]) == ""
    assert [smollm2.token_bytes(index) for index in (-1, 49_152)] == [b"", b""]


def test_token_bytes_may_be_parts_of_characters(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("👋")
    assert len(ids) > 1
    assert b"".join(smollm2.token_bytes(index) for index in ids) == "👋".encode()


def test_names_of_special_tokens_in_a_text_become_these_tokens(smollm2: Tokenizer, metadata: dict[str, Any]) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    assert smollm2.special_ids == set(range(17))
    for index in smollm2.special_ids:
        assert smollm2.encode(tokens[index]) == [index]
        around = smollm2.encode(f"a {tokens[index]}b")
        assert around == [*smollm2.encode("a "), index, *smollm2.encode("b")]
        assert smollm2.decode(around) == "a b"
        assert smollm2.decode(around, skip_special_tokens=False) == f"a {tokens[index]}b"


def test_the_facts_of_the_embedded_model(smollm2: Tokenizer) -> None:
    assert (smollm2.bos_id, smollm2.eos_id, smollm2.vocab_size) == (1, 2, 49_152)
    assert smollm2.eos_ids == {0, 2}  # <|endoftext|> and <|im_end|>


@pytest.mark.parametrize("text", ["a\ud83db", b"bytes", 3])
def test_what_is_no_text_is_refused(smollm2: Tokenizer, text: Any) -> None:
    with pytest.raises(InvalidRequest):
        smollm2.encode(text)


# Families of pre-tokenizers

# As llama.cpp writes them, without the case-insensitive group; run by another regular-expression engine.
WORDS_OF = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama-bpe": r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@pytest.mark.parametrize("family", WORDS_OF)
def test_each_family_cuts_words_as_its_expression_says(metadata: dict[str, Any], family: str) -> None:
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": family})
    texts = [sample["text"] for sample in SAMPLES] + ["I'LL we'Ve\n\n 12345 ½\t x", "１２３٣٤"]
    for text in texts:
        words = [text[slice(*span)] for _, span in tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)]
        assert words == regex.findall(WORDS_OF[family], text), text


def test_the_default_family_cuts_punctuation_and_groups_of_three_digits(metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "default"})
    words = [span for _, span in tokenizer._backend.pre_tokenizer.pre_tokenize_str("ab?! 12345")]
    assert words == [(0, 2), (2, 4), (4, 5), (5, 8), (8, 10)]


def test_llama3_takes_whole_words_and_begins_with_bos(metadata: dict[str, Any]) -> None:
    # "abc" is in the vocabulary, but merging "b" and "c" first leads elsewhere.
    small = metadata | {
        "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "c", "bc", "abc"],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["b c"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
    }
    del small["tokenizer.ggml.add_bos_token"]
    gpt2 = Tokenizer.from_gguf(small | {"tokenizer.ggml.pre": "gpt-2"})
    assert gpt2.encode("abc") == [2, 5]
    llama3 = Tokenizer.from_gguf(small | {"tokenizer.ggml.pre": "llama-bpe"})
    assert llama3.encode("abc") == [0, 6]
    assert llama3.encode("abc", add_special_tokens=False) == [6]
    assert llama3.encode("") == [0]
    both = Tokenizer.from_gguf(small | {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_eos_token": True})
    assert both.encode("a") == [2, 1]


def test_qwen2_composes_characters_first(metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "qwen2"})
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("caf\u00e9")


def test_entries_without_use_have_no_text_and_shadow_nothing(metadata: dict[str, Any]) -> None:
    padded = metadata | {
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], "hello", "<tool>"],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 5, 4],
    }
    tokenizer = Tokenizer.from_gguf(padded)
    assert tokenizer.vocab_size == 49_154
    assert tokenizer.decode([49_152]) == ""
    assert tokenizer.encode("hello") == [metadata["tokenizer.ggml.tokens"].index("hello")]
    # A user-defined token is found in the text, and shown.
    assert tokenizer.encode("<tool>") == [49_153]
    assert tokenizer.decode([49_153]) == "<tool>"


@pytest.mark.parametrize(
    ("changes", "error", "problem"),
    [
        ({"tokenizer.ggml.pre": "elvish"}, NotSupported, r"'elvish', which is not known.*smollm, llama-bpe.*qwen2"),
        ({"tokenizer.ggml.pre": None}, NotSupported, "is None"),
        ({"tokenizer.ggml.model": "bert"}, NotSupported, "'bert' is not supported"),
        ({"tokenizer.ggml.model": None}, ModelLoadError, "no tokenizer"),
        ({"tokenizer.ggml.tokens": None}, ModelLoadError, r"'tokenizer\.ggml\.tokens' is missing"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": [1, 1, 1]}, ModelLoadError, "twice"),
        ({"tokenizer.ggml.token_type": [1]}, ModelLoadError, "1 entries for 49152"),
        ({"tokenizer.ggml.merges": ["ab"]}, ModelLoadError, "no pair"),
        ({"tokenizer.ggml.merges": ["zzzzzz qqqqqq"]}, ModelLoadError, "does not fit"),
        ({"tokenizer.ggml.eos_token_id": 49_152}, ModelLoadError, "the vocabulary has 49152"),
    ],
)
def test_vocabularies_that_cannot_be_used_are_refused(
    metadata: dict[str, Any], changes: dict[str, Any], error: type[Exception], problem: str
) -> None:
    ids = {key: 0 for key in metadata if key.endswith("_token_id")}
    changed = {key: value for key, value in (metadata | ids | changes).items() if value is not None}
    with pytest.raises(error, match=problem):
        Tokenizer.from_gguf(changed)


# Sentencepiece


@pytest.fixture(scope="module")
def trained() -> sentencepiece.SentencePieceProcessor:
    """A vocabulary with byte fallback, as Llama 2's, trained on the sample strings."""
    texts = [line for sample in SAMPLES for line in sample["text"].replace("\0", "").split("\n") if line.strip()]
    texts += 20 * [
        "the quick brown fox jumps over the lazy dog",
        "    indented   code with  runs of spaces",
        "hello, hello",
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=900,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<tool>"],
        character_coverage=0.98,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def sentencepiece_metadata(trained: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    ids = range(trained.vocab_size())
    kinds = {trained.piece_to_id("<tool>"): 4}
    kinds |= {index: 2 for index in ids if trained.is_unknown(index)} | {i: 3 for i in ids if trained.is_control(i)}
    kinds |= {index: 6 for index in ids if trained.is_byte(index)}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [trained.id_to_piece(index) for index in ids],
        "tokenizer.ggml.scores": [trained.get_score(index) for index in ids],
        "tokenizer.ggml.token_type": [kinds.get(index, 1) for index in ids],
        "tokenizer.ggml.bos_token_id": trained.bos_id(),
        "tokenizer.ggml.eos_token_id": trained.eos_id(),
    }


def test_a_sentencepiece_vocabulary_gives_the_ids_of_sentencepiece(
    trained: sentencepiece.SentencePieceProcessor, sentencepiece_metadata: dict[str, Any]
) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata)
    random = Random(0)
    texts = [sample["text"].replace("\0", "") for sample in SAMPLES] + [" " * n + "x" for n in range(40)]
    texts += ["".join(random.choices("  aeht hello▁日é\n", k=random.randint(0, 40))) for _ in range(1000)]
    for text in texts:
        ids = trained.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == trained.decode(ids), text


def test_a_sentencepiece_model_begins_with_bos_and_knows_its_special_tokens(
    trained: sentencepiece.SentencePieceProcessor, sentencepiece_metadata: dict[str, Any]
) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata)
    assert tokenizer.encode("hello") == [trained.bos_id(), *trained.encode("hello")]
    tool = trained.piece_to_id("<tool>")
    ids = tokenizer.encode("hello<tool>hello</s>", add_special_tokens=False)
    assert ids == [*trained.encode("hello"), tool, *trained.encode("hello"), trained.eos_id()]
    assert tokenizer.decode(ids) == "hello<tool> hello"
    assert tokenizer.special_ids == {0, 1, 2}
    # Without the space before a text.
    bare = Tokenizer.from_gguf(sentencepiece_metadata | {"tokenizer.ggml.add_space_prefix": False})
    assert bare.decode(bare.encode(" hello")) == " hello"
    assert bare.encode(" hello", add_special_tokens=False) == trained.encode("hello")


def test_a_sentencepiece_vocabulary_needs_its_scores(sentencepiece_metadata: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.scores"):
        Tokenizer.from_gguf({k: v for k, v in sentencepiece_metadata.items() if not k.endswith("scores")})


# Chats

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße & <b>'hi'</b>"},
    {"role": "assistant", "content": "  ok \n"},
    {"role": "user", "content": "再见"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": 'a "b" <c> é', "parameters": {"x": [1, None]}}}]
TEMPLATES = [
    "{% for m in messages %}{{ bos_token if loop.first }}[{{ m.role }}] {{ m['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}",
    # Whitespace control, loop control, namespaces, tools as JSON, the marks for training.
    """{%- set ns = namespace(n=0) %}
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- tool.function | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{% for m in messages %}
    {% if m.role == 'system' %}
        {% continue %}
    {% endif %}
    {% set ns.n = ns.n + 1 %}
    {% if ns.n > 2 %}
        {% break %}
    {% endif %}
{{ m.content }}{% generation %}{{ m.role | upper }}{% endgeneration %}
{% endfor %}
{% if add_generation_prompt %}<go{{ ns.n }}>{% endif %}""",
    "{% if thinking is defined and thinking %}think{% endif %}{{ messages | length }}{{ unk_token }}{{ missing }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"add_generation_prompt": False}, {"thinking": True}])
def test_chats_are_rendered_as_transformers_renders_them(
    smollm2: Tokenizer, hugging_face: transformers.PreTrainedTokenizerFast, template: str, options: dict[str, Any]
) -> None:
    # The metadata has <|endoftext|> as the unknown token; transformers' defaults know none.
    template = template.replace("unk_token", "bos_token")
    expected = hugging_face.apply_chat_template(
        CHAT, chat_template=template, tokenize=False, **({"add_generation_prompt": True} | options)
    )
    assert smollm2.apply_chat_template(CHAT, chat_template=template, **options) == expected


def test_the_models_own_template_is_rendered_as_transformers_renders_it(
    smollm2: Tokenizer, hugging_face: transformers.PreTrainedTokenizerFast, metadata: dict[str, Any]
) -> None:
    template = metadata["tokenizer.chat_template"]
    for chat in (CHAT, CHAT[1:], CHAT[1:2]):
        expected = hugging_face.apply_chat_template(
            chat, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        assert smollm2.apply_chat_template(chat) == expected
        assert smollm2.encode_chat(chat) == hugging_face.encode(expected, add_special_tokens=False)


def test_a_last_message_can_be_continued(smollm2: Tokenizer) -> None:
    chat = [*CHAT[1:2], {"role": "assistant", "content": "Once upon "}]
    whole = smollm2.apply_chat_template(chat, add_generation_prompt=False)
    text = smollm2.apply_chat_template(chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("Once upon ")
    assert whole.startswith(text)
    assert chat[-1]["content"] == "Once upon "
    with pytest.raises(InvalidRequest, match="exclude each other"):
        smollm2.apply_chat_template(chat, continue_final_message=True)


def test_the_date_is_there_for_templates(smollm2: Tokenizer) -> None:
    text = smollm2.apply_chat_template(CHAT, chat_template="{{ strftime_now('%Y') }}")
    assert text.isdigit()


def test_a_template_that_rejects_a_chat_speaks_for_itself(smollm2: Tokenizer) -> None:
    template = "{{ raise_exception('roles must alternate: ' + messages[0].role) }}"
    with pytest.raises(InvalidRequest, match="roles must alternate: system"):
        smollm2.apply_chat_template(CHAT, chat_template=template)


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].content + 1 }}", "{{ messages[9].content.x }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}"],
)
def test_a_template_that_fails_or_breaks_out_is_the_callers_error(smollm2: Tokenizer, template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        smollm2.apply_chat_template(CHAT, chat_template=template)


def test_templates_cannot_change_what_they_are_given(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequest):
        smollm2.apply_chat_template(CHAT, chat_template="{{ messages.clear() }}")
    assert len(CHAT) == 4


@pytest.mark.parametrize("template", ["{% if %}", "{% if", "{{ x", "{% no_such_tag %}"])
def test_a_template_that_is_no_jinja_is_the_fault_of_who_gave_it(template: str) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(InvalidRequest, match="no valid Jinja"):
        Tokenizer(backend).apply_chat_template(CHAT, chat_template=template)
    with pytest.raises(ModelLoadError, match="no valid Jinja"):
        Tokenizer(backend, chat_templates={"default": template}).apply_chat_template(CHAT)


def test_a_template_must_be_a_text(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="chat_template is a int; allowed: a Jinja template"):
        smollm2.apply_chat_template(CHAT, chat_template=5)


@pytest.mark.parametrize("messages", [[], "hello", {"role": "user"}, ["hello"], [{"content": "x"}], None])
def test_what_is_no_conversation_is_refused(smollm2: Tokenizer, messages: Any) -> None:
    with pytest.raises(InvalidRequest):
        smollm2.apply_chat_template(messages)


def test_a_chat_has_one_bos_even_if_the_model_adds_its_own(metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(
        metadata
        | {"tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    )
    assert tokenizer.encode("hi")[0] == tokenizer.bos_id
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == tokenizer.encode("hi")


def test_the_template_for_tools_is_taken_when_there_are_tools(metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.chat_template.tool_use": "with tools"})
    assert tokenizer.apply_chat_template(CHAT, tools=TOOLS) == "with tools"
    assert tokenizer.apply_chat_template(CHAT) != "with tools"


def test_without_a_template_a_chat_is_refused_with_the_way_out(metadata: dict[str, Any]) -> None:
    without = {key: value for key, value in metadata.items() if key != "tokenizer.chat_template"}
    tokenizer = Tokenizer.from_gguf(without)
    with pytest.raises(InvalidRequest, match="chat_template="):
        tokenizer.apply_chat_template(CHAT)


# Directories


@pytest.fixture
def directory(tmp_path: Path, hugging_face: transformers.PreTrainedTokenizerFast) -> Path:
    hugging_face.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    return tmp_path


def test_a_directory_gives_what_transformers_reads_from_it(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    for sample in SAMPLES[:200]:
        assert tokenizer.encode(sample["text"]) == theirs.encode(sample["text"]) == sample["ids"]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (1, 2, {0, 2})
    assert tokenizer.apply_chat_template(CHAT) == "<|im_start|>Be brief."
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.vocab_size == 49_152


def test_a_template_in_the_configuration_counts_where_there_is_no_file(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    for stored, tools, expected in (("inline", None, "inline"), (named, None, "one"), (named, TOOLS, "two")):
        path.write_text(json.dumps(config | {"chat_template": stored}))
        assert Tokenizer.from_directory(directory).apply_chat_template(CHAT, tools=tools) == expected


def test_truncation_and_padding_from_training_are_switched_off(directory: Path) -> None:
    path = directory / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    stored["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 2,
        "pad_type_id": 0,
        "pad_token": "<|im_end|>",
    }
    path.write_text(json.dumps(stored))
    assert len(Tokenizer.from_directory(directory).encode("one two three four five six seven eight nine ten")) == 10


def test_a_directory_with_only_vocabulary_and_merges_goes_through_transformers(
    tmp_path: Path, metadata: dict[str, Any]
) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *metadata["tokenizer.ggml.merges"]]))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(tmp_path)
    gpt2 = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"})
    for sample in SAMPLES[:200]:
        assert tokenizer.encode(sample["text"]) == gpt2.encode(sample["text"])
        assert tokenizer.decode(sample["ids"], skip_special_tokens=False) == sample["text"]
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})


def test_directories_that_cannot_be_used_are_refused(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path_factory.mktemp("empty"))
    content = (directory / "tokenizer.json").read_bytes()
    (directory / "tokenizer.json").write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: no valid tokenizer"):
        Tokenizer.from_directory(directory)
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: cannot be read as JSON"):
        Tokenizer.from_directory(directory)


def test_importing_is_cheap() -> None:
    heavy = "{'torch', 'transformers', 'tokenizers', 'jinja2', 'huggingface_hub', 'numpy'}"
    script = f"import sys, stretto.tokenizer, stretto.detokenizer; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
