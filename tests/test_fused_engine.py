"""The engine with fused kernels gives the tokens of transformers and of the plain runner: chunks, batches, overlap.

Interpreted on a CPU (without graphs), compiled and captured on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from transformers import AutoModelForCausalLM

from stretto.assembly import assemble
from stretto.config import EngineConfig
from stretto.engine import prompt_graphs
from stretto.engine.fused_runner import FusedRunner
from stretto.engine.graphs import NUM_KINDS, StepGraphs, token_ladder
from stretto.engine.prompt_graphs import PromptGraphs
from stretto.engine.staging import PlanLayout
from stretto.kernels.elementwise import add_rms_norm
from stretto.kernels.rope_write import HeadTransform
from stretto.models.resolve import ResolvedModel
from stretto.request import SamplingParams
from stretto.runtime import Runtime
from stretto.scheduler.batch import StepPlan
from tests.helpers.tiny_models import FAMILIES, reference_greedy, reference_logits, save, tiny_config, tiny_model

GPU = torch.cuda.is_available()
PROMPTS = [[5, 17, 99, 3], [1], list(range(20, 57)), [7] * 9]
TOKENS = 24 if GPU else 4
Tiny = tuple[ResolvedModel, list[list[int]]]


@contextmanager
def started(model: Path, **options: object) -> Iterator[Runtime]:
    """A runtime with the fused runner over a model directory."""
    config = EngineConfig(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        attention_backend="triton",
        num_pages=200,
        page_size=16,
        **options,  # type: ignore[arg-type]
    )
    parts = assemble(config)
    runtime = Runtime(parts.config, parts.device, parts.model, parts.attention, make_runner=parts.make_runner)
    assert isinstance(runtime.engine.runner, FusedRunner)
    try:
        yield runtime
    finally:
        runtime.close()


def outputs_of(runtime: Runtime, prompts: list[list[int]], params: SamplingParams, seed: int = 1) -> list[list[int]]:
    requests = [runtime.add(prompt, params, seed=seed) for prompt in prompts]
    with runtime.running():
        while runtime.has_work:
            runtime.step()
    runtime.scheduler.check()
    return [runtime.output_ids(request).tolist() for request in requests]


@pytest.fixture(autouse=True)
def _weights_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the fused layers run on weights that are not packed for it."""
    monkeypatch.setattr("stretto.layers.linear.onednn_available", lambda: False)


@pytest.fixture(scope="module", params=sorted(FAMILIES) if GPU else ["qwen3"])
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ResolvedModel, list[list[int]]]:
    """A saved tiny model and transformers' greedy tokens for the prompts."""
    model = tiny_model(tiny_config(request.param))
    resolved = save(model, tmp_path_factory.mktemp(request.param))
    return resolved, [reference_greedy(model, prompt, TOKENS) for prompt in PROMPTS]


SCHEDULES = [(0, 8, "mixed"), (1, 64, "prefill-first"), (2, 5, "mixed")]


@pytest.mark.parametrize(("depth", "chunk", "policy"), SCHEDULES if GPU else SCHEDULES[1:])
def test_greedy_tokens_are_those_of_transformers(tiny: Tiny, depth: int, chunk: int, policy: str) -> None:
    resolved, expected = tiny
    options = {"overlap_depth": depth, "max_num_batched_tokens": chunk, "batch_policy": policy}
    with started(resolved.path, max_num_seqs=4, **options) as runtime:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        assert outputs_of(runtime, PROMPTS, params) == expected


MIXES = {
    "plain": SamplingParams(temperature=0.8, max_tokens=5, ignore_eos=True),
    "top-k": SamplingParams(top_k=5, max_tokens=5, ignore_eos=True),
    "top-p": SamplingParams(top_p=0.8, max_tokens=5, ignore_eos=True),
    "min tokens": SamplingParams(min_tokens=3, stop_token_ids=[3, 4], max_tokens=5),
    "log-probabilities": SamplingParams(logprobs=3, max_tokens=5, ignore_eos=True),
    "penalties and a bias": SamplingParams(
        temperature=0, presence_penalty=1, repetition_penalty=1.2, logit_bias={7: 2}, max_tokens=5, ignore_eos=True
    ),
    "everything": SamplingParams(
        temperature=1.3,
        top_k=9,
        top_p=0.9,
        min_p=0.01,
        min_tokens=3,
        stop_token_ids=[3, 4],
        frequency_penalty=0.5,
        logprobs=2,
        max_tokens=4,
    ),
}


