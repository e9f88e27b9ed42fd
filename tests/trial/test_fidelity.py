"""How far a simulated run is from a real one: the figures, the verdict, and the runs that come with the package."""

import json
from pathlib import Path

import pytest

from pensieve.errors import ConfigError, MalformedInput
from pensieve.lab.compose.build import build_system, build_tokenizer, build_workload
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import check
from pensieve.lab.replay import replay
from pensieve.lab.trial.fidelity import fidelity_metrics, verdict
from pensieve.lab.turns import Turns
from pensieve.lab.workload.base import WorkloadContext
from pensieve.lab.workload.vllm_run import RealRequest, VllmRun, file_of, read_run, setting, shipped, vllm_run
from pensieve.serve.record import TurnRecord
from tests.composed import composed
from tests.shared_data import shared

REAL = {f"request-{i}": RealRequest(i + 5.0, 100, 11, i + 7.0, i + 8.0 + i / 10) for i in range(20)}


def turns_like(real: dict[str, RealRequest], slower: float = 1.0) -> list[TurnRecord]:
    made = []
    for number, (name, one) in enumerate(real.items()):
        turn = TurnRecord(name, 1, phase="chat", intended_s=one.arrival_s, request_id=number)
        turn.first_token_s = one.arrival_s + slower * (one.first_token_s - one.arrival_s)
        turn.token_ids.extend(range(one.output_tokens))
        turn.close("completed", "length", one.arrival_s + slower * (one.last_token_s - one.arrival_s))
        made.append(turn)
    return made


def errors_of(turns: list[TurnRecord]) -> dict[str, float]:
    metrics = fidelity_metrics(REAL, True, Turns.of(turns))
    return {metric.label: metric.value for metric in metrics if metric.name == "fidelity_error_pct"}  # type: ignore[misc]


def test_the_same_times_have_no_error_and_slower_ones_that_much():
    same, slower = errors_of(turns_like(REAL)), errors_of(turns_like(REAL, 1.1))
    assert len(same) == 13 and all(abs(error) < 1e-6 for error in same.values())
    assert -8 < slower.pop("throughput") < 0, "the last tokens come later, the arrivals do not"
    assert all(error == pytest.approx(10) for error in slower.values())
    assert "holds" in verdict(same, 2.0, 0) and "fails" in verdict(slower, 5.0, 0)
    assert "fails" in verdict(same, 2.0, 1), "a request that is missing is in no figure"


def test_figures_are_those_of_the_raw_times_without_requests_that_did_not_complete():
    metrics = {(m.name, m.label): m.value for m in fidelity_metrics(REAL, False, Turns.of(turns_like(REAL)))}
    tpots = sorted((1.0 + i / 10) / 10 * 1e3 for i in range(20))
    assert metrics["real_ms", "ttft_mean"] == pytest.approx(2000)
    assert metrics["real_ms", "tpot_p90"] == pytest.approx(tpots[17])
    assert metrics["simulated_ms", "latency_p50"] == pytest.approx(3e3 + 900)
    assert metrics["real_tok_s", "throughput"] == pytest.approx(20 * 11 / (19 + 3 + 1.9))
    assert metrics["fidelity_limit_pct", ""] == 5.0, "a run that nobody looked at"
    turns = turns_like(REAL)
    turns[3].status = "timeout"
    less = {(m.name, m.label): m for m in fidelity_metrics(REAL, True, Turns.of(turns))}
    assert less["fidelity_left_out", ""].value == 1
    assert less["real_ms", "ttft_mean"].n == less["simulated_ms", "ttft_mean"].n == 19


def context() -> WorkloadContext:
    return WorkloadContext(0, 40_000, 0, 32_768, 128_256, None, True)


def prompts(workload: VllmRun) -> dict[str, list[int]]:
    return {dialogue.session: list(dialogue.steps[0].build()) for dialogue in workload._measured}


def test_prompts_begin_alike_where_they_did():
    workload = vllm_run(context(), run="rtx4090_llama3_1_8b")
    real, asked = read_run(file_of("rtx4090_llama3_1_8b", None)), prompts(workload)
    assert len(asked) == 300 and workload.describe().facts["prompts_that_begin_like_another"] == 32
    alike = 0
    for index, request in enumerate(real):
        prompt = asked[f"request-{index}"]
        assert len(prompt) == request.input_tokens
        if request.beginning is not None:
            earlier, shared_tokens = asked[f"request-{request.beginning}"], request.shared_tokens
            assert prompt[:shared_tokens] == earlier[:shared_tokens]
            assert prompt[: shared_tokens + 64] != earlier[: shared_tokens + 64]
            alike += shared_tokens
    assert alike == 19_520
    assert asked["request-0"][:16] != asked["request-1"][:16]


