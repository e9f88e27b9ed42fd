import csv
import statistics
from dataclasses import replace

import pytest

from analysis.prefix import engine_interfaces
from analysis.sweep import open_source
from pensieve.errors import MixedPanel
from pensieve.lab.results.store import ResultsStore
from tests.analysis.prefixes import FAST, prefix_turns
from tests.analysis.sweeps import fill
from tests.results.trials import MEMORY

HTTP_MS = {"llama_cpp": 0.0, "llama_cpp_http": 3.5}


def sweep(costs=HTTP_MS, engine_of=lambda baseline: {}):
    """Over HTTP every first token of a query comes so many ms later."""

    def turns(at, seed):
        late = costs[at["baseline"]]
        return prefix_turns({step: ms + late * (1 + 0.1 * seed) for step, ms in FAST.items()})

    store = ResultsStore(MEMORY)
    source = fill(
        store,
        {"workload.blocks": ["512/256"], "baseline": list(costs)},
        turns,
        workload="prefix_invalidation",
        seeds=range(6),
    )
    for trial in source.trials:
        store.set_trial(trial.id, engine={**trial.engine, **engine_of(trial.baseline)})
    return open_source(store, source.sweep.id), store


def rows(tmp_path):
    [file] = tmp_path.glob("engine_interfaces*.csv")
    with file.open(newline="") as opened:
        return {(row["query"], row["quantity"]): row for row in csv.DictReader(opened)}


def test_the_difference_is_that_of_the_same_queries_from_raw_rows(drawn, tmp_path):
    source, store = sweep()
    engine_interfaces.draw(source, tmp_path)
    ttft = {trial.baseline: {} for trial in source.trials}
    for trial in source.trials:
        for turn in store.turns_of(trial.id):
            if turn.iteration >= 0:
                ttft[trial.baseline][trial.seed, turn.session, turn.phase] = turn.ttft_ms
    for kind in ("hit", "miss"):
        differences = [ttft["llama_cpp_http"][key] - ms for key, ms in ttft["llama_cpp"].items() if key[2] == kind]
        found = rows(tmp_path)[kind, "difference"]
        low, high = min(differences), max(differences)
        assert low <= float(found["ttft_ms"]) <= high
        assert float(found["ttft_ms"]) == pytest.approx(statistics.median_low(sorted(differences)), abs=0.4)
        assert low <= float(found["ci_low"]) <= float(found["ci_high"]) <= high


def test_the_other_way_round_it_is_negative_and_without_http_it_is_none(drawn, tmp_path):
    engine_interfaces.draw(sweep({"llama_cpp": 3.5, "llama_cpp_http": 0.0})[0], tmp_path)
    assert float(rows(tmp_path)["hit", "difference"]["ttft_ms"]) < -3.0
    engine_interfaces.draw(sweep({"llama_cpp": 1.0, "llama_cpp_http": 1.0})[0], tmp_path)
    assert float(rows(tmp_path)["hit", "difference"]["ttft_ms"]) == 0.0


@pytest.mark.parametrize(
    "name", ["gpu_tokens", "cpu_tokens", "n_batch", "max_batch_tokens", "max_batch_requests", "threads", "dtype"]
)
def test_engines_of_unlike_settings_are_refused_by_name(name, drawn, tmp_path):
    source, _ = sweep(engine_of=lambda baseline: {name: 1 if baseline == "llama_cpp" else 2})
    with pytest.raises(MixedPanel, match=rf"{name} is 1 for llama_cpp and 2 for llama_cpp_http"):
        engine_interfaces.draw(source, tmp_path)


def test_engines_that_are_not_compared_here_may_differ(drawn, tmp_path):
    costs = {**HTTP_MS, "pensieve": 0.0}
    engine_interfaces.draw(sweep(costs, lambda name: {"gpu_tokens": 1 + (name == "pensieve")})[0], tmp_path)


def test_unlike_settings_are_said_where_mixtures_are_allowed(drawn, tmp_path):
    source, _ = sweep(engine_of=lambda baseline: {"threads": 1 if baseline == "llama_cpp" else 2})
    [drawing] = engine_interfaces.draw(replace(source, allow_mixed=True), tmp_path)
    assert "MIXED: engines of unlike settings: threads is 1 for llama_cpp and 2 for llama_cpp_http" in drawing.caption


def test_what_an_engine_does_not_report_is_not_held_against_it(drawn, tmp_path):
    source, _ = sweep(engine_of=lambda baseline: {"threads": 1} if baseline == "llama_cpp" else {})
    engine_interfaces.draw(source, tmp_path)


def test_it_needs_an_engine_with_and_without_http():
    assert engine_interfaces.applies(sweep()[0])
    assert not engine_interfaces.applies(sweep({"llama_cpp": 0.0, "pensieve": 1.0})[0])