@pytest.mark.parametrize("mix", MIXES if GPU else ["plain", "top-p", "everything"])
def test_every_mix_gives_the_tokens_of_the_plain_runner(tiny: Tiny, mix: str) -> None:
    resolved, _ = tiny
    with started(resolved.path, max_num_seqs=4) as runtime:
        fused = outputs_of(runtime, PROMPTS[:2], MIXES[mix])
    config = EngineConfig(
        model=str(resolved.path), skip_tokenizer_init=True, dtype="float32", attention_backend="torch", num_pages=200
    )
    parts = assemble(config)
    plain_runtime = Runtime(parts.config, parts.device, parts.model, parts.attention)
    plain = outputs_of(plain_runtime, PROMPTS[:2], MIXES[mix])
    plain_runtime.close()
    assert fused == plain


def test_prompt_logprobs_are_those_of_transformers(tiny: Tiny) -> None:
    """Of prompts in chunks, beside a request that does not ask."""
    resolved, _ = tiny
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    asked = [PROMPTS[0], PROMPTS[3]]
    with started(resolved.path, max_num_seqs=4, max_num_batched_tokens=8) as runtime:
        runtime.add(PROMPTS[1], replace(params, max_tokens=3))
        requests = [runtime.add(prompt, replace(params, prompt_logprobs=2)) for prompt in asked]
        with runtime.running():
            while runtime.has_work:
                runtime.step()
    model = AutoModelForCausalLM.from_pretrained(resolved.path).float().eval()
    for request, prompt in zip(requests, asked, strict=True):
        known = request.prompt_logprobs
        assert known is not None
        assert known.complete
        logprobs_PV = reference_logits(model, prompt)[:-1].log_softmax(1)
        own_P = logprobs_PV.gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
        scored = known.known()
        assert scored.logprob_Q == pytest.approx(own_P.numpy(), abs=1e-4)
        assert scored.top_ids_QL.tolist() == logprobs_PV.topk(2).indices.tolist()


@pytest.mark.parametrize("tokens", [1, 6])
def test_rows_that_are_wanted_are_those_of_all_rows(tiny: Tiny, tokens: int) -> None:
    """In any order, some twice, none: what the last layer leaves out changes nothing else."""
    with started(tiny[0].path, max_num_seqs=4) as runtime:
        model = runtime.engine.runner._model  # type: ignore[attr-defined]
        seen: list[int] = []

        def attend(index: int, qkv_TXH: torch.Tensor, transform: HeadTransform) -> torch.Tensor:
            seen.append(index)
            return qkv_TXH[:, : transform.num_heads].cumsum(0)

        def logits(wanted: list[int] | None) -> torch.Tensor:
            device = model.embedding_VD.device
            wanted_S = None if wanted is None else torch.tensor(wanted, dtype=torch.int64, device=device)
            hidden = model.forward(model.embed(torch.arange(3, 3 + tokens, device=device)), attend, wanted_S=wanted_S)
            return hidden[0].cpu() if wanted == [] else model.logits(*hidden).cpu()

        logits_TV = runtime.device.call(lambda: logits(None))
        for wanted in ([tokens - 1], [tokens - 1, 0, 0]):
            found_SV = runtime.device.call(lambda wanted=wanted: logits(wanted))
            torch.testing.assert_close(found_SV, logits_TV[wanted], atol=1e-4, rtol=1e-4)
        seen.clear()
        assert len(runtime.device.call(lambda: logits([]))) == 0
        assert seen == list(range(model.num_layers))


