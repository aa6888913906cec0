"""Options of LLM: ours, vLLM's that mean something here, and those that must not be ignored silently."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from stretto import LLM, EngineConfig, InvalidRequest, ModelLoadError, NotSupported, SamplingParams
from stretto.vllm_options import translate
from tests.helpers.dummy_model import CONTEXT, write_dummy_model
from tests.helpers.llm_fixture import assert_idle, dummy_llm


def test_every_field_of_engine_config_is_an_option() -> None:
    options = {field.name: object() for field in dataclasses.fields(EngineConfig)}
    assert translate(options) == options


def test_without_options_the_defaults_of_engine_config_hold(tmp_path: Path) -> None:
    model = str(write_dummy_model(tmp_path))
    with LLM(model, load_format="dummy") as llm:
        assert llm.config == EngineConfig(model, load_format="dummy")


@pytest.mark.parametrize(
    ("options", "translated"),
    [
        ({"block_size": 32}, {"page_size": 32}),
        ({"block_size": None}, {}),
        ({"num_gpu_blocks_override": 77}, {"num_pages": 77}),
        ({"async_scheduling": False}, {"overlap_depth": 0}),
        ({"async_scheduling": True}, {}),
        ({"trust_remote_code": True, "disable_log_stats": True}, {}),
        ({"pipeline_parallel_size": 1, "quantization": None, "enable_prefix_caching": None}, {}),
        ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 2}),
        (
            {"gpu_memory_utilization": 0.5, "enforce_eager": True},
            {"gpu_memory_utilization": 0.5, "enforce_eager": True},
        ),
    ],
)
def test_vllm_options_that_mean_something_are_taken(options: dict[str, object], translated: dict[str, object]) -> None:
    assert translate(options) == translated


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: not built yet; leave it at 1"),
        ({"pipeline_parallel_size": True}, "pipeline_parallel_size=True"),
        ({"quantization": "awq"}, "quantization='awq': not built yet.*dtype='int4'"),
        ({"enable_lora": True}, "enable_lora"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill"),
        ({"speculative_config": {"model": "x"}}, "speculative_config"),
    ],
)
def test_vllm_options_that_are_not_built_say_so(options: dict[str, object], message: str) -> None:
    with pytest.raises(NotSupported, match=message):
        translate(options)


def test_an_option_under_two_names_is_refused() -> None:
    with pytest.raises(TypeError, match="both 'page_size' and 'block_size'"):
        translate({"page_size": 16, "block_size": 16})


def test_an_unknown_option_is_refused_with_the_likely_name() -> None:
    with pytest.raises(TypeError, match=r"no option 'max_model_length'; did you mean 'max_model_len'\?"):
        LLM("any", max_model_length=5)
    with pytest.raises(TypeError, match=r"no option 'zzz'$"):
        LLM("any", zzz=5)


def test_bad_options_and_models_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="dtype is 'float8'"):
        LLM("any", dtype="float8")
    with pytest.raises(InvalidRequest, match="page_size is 3"):
        dummy_llm(tmp_path, block_size=3)
    with pytest.raises(InvalidRequest, match=f"max_model_len is {CONTEXT + 1}, but the model was made for {CONTEXT}"):
        dummy_llm(tmp_path, max_model_len=CONTEXT + 1)
    with pytest.raises(ModelLoadError, match="no/such/model"):
        LLM("no/such/model/directory")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("overlap_depth", "1"),
        ("overlap_depth", 1.5),
        ("overlap_depth", True),
        ("overlap_depth", 9),
        ("request_timeout_s", "x"),
        ("request_timeout_s", float("nan")),
        ("enable_prefix_caching", "no"),
        ("model", 5),
        ("tokenizer", Path("x")),
        ("revision", 1),
        ("hf_token", b"secret"),
        ("seed", "x"),
        ("seed", 1.0),
        ("seed", None),
        ("skip_tokenizer_init", 1),
        ("enforce_eager", "yes"),
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", True),
        ("gpu_memory_utilization", float("nan")),
        ("device", None),
        ("dtype", 16),
        ("batch_policy", "any"),
        ("attention_backend", ["torch"]),
        ("max_queued_tokens", 1.5),
        ("inject", 5),
        ("inject", [5]),
        ("inject", b"sync@sample"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_before_anything_is_loaded(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name} is .*; (allowed|give)"):
        EngineConfig(**{"model": "model", name: value})  # type: ignore[arg-type]


def test_every_field_of_engine_config_refuses_what_it_was_not_declared_for() -> None:
    for field in dataclasses.fields(EngineConfig):
        with pytest.raises(InvalidRequest, match=f"^{field.name} is "):
            EngineConfig(**{"model": "model", field.name: object()})  # type: ignore[arg-type]


def test_a_secret_of_the_wrong_type_is_not_shown() -> None:
    with pytest.raises(InvalidRequest, match=r"^hf_token is of type bytes; allowed: a text, None$"):
        EngineConfig("model", hf_token=b"secret")  # type: ignore[arg-type]


def test_a_whole_number_is_a_number_and_a_tuple_a_list() -> None:
    config = EngineConfig("model", gpu_memory_utilization=1, request_timeout_s=3, inject=("sync@sample",))
    assert (config.gpu_memory_utilization, config.request_timeout_s) == (1, 3)


def test_the_overlap_depth_can_be_chosen_and_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, depth in (({"overlap_depth": 2}, 2), ({"async_scheduling": False}, 0)):
        with dummy_llm(tmp_path, **options) as llm:
            assert llm.stats().overlap_depth == depth
    monkeypatch.setenv("STRETTO_DISABLE_OVERLAP", "1")
    with dummy_llm(tmp_path, overlap_depth=2) as llm:
        assert llm.stats().overlap_depth == 0


def test_progress_is_told_from_start_to_ready(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    with dummy_llm(tmp_path, on_progress=lambda what, fraction: told.append((what, fraction))):
        pass
    assert told[-1][1] == 1.0
    assert all(isinstance(what, str) and 0.0 <= fraction <= 1.0 for what, fraction in told)


def test_without_a_tokenizer_token_ids_come_and_go(tmp_path: Path) -> None:
    with dummy_llm(tmp_path, skip_tokenizer_init=True) as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False)
        assert len(llm.generate([3, 4], params, use_tqdm=False)[0].outputs[0].token_ids) == 3
        assert [len(part.outputs[0].token_ids) for part in llm.stream([3, 4], params)] == [1, 1, 1]
        for refused in (lambda: llm.generate("text", params), lambda: llm.generate([3], use_tqdm=False)):
            with pytest.raises(NotSupported, match="without a tokenizer"):
                refused()
        assert_idle(llm)
