"""What is said before a start, and where its numbers come from."""

from dataclasses import replace

import pytest

from pensieve.lab.compose import plan_trial
from pensieve.lab.results.store import ResultsStore, open_store
from pensieve.lab.trial import start_times
from pensieve.lab.trial.start_times import LastStart, announce, last_start, sentence
from pensieve.plugins.device import shelf
from pensieve.serve.server import create
from tests.composed import checked
from tests.results.trials import MEMORY, add_trial, open_sweep


@pytest.fixture(scope="module")
def plan():
    return plan_trial(checked("hardware=cpu", "model=llama3_8b", "cache.cpu='65536 tokens'"))


@pytest.fixture(scope="module")
def on_gpu(plan):
    return replace(plan, device=replace(plan.device, kind="cuda", label="a GPU"))


def test_a_start_says_what_the_last_one_took_or_what_a_first_one_has_to_do(plan, on_gpu):
    assert "GiB of weights, page-locks" in sentence(on_gpu, None)
    assert "compiles kernels" in sentence(on_gpu, None) and "compiles" not in sentence(plan, None)
    for one in (plan, on_gpu):
        said = sentence(one, LastStart(31, 12.4, 30.2))
        assert said.startswith("The start takes about 43 s, as it did in trial 31: 12 s to load")
        assert sentence(one, LastStart(31, 1.0, 2.0)) is None, "nobody wonders"
    assert sentence(plan_trial(checked("hardware=cpu")), None) is None, "a small model on a CPU"
    assert sentence(plan_trial(checked()), LastStart(1, 100.0, 100.0)) is None, "a simulated one"


def test_the_last_start_is_one_of_the_same_model_that_loaded_it(plan, monkeypatch):
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store)
    here = {
        "model": plan.model.name, "dtype": plan.model.dtype, "weights": plan.weights, "device": plan.device.label,
        "device_count": 1, "config": plan.config.model_dump(mode="json"),
    }  # fmt: skip

    def add(job, load_s, warmup_ms, **changed):
        took = {"load_s": load_s, "engine_warmup_ms": warmup_ms}
        return add_trial(store, sweep, job, "pensieve", [], metrics=took, **{**here, **changed, "repeat": job})

    assert last_start(plan, store) is None
    wanted = add(0, 12.0, 30_000.0)
    add(1, None, 5.0)  # found its model in memory
    for job, (field, value) in enumerate((("model", "x"), ("dtype", "float16"), ("device", "y")), 2):
        add(job, 1.0, 1.0, **{field: value})
    rounded = plan.config.model.model_copy(update={"quantization": "int8"})
    replicated = plan.config.hardware.model_copy(update={"replicas": 2, "router": "random"})
    others = {
        5: replace(plan, device=replace(plan.device, count=2)),
        6: replace(plan, config=plan.config.model_copy(update={"model": rounded})),
        7: replace(plan, config=plan.config.model_copy(update={"hardware": replicated})),
    }
    for job, other in others.items():
        assert last_start(other, store) is None
        ids = add(job, 2.0, 1.0, device_count=other.device.count, config=other.config.model_dump(mode="json"))
        assert last_start(other, store) == LastStart(ids, 2.0, 0.001)
    assert last_start(plan, store) == LastStart(wanted, 12.0, 30.0)
    monkeypatch.setattr(start_times, "host", lambda: "another machine")
    assert last_start(plan, store) is None


def test_a_model_in_memory_needs_no_announcement(plan, monkeypatch):
    monkeypatch.setattr(start_times, "sentence", lambda *_: "a sentence")
    said = []
    announce(plan, ResultsStore(MEMORY), said.append)
    assert said == ["a sentence"]
    other, own = (plan_trial(checked("hardware=cpu", f"model.seed={seed}")) for seed in (1, 0))
    monkeypatch.setattr("pensieve.device.model.load_model", lambda *_, **__: "a model")
    with shelf.open_shelf():
        shelf.take_model(shelf.ModelAsked(own.model, "random", None, None, 0, "cpu", None, "auto", own.chunk_tokens))
        announce(own, ResultsStore(MEMORY), said.append)
        assert len(said) == 1
        announce(other, ResultsStore(MEMORY), said.append)
        assert len(said) == 2, "it will be loaded in the place of that one"


@pytest.mark.parametrize("trials", [True, False], ids=["after a trial", "before any"])
def test_a_server_says_so_too(trials, monkeypatch, tmp_path):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path / "outputs"))
    if trials:
        open_store(tmp_path / "outputs")
    asked, said = [], []
    monkeypatch.setattr(start_times, "last_start", lambda plan, store: asked.append(store))
    monkeypatch.setattr(start_times, "sentence", lambda *_: "a sentence")
    for build in ("build_tokenizer", "build_system", "Server", "check_free_memory"):
        monkeypatch.setattr(create, build, lambda *_, **__: None)
    fields = {name: value for name, value in checked("hardware=cpu").model_dump().items() if name != "workload"}
    create.server_of(fields, say=said.append)
    assert said == ["a sentence"] and len(asked) == trials
    create.server_of(fields)
    simulated = {name: value for name, value in checked().model_dump().items() if name != "workload"}
    create.server_of(simulated, say=said.append)
    assert len(said) == 1, "a library is silent, and a simulated engine starts at once"