@pytest.mark.skipif(GPU, reason="float32 products with the gate exist for tests alone: a GPU rounds their factors")
def test_the_products_of_large_steps_change_no_logits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sums that cuBLAS adds to the residual stream, gates inside their product."""
    model = tiny_model(tiny_config("qwen3", hidden_size=64, intermediate_size=128))
    calls: list[int] = []
    sums: list[bool] = []
    with started(save(model, tmp_path).path, max_num_seqs=4) as runtime:
        fused = runtime.engine.runner._model  # type: ignore[attr-defined]

        def logits() -> torch.Tensor:
            hidden = fused.forward(fused.embed(torch.arange(3, 10)), lambda i, x, t: x[:, : t.num_heads].cumsum(0))
            return fused.logits(*hidden)

        def takes(rows: int, weight: torch.Tensor) -> bool:
            calls.append(rows)
            return True

        def norm(residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
            sums.append(update is not None)
            return add_rms_norm(residual, update, weight, eps)

        expected = runtime.device.call(logits)
        monkeypatch.setattr("stretto.models.fused.LARGE_STEP", 2)
        monkeypatch.setattr("stretto.kernels.gated_matmul.takes", takes)
        monkeypatch.setattr("stretto.models.fused.add_rms_norm", norm)
        torch.testing.assert_close(runtime.device.call(logits), expected, atol=1e-4, rtol=1e-4)
    assert calls == [7] * fused.num_layers
    assert sums == [False] * (2 * fused.num_layers) + [True]  # only the last update is left for a norm to add


def test_a_cached_prefix_changes_no_token(tiny: Tiny) -> None:
    resolved, expected = tiny
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with started(resolved.path, max_num_seqs=4) as runtime:
        for _ in range(2):
            assert outputs_of(runtime, [PROMPTS[2]], params) == [expected[2]]


def test_an_unchanged_batch_needs_no_plan(tiny: Tiny) -> None:
    with started(tiny[0].path, max_num_seqs=4) as runtime:
        runner = runtime.engine.runner
        known: list[bool] = []
        knows = runner.knows

        def watch(plan: object) -> bool:
            known.append(knows(plan))  # type: ignore[arg-type]
            return known[-1]

        runner.knows = watch  # type: ignore[method-assign]
        outputs_of(runtime, [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert known[0] is False
    assert any(known)


def test_the_warm_up_leaves_nothing_behind(tiny: Tiny) -> None:
    """It runs the paths of steps with prompt chunks, every kind of sampling among them, on the padding row."""
    resolved, expected = tiny
    with started(resolved.path, max_num_seqs=2, max_num_batched_tokens=6) as runtime:
        engine = runtime.engine
        engine.stream.run(engine.runner._warm_up)  # type: ignore[attr-defined]
        engine.stream.synchronize()
        assert runtime.device.call(lambda: engine.tables.length_R.tolist()) == [0] * len(engine.tables.length_R)
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        assert outputs_of(runtime, PROMPTS[:1], params) == [expected[0][:2]]


@pytest.mark.skipif(GPU, reason="needs tensors that cuDNN refuses for certain")
def test_where_cudnn_has_no_plan_prompts_of_one_length_take_our_kernel(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a CPU, whose tensors cuDNN refuses with a RuntimeError. The engine used to die of it at its start."""
    monkeypatch.setattr("stretto.attention.triton_paged.CUDNN_LEAST", 1)
    monkeypatch.setattr("stretto.attention.triton_paged.CUDNN_MULTIPLE", 1)
    with started(tiny[0].path, max_num_seqs=4, max_num_batched_tokens=18) as runtime:
        runner = runtime.engine.runner
        attention = runner._attention  # type: ignore[attr-defined]
        attention._cudnn = True
        runner._equal_lengths = attention.equal_lengths(18, 100)  # type: ignore[attr-defined]
        assert runner._equal_lengths == (9, 18)  # type: ignore[attr-defined]
        with caplog.at_level(logging.INFO, "stretto"):
            runtime.engine.stream.run(runner._warm_up)  # type: ignore[attr-defined]
            runtime.engine.stream.synchronize()
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert "cuDNN does not serve prompts of 9 tokens" in caplog.text
        assert attention.equal_lengths(18, 100) == ()
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        assert outputs_of(runtime, [PROMPTS[3]] * 2, params) == [tiny[1][3]] * 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_failure_that_is_not_of_cudnns_plans_is_raised(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*arguments: object) -> None:
        raise error("the device has failed")

    with started(tiny[0].path, max_num_seqs=4, max_num_batched_tokens=18) as runtime:
        attention = runtime.engine.runner._attention  # type: ignore[attr-defined]
        monkeypatch.setattr(attention, "_attend_equal", fail)
        with pytest.raises(error, match="the device has failed"):
            attention.prepare_equal(18, (9,))


