from __future__ import annotations

import pytest

from analysis.sweep import in_order, number, open_source
from pensieve.errors import MissingSeries
from tests.analysis.sweeps import fill
from tests.results.trials import add_trial, conversation_turns, open_sweep, trial_fields

CHAT = conversation_turns((40.0, 50.0))


def chat(store, axes, **columns):
    return fill(store, axes, lambda at, seed: CHAT, **columns)


def test_what_is_drawn_along_makes_cells_and_the_rest_makes_panels(store):
    axes = {"cache": ["tiny", "small"], "workload.request_rate": ["2.0", "0.5"], "baseline": ["pensieve", "stateless"]}
    source = chat(store, axes)
    panels = source.panels("workload.request_rate")
    assert [dict(panel.group) for panel in panels] == [{"cache": "tiny"}, {"cache": "small"}]
    assert panels[0].values("workload.request_rate") == ["0.5", "2.0"]
    assert panels[0].baselines == ["pensieve", "stateless"]
    assert {(cell.baseline, cell.at["workload.request_rate"]) for cell in panels[0].of("stateless")} == {
        ("stateless", "0.5"),
        ("stateless", "2.0"),
    }
    assert [len(cell.trials) for panel in panels for cell in panel.cells] == [2] * 8  # seeds
    assert len(source.panels()) == 4
    assert len(source.panels("cache", "workload.request_rate")) == 1


def test_a_field_swept_beside_an_option_of_its_group_keeps_its_values_apart(store):
    source = chat(store, {"cache": ["tiny", "small"], "cache.chunk_tokens": ["8", "32"], "baseline": ["pensieve"]})
    groups = [dict(panel.group) for panel in source.panels()]
    assert len(groups) == 4
    assert {tuple(sorted(group)) for group in groups} == {("cache", "cache.chunk_tokens")}
    assert [len(cell.trials) for panel in source.panels() for cell in panel.cells] == [2] * 4


def test_a_field_of_the_baseline_that_is_swept_keeps_its_values_apart(store):
    source = chat(store, {"baseline.kv_budget": ["device", "total"]}, baseline="pensieve")
    assert [dict(panel.group) for panel in source.panels()] == [
        {"baseline.kv_budget": "device"},
        {"baseline.kv_budget": "total"},
    ]


def test_only_the_current_trials_of_the_chosen_sweep_are_read(store):
    first = open_sweep(store, seed="0", baseline="pensieve")
    old = add_trial(store, first, 0, "pensieve", CHAT)
    new = store.begin_trial(trial_fields(store.trial(old).fingerprint))
    store.link(first, new, 0, reused=False)
    store.add_turns(new, CHAT)
    store.finish_trial(new, "completed")
    other = store.open_sweep("another", "chat", "pensieve", "run.py -m", {}, 1, "host", None)
    add_trial(store, other, 0, "pensieve", CHAT, seed=5)
    assert [trial.seed for trial in open_source(store).trials] == [5]
    assert [trial.id for trial in open_source(store, first).trials] == [new]


def test_a_missing_series_names_the_command_that_makes_it(store):
    with pytest.raises(MissingSeries, match=r"run `python runners/run.py -m`"):
        open_source(store)
    source = chat(store, {"baseline": ["pensieve"]})
    wanted = open_source(store, source.sweep.id, ["pensieve", "vllm"])
    with pytest.raises(MissingSeries, match=r"baseline vllm; run `python runners/run.py baseline=vllm -m`"):
        wanted.panels()


def test_a_baseline_whose_trials_failed_is_missing_not_left_out(store):
    source = chat(store, {"baseline": ["pensieve"]})
    failed = store.begin_trial(trial_fields("x", baseline="stateless"))
    store.link(source.sweep.id, failed, 9, reused=False)
    store.finish_trial(failed, "failed", error="No memory.")
    with pytest.raises(MissingSeries, match=r"no completed trial of baseline stateless; run `run.py -m`"):
        open_source(store).panels()


def test_a_value_that_was_never_begun_is_missing(store):
    source = chat(store, {"workload.request_rate": ["0.5"], "baseline": ["pensieve"]})
    overrides = {**source.sweep.overrides, "workload.request_rate": "0.5,1.0"}
    store.open_sweep(source.sweep.key, "sweep", None, "run.py -m", overrides, 4, "host", None)
    with pytest.raises(MissingSeries, match=r"pensieve with workload.request_rate=1.0; run `run.py -m`"):
        open_source(store).panels("workload.request_rate")


def test_a_seed_that_did_not_complete_is_told(store):
    source = chat(store, {"baseline": ["pensieve"]})
    store.set_sweep(source.sweep.id, n_expected=3)
    [panel] = open_source(store).panels()
    assert panel.provenance.incomplete == 1


def test_an_axis_with_a_null_value_is_drawn(store):
    """The command line says null, a trial's configuration None."""
    source = chat(store, {"workload.users": ["null", "2"], "baseline": ["pensieve", "stateless"]})
    for job in source.jobs:
        config = job.last.config
        users = None if config["workload"]["users"] == "null" else int(config["workload"]["users"])
        store.set_trial(job.last.id, config={**config, "workload": {**config["workload"], "users": users}})
    source = open_source(store)
    assert source.swept("workload.users") == ["2", "None"]
    [panel] = source.panels("workload.users")
    assert panel.values("workload.users") == ["2", "None"]
    assert [len(cell.trials) for cell in panel.cells] == [2] * 4


@pytest.mark.parametrize(
    ("typed", "kept"), [("null", None), ("true", True), ("0.50", 0.5), ("1e3", 1000.0), ("'2 ktokens'", "2 ktokens")]
)
def test_a_value_is_found_however_it_was_typed(store, typed, kept):
    source = chat(store, {"workload.think_time_s": [typed, "7"], "baseline": ["pensieve"]})
    for job in source.jobs:
        config = job.last.config
        value = kept if config["workload"]["think_time_s"] == typed else 7
        store.set_trial(job.last.id, config={**config, "workload": {**config["workload"], "think_time_s": value}})
    assert open_source(store).panels("workload.think_time_s")[0].values("workload.think_time_s").count(str(kept)) == 1


def test_sizes_are_in_order_of_what_they_come_to():
    assert in_order(["2 ktokens", "768 tokens", "0"]) == ["0", "768 tokens", "2 ktokens"]
    assert in_order(["1GiB", "900MB", "2 KiB"]) == ["2 KiB", "900MB", "1GiB"]
    assert in_order(["4", "None", "16"]) == ["4", "16", "None"]
    assert in_order(["10", "9", "0.5"]) == ["0.5", "9", "10"]
    assert in_order(["retention_value", "lru"]) == ["retention_value", "lru"] and number("512/256") is None
    assert in_order(["1GiB", "768 tokens"]) == ["1GiB", "768 tokens"], "bytes and tokens cannot be told apart"
    assert (number("2 ktokens"), number("2KB"), number("1e3"), number("None")) == (2000, 2000, 1000, None)