def test_the_shipped_runs_are_the_published_ones():
    for name, place in (
        ("rtx4090_llama3_1_8b", "RTX4090/Llama-3.1-8B"),
        ("rtxpro6000_qwen3_32b", "RTXPRO6000/Qwen3-32B"),
    ):
        path = shared(f"gpu_profiles/llmservingsim/runs/{place}/requests.jsonl")
        assert read_run(file_of(name, None)) == read_run(path), (
            "meta.json names its workload, so prompts share what they shared"
        )
        for field in ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "num_kv_tokens"):
            assert setting(field, name, None) == setting(field, None, str(path))
    assert shipped() == ["rtx4090_llama3_1_8b", "rtxpro6000_qwen3_32b"]


def test_clocks_are_told_apart_by_the_request_that_was_queued_at_once(tmp_path: Path):
    path = tmp_path / "requests.jsonl"
    lines = [
        {"input_toks": 5, "output_toks": 2, "arrival_time": 1000.0 + i, "queued_ts": 50.0 + i + i / 10}
        | {"first_token_ts": 51.0 + i, "last_token_ts": 52.0 + i}
        for i in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert read_run(path)[2] == RealRequest(2.0, 5, 2, 3.0, 4.0)
    path.write_text("[]\n", encoding="utf-8")
    with pytest.raises(MalformedInput, match=r"no requests\.jsonl"):
        read_run(path)


KWARGS = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "tensor_parallel_size": 2, "data_parallel_size": 1}


def run_in(folder: Path, **meta: object) -> str:
    path = folder / "requests.jsonl"
    line = {"input_toks": 5, "output_toks": 2, "arrival_time": 1.0, "queued_ts": 1.0}
    path.write_text(json.dumps(line | {"first_token_ts": 2.0, "last_token_ts": 3.0}), encoding="utf-8")
    if meta:
        (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return f"workload.path={path}"


def test_the_settings_are_those_of_the_run(tmp_path: Path):
    def settings(*overrides: str) -> tuple[object, ...]:
        config = check(composed("experiment=machine/fidelity_vllm", *overrides))
        s = config.scheduler
        return s.max_batch_requests, s.max_batch_tokens, config.hardware.gpus, config.cache.gpu

    assert settings("replay=rtx4090_llama3_1_8b") == (256, 2048, 1, "41408 tokens")
    assert settings("replay=rtxpro6000_qwen3_32b") == (128, 2048, 2, "auto")
    plain = run_in(tmp_path)
    assert settings("replay=rtxpro6000_qwen3_32b", plain) == (256, 2048, 1, "auto"), (
        "vLLM's defaults, not another run's"
    )
    path = run_in(tmp_path, engine_kwargs=KWARGS, kv_cache={"num_kv_tokens": 9600, "block_size": 16})
    assert settings("replay=rtx4090_llama3_1_8b", path) == (64, 4096, 2, "9600 tokens")
    assert settings("replay=rtx4090_llama3_1_8b", path, "scheduler.max_batch_requests=7")[0] == 7
    resolved = {"scheduler_config": {"max_num_seqs": 33}, "model_config": {"dtype": "torch.bfloat16"}}
    path = run_in(tmp_path, engine_kwargs={"max_num_seqs": None}, resolved_config=resolved)
    assert settings("replay=rtx4090_llama3_1_8b", path)[0] == 33


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("engine_kwargs", "data_parallel_size", 2),
        ("engine_kwargs", "kv_cache_dtype", "fp8"),
        ("engine_kwargs", "dtype", "float32"),
        ("kv_cache", "enable_prefix_caching", False),
        ("kv_cache", "block_size", 32),
    ],
)
def test_a_run_with_settings_that_no_replay_has_is_refused(tmp_path: Path, section: str, field: str, value: object):
    path = run_in(tmp_path, **{section: {**KWARGS, field: value}})
    with pytest.raises(ConfigError, match=rf"^The run of vLLM had {field}={value}, which a replay cannot express"):
        check(composed("experiment=machine/fidelity_vllm", "replay=rtx4090_llama3_1_8b", path))
    with pytest.raises(ConfigError, match=field):
        vllm_run(context(), path=path.removeprefix("workload.path="))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rtx4090_llama3_1_8b", "rtxpro6000_qwen3_32b"])
def test_simulated_cards_are_within_two_percent_of_the_real_runs(name: str):
    config = check(
        composed("experiment=machine/fidelity_vllm", f"replay={name}", f"hardware=sim_{name.partition('_')[0]}")
    )
    plan = plan_trial(config)
    tokenizer = build_tokenizer(config.model, plan.model.vocab, True)
    workload, described = build_workload(plan, tokenizer)
    assert isinstance(workload, VllmRun)
    system = build_system(plan, tokenizer, described)
    system.start()
    record = replay(system, workload)
    metrics = fidelity_metrics(workload.real, workload.seen, record.measurement.turns)
    errors = {m.label: m.value for m in metrics if m.name == "fidelity_error_pct"}
    assert len(errors) == 13 and all(abs(error or 0.0) < 2 for error in errors.values()), errors
