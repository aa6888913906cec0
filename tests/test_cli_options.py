"""The engine's options on the command line: each exactly once, the same for every command that loads a model."""

from __future__ import annotations

import dataclasses
import io
import sys
from typing import Any

import pytest
import typer

from stretto import EngineConfig
from stretto.cli import main
from stretto.cli.app import app
from stretto.cli.engine_options import ALIASES, NOT_OFFERED, OPTIONS, engine_command

COMMANDS = (("generate",), ("chat",), ("serve",), ("bench", "throughput"))
FIELDS = {field.name: field for field in dataclasses.fields(EngineConfig)}
OWN_DEFAULTS = {
    ("generate",): {"seed": None},  # without it every run samples anew
    ("chat",): {"seed": None, "max_num_seqs": 1},
    ("bench", "throughput"): {"enable_prefix_caching": False},  # the measured run would find the warm-up's prompts
}


def parameters(command: tuple[str, ...]) -> dict[str, Any]:
    """The options of a command by the names of its parameters."""
    found: Any = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]
    return {parameter.name: parameter for parameter in found.params}


def shown(command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What `--help` prints."""
    monkeypatch.setattr(sys, "argv", ["stretto", *command, "--help"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert not exit_.value.code
    return capsys.readouterr().out


def test_each_field_is_an_option_or_left_out_for_a_reason() -> None:
    assert FIELDS.keys() == OPTIONS.keys() | NOT_OFFERED.keys()
    assert not OPTIONS.keys() & NOT_OFFERED.keys()
    assert all(len(reason) > 10 for reason in NOT_OFFERED.values())


@pytest.mark.parametrize("command", COMMANDS, ids="-".join)
def test_each_command_has_each_option_under_the_same_names_with_the_configs_default(command: tuple[str, ...]) -> None:
    first, here = parameters(COMMANDS[0]), parameters(command)
    for name in OPTIONS:
        assert here[name].opts == first[name].opts
        assert here[name].secondary_opts == first[name].secondary_opts
        default = FIELDS[name].default
        if name in ("model", "inject", "sync_guard"):  # no default, an empty list, the environment's
            continue
        assert here[name].default == OWN_DEFAULTS.get(command, {}).get(name, default), name
    names = [option for parameter in here.values() for option in (*parameter.opts, *parameter.secondary_opts)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("command", COMMANDS, ids="-".join)
def test_help_shows_every_name_in_full(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(command, capsys, monkeypatch)
    for parameter in parameters(command).values():
        if parameter.param_type_name == "option":
            assert all(name in text for name in (*parameter.opts, *parameter.secondary_opts)), parameter.name
    assert "…" not in text


def parsed(*arguments: str, **defaults: Any) -> dict[str, Any]:
    """What a command gets for the engine from this command line."""
    got: list[dict[str, Any]] = []

    @engine_command(**defaults)
    def command(*, engine: dict[str, Any]) -> None:
        got.append(engine)

    small = typer.Typer(context_settings={"token_normalize_func": lambda name: ALIASES.get(name, name)})
    small.command()(command)
    small(arguments, standalone_mode=False)
    return got[0]


def test_without_options_the_defaults_of_engine_config_hold() -> None:
    assert EngineConfig(**parsed()) == EngineConfig("smollm2-135m")


def test_the_guard_of_the_environment_holds_unless_the_option_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_SYNC_GUARD", "count")
    assert EngineConfig(**parsed()).sync_guard == "count"
    assert EngineConfig(**parsed("--sync-guard", "off")).sync_guard == "off"


def test_a_commands_own_default_gives_way_to_what_is_given() -> None:
    assert parsed(max_num_seqs=1)["max_num_seqs"] == 1
    assert parsed("--max-num-seqs", "5", max_num_seqs=1)["max_num_seqs"] == 5
    assert "seed" not in parsed(seed=None)
    assert parsed("--seed", "0", seed=None)["seed"] == 0


GIVEN: list[tuple[str, dict[str, object]]] = [
    ("--model m --tokenizer t --revision r", {"model": "m", "tokenizer": "t", "revision": "r"}),
    ("--load-format dummy --dtype int4 --device cpu", {"load_format": "dummy", "dtype": "int4", "device": "cpu"}),
    ("--num-threads 2 --max-model-len 99 --max-num-seqs 3", {"num_threads": 2, "max_model_len": 99, "max_num_seqs": 3}),
    ("--max-num-batched-tokens 77 --max-logprobs 5", {"max_num_batched_tokens": 77, "max_logprobs": 5}),
    ("--batch-policy prefill-first --attention-backend torch", {"batch_policy": "prefill-first"}),
    ("--attention-backend torch --enforce-eager", {"attention_backend": "torch", "enforce_eager": True}),
    ("--deterministic", {"deterministic": True}),
    ("--gpu-memory-utilization 0.5 --seed 3", {"gpu_memory_utilization": 0.5, "seed": 3}),
    ("--page-size 32 --num-pages 9", {"page_size": 32, "num_pages": 9}),
    ("--block-size 32 --num-gpu-blocks-override 9", {"page_size": 32, "num_pages": 9}),
    ("--kv-cache-memory-bytes 4096", {"kv_cache_memory_bytes": 4096}),
    ("--no-prefix-cache", {"enable_prefix_caching": False}),
    ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
    ("--no-prefix-cache --enable-prefix-caching", {"enable_prefix_caching": True}),
    ("--no-enable-prefix-caching --prefix-cache", {"enable_prefix_caching": True}),
    ("--overlap-depth 0 --sync-guard count", {"overlap_depth": 0, "sync_guard": "count"}),
    ("--inject sync@sample --inject slow-host=2ms", {"inject": ["sync@sample", "slow-host=2ms"]}),
    ("-tp 2 --control-transport gloo", {"tensor_parallel_size": 2, "control_transport": "gloo"}),
    (
        "--tensor-parallel-size 4 --nnodes 2 --node-rank 1 --dist-init-addr h:1",
        {"tensor_parallel_size": 4, "nnodes": 2, "node_rank": 1, "dist_init_addr": "h:1"},
    ),
]


@pytest.mark.parametrize(("line", "expected"), GIVEN)
def test_what_is_given_reaches_the_configuration(line: str, expected: dict[str, object]) -> None:
    config = EngineConfig(**parsed(*line.split()))
    assert {name: getattr(config, name) for name in expected} == expected


def test_every_option_is_tried_above() -> None:
    assert {name for _, expected in GIVEN for name in expected} == OPTIONS.keys()


@pytest.mark.parametrize("command", [("generate", "x"), ("chat",), ("serve",), ("bench", "throughput")], ids="-".join)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--block-size 3", "page_size is 3; allowed"),
        ("--batch-policy any", "batch_policy is 'any'; allowed: mixed, prefill-first"),
        ("--nnodes 2 --tensor-parallel-size 2", "give dist_init_addr"),
        ("--gpu-memory-utilization 2", "gpu_memory_utilization is 2.0"),
    ],
)
def test_each_command_refuses_bad_values_before_it_loads_anything(
    command: tuple[str, ...],
    line: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["stretto", *command, *line.split()])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit) as exit_:
        main()
    captured = capsys.readouterr()
    assert (exit_.value.code, captured.out) == (2, "")
    assert message in captured.err