def test_the_warm_up_stays_within_the_room_of_a_request(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = []
    run = FusedRunner.run

    def watched(self: FusedRunner, plan: StepPlan, layout: PlanLayout, staged: torch.Tensor) -> None:
        run(self, plan, layout, staged)
        positions.append(int(self._inputs.positions_T[: plan.num_tokens].max()))

    with started(tiny[0].path, max_num_seqs=2, max_model_len=40) as runtime:
        monkeypatch.setattr(FusedRunner, "run", watched)
        runtime.engine.stream.run(runtime.engine.runner._warm_up)  # type: ignore[attr-defined]
        runtime.engine.stream.synchronize()
    assert max(positions) == 39


class Repeated:
    """Stands in for a CUDA graph where there is none: repeats the work itself."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._work()

    def reset(self) -> None:
        pass


class Recorder:
    """`Record` of such works."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self.recorded: list[Repeated] = []

    def __call__(self, work: Callable[[], None]) -> Repeated:
        self.recorded.append(Repeated(work))
        return self.recorded[-1]


def recorded_prompts(
    runtime: Runtime, sizes: tuple[int, ...], choices: tuple[int, ...]
) -> tuple[Recorder, PromptGraphs]:
    """Lets the runner take "graphs" of so many tokens, and of so many sampled rows."""
    runner, record = runtime.engine.runner, Recorder()
    assert isinstance(runner, FusedRunner)
    graphs = PromptGraphs(
        runner._model,
        runner._attention,
        runner._inputs,
        runner._prefill_works,
        runtime.engine.tables.page_table_RM,
        sizes,
        choices,
    )
    runner.prompt_graphs = graphs
    assert graphs.padded(1) is None
    model = runner._model
    runner._logits_SV = torch.zeros(max(choices), model.config.vocab_size, dtype=model.dtype)
    runner.choice_graphs = StepGraphs(choices, NUM_KINDS, runner._choose_wanted)
    runtime.device.call(lambda: graphs.capture(record, equal=False))
    runtime.device.call(lambda: runner.choice_graphs.capture(record))
    return record, graphs


@pytest.mark.parametrize(
    ("weights_per_layer", "most", "last"),
    [
        (15_728_640, 8192, (2560, 3072, 8192)),  # the 0.6B
        (15_728_640, 2000, (1536, 1792, 2000)),
        (15_728_640, 16_384, (2048, 2560, 3072)),  # which computes for longer than any host launches
        (192_937_984, 8192, (512, 640, 768)),  # the 8B
        (192_937_984, 512, (384, 448, 512)),
        (1000, 33, (32, 33)),
        (1000, 31, ()),
    ],
)
def test_sizes_of_steps_with_prompts(weights_per_layer: int, most: int, last: tuple[int, ...]) -> None:
    sizes = token_ladder(weights_per_layer, most)
    assert sizes[-3:] == last
    assert all(small < large for small, large in pairwise(sizes))


@pytest.mark.skipif(GPU, reason="a GPU captures the steps itself, in all tests of this file")
def test_captured_layers_change_no_token(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the attention of deterministic mode."""
    resolved, expected = tiny
    options = {"max_num_batched_tokens": 40, "max_num_seqs": 5, "overlap_depth": 1, "deterministic": True}
    with started(resolved.path, **options) as runtime:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        assert outputs_of(runtime, PROMPTS[2:3], params) == expected[2:3]
        record, graphs = recorded_prompts(runtime, (9, 24), (5,))
        # What ran before was larger than the sizes that are run to be captured.
        runner = runtime.engine.runner
        works = [runner._attention.work_for(rows) for rows in runner._attention.row_steps]  # type: ignore[attr-defined]
        assert not any(work.line_B2.any() or work.first_row_C.any() for work in works)
        assert not any(work.num_blocks_1.any() for work in runner._prefill_works.values())  # type: ignore[attr-defined]
        assert not runner._inputs.query_end_B.any()  # type: ignore[attr-defined]
        assert not runner._inputs.last_token_S.any()  # type: ignore[attr-defined]
        assert [graphs.padded(tokens) for tokens in (1, 9, 10, 24, 25)] == [9, 9, 24, 24, None]
        monkeypatch.setattr(prompt_graphs, "MOST_PADDED", 20)
        assert [graphs.padded(tokens) for tokens in (9, 10, 23, 24)] == [9, None, None, 24]
        monkeypatch.undo()
        assert outputs_of(runtime, PROMPTS[:2], params) == expected[:2]  # 5 tokens
        assert outputs_of(runtime, PROMPTS[2:3], params) == expected[2:3]  # the last 5 of 37, the others cached
        assert outputs_of(runtime, PROMPTS[3:], params) == expected[3:]  # 9, just full
        runtime.device.call(graphs.release)
        assert graphs.padded(1) is None
    # Without decode rows and with some, the large first; tokens without filters, with them, and up to the logits.
    assert [one.replays for one in record.recorded] == [0, 0, 3, 0, 3, 0, 0]


@pytest.mark.skipif(GPU, reason="a GPU captures the steps itself")
def test_rows_of_padding_are_computed_anew_in_each_step(tiny: Tiny) -> None:
    """Also those beyond a step's tokens: what follows the layers adds to them, step by step to infinity otherwise."""
    resolved, _ = tiny
    options = {"max_num_batched_tokens": 40, "max_num_seqs": 16, "deterministic": True, "enable_prefix_caching": False}
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with started(resolved.path, **options) as runtime:
        record, graphs = recorded_prompts(runtime, (9, 24), (1, 16))
        left = []
        for count in (16, 9, 9, 9):
            outputs_of(runtime, [[token] for token in range(count)], params)
            left.append(runtime.device.call(lambda: [result.clone() for result in graphs.results]))
    assert [one.replays for one in record.recorded[:3]] == [1, 0, 3]
    left = left[1:]
    for again in left[1:]:
        assert all(torch.equal(*pair) for pair in zip(left[0], again, strict=True))


@pytest.mark.skipif(GPU, reason="a GPU captures the steps itself")
def test_a_captured_step_serves_any_mix_of_rows(tiny: Tiny) -> None:
    """One size, replayed for none to some decode rows, one or several chunks, of one token too, new and behind a past,
    with a cached prefix: each request's tokens are what transformers gives."""
    resolved, expected = tiny
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    order = [1, 0, 2, 3, 2, 1, 3]
    options = {"max_num_batched_tokens": 12, "max_num_seqs": 4, "overlap_depth": 1, "batch_policy": "mixed"}
    with started(resolved.path, **options) as runtime:
        record, _ = recorded_prompts(runtime, (12,), (1, 4))
        mixes: set[tuple[int, int, int]] = set()
        steps = 0
        run = runtime.engine.runner.run

        def watch(plan: StepPlan, layout: PlanLayout, staged: torch.Tensor) -> None:
            nonlocal steps
            if layout.num_prefill:
                steps += 1
                mixes.add((plan.num_decode, layout.num_rows - plan.num_decode, plan.num_tokens))
            run(plan, layout, staged)

        runtime.engine.runner.run = watch  # type: ignore[method-assign]
        requests = []
        with runtime.running():
            for index in order:
                requests.append(runtime.add(PROMPTS[index], params))
                runtime.step()
            while runtime.has_work:
                runtime.step()
        runtime.scheduler.check()
        outputs = [runtime.output_ids(request).tolist() for request in requests]
        lengths = runtime.device.call(lambda: runtime.engine.tables.length_R[0].item())
    assert outputs == [expected[index] for index in order]
    assert lengths == 0  # of the padding row
    assert {tokens for _, _, tokens in mixes} >= {1, 12}
    assert {decodes for decodes, _, _ in mixes} >= {0, 1, 2}
    assert {chunks for _, chunks, _ in mixes} >= {1, 2}
    layers, choices = record.recorded[:2], record.recorded[2:]
    assert sum(one.replays for one in layers) == steps
    assert all(one.replays for one in layers)
    assert [one.replays > 0 for one in choices] == [True, False, False] * 2
