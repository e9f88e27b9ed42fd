from __future__ import annotations

import csv
from collections.abc import Mapping

import pytest

from analysis import agents, style
from analysis.agents import agent_ratios, agent_scaling, agent_stages, agent_table
from analysis.sweep import open_source
from pensieve.errors import MissingSeries
from pensieve.lab.results.store import ResultsStore
from tests.analysis.prefixes import colours, marks, swapped
from tests.analysis.sweeps import fill, flat
from tests.results.trials import MEMORY, turn

FAST = {"reason": 100.0, "reflect": 20.0}
SLOW = {"reason": 400.0, "reflect": 200.0}
STRAIGHT = {"pensieve": FAST, "gpu_only": FAST, "stateless": SLOW}
SWAPPED = {"pensieve": SLOW, "gpu_only": FAST, "stateless": FAST}
COUNTS = ("4", "1", "16")


def agent_sweep(store, costs, refused_from: Mapping[str, int] | None = None, counts=COUNTS, **columns):
    """Each agent reasons and reflects twice; agent a takes 1 + a / 10 times as long, and n agents 1 + n / 100 times.

    refused_from: from so many agents on the second reflection of agent 0 is refused, by baseline.
    """

    def turns(at, seed):
        n, found = int(at["workload.agents"]), []
        for agent in range(n):
            found.append(labelled(f"warmup-{agent}", 1, "warmup", 9000.0))
            for number in range(1, 5):
                stage = agents.STAGES[(number - 1) % 2]
                ms = costs[at["baseline"]][stage] * (1 + agent / 10) * (1 + n / 100) * (1 + seed / 100)
                found.append(labelled(f"agent-{agent}", number, stage, ms))
        if n >= (refused_from or {}).get(at["baseline"], 1000):
            last = found[4]
            last.status, last.finish_reason, last.latency_ms = "refused", "capacity", None
        return found

    axes = {"workload.agents": list(counts), "baseline": list(costs)}
    return fill(store, axes, turns, workload="agents", **columns)


def labelled(session, number, stage, ms):
    record = turn(session, number, ms, phase=stage, label="" if stage == "warmup" else stage)
    record.latency_ms = ms
    return record


def drawn_by(module, drawn, tmp_path, *args, **kwargs):
    drawn.clear()
    module.draw(agent_sweep(ResultsStore(MEMORY), *args, **kwargs), tmp_path)
    [found] = drawn.values() if module is agent_scaling else [None]
    return marks(found.figure) if found else {}


def rows_of(tmp_path, stem):
    with (tmp_path / f"{stem}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_swapping_two_baselines_in_the_database_swaps_the_lines(drawn, tmp_path):
    before = drawn_by(agent_scaling, drawn, tmp_path, STRAIGHT)
    inks = colours(drawn["agent_scaling"].figure)
    after = drawn_by(agent_scaling, drawn, tmp_path, SWAPPED)
    assert after == swapped(before, "pensieve", "stateless") != before
    assert all(inks[name] == style.colour(name).upper() for name in STRAIGHT)


@pytest.mark.parametrize("module", [agent_table, agent_ratios], ids=lambda module: module.name)
def test_swapping_two_baselines_swaps_the_numbers_of_the_tables(module, tmp_path, drawn):
    def quantities(costs):
        drawn_by(module, drawn, tmp_path, costs)
        names = [
            name
            for name in rows_of(tmp_path, module.name)[0]
            if name == "value" or "_ratio" in name or name == "reason_over_reflect"
        ]
        return {
            tuple(row[name] for name in ("baseline", "agents", "stage", "quantity") if name in row): [
                row[name] for name in names
            ]
            for row in rows_of(tmp_path, module.name)
        }

    before, after = quantities(STRAIGHT), quantities(SWAPPED)
    if module is agent_table:
        exchanged = {"pensieve": "stateless", "stateless": "pensieve"}
        assert after == {(exchanged.get(key[0], key[0]), *key[1:]): value for key, value in before.items()} != before
    else:  # ratios to the first baseline turn over
        assert before["stateless",] != after["stateless",]
        assert float(before["stateless",][2]) > 1 > float(after["stateless",][2])


def test_a_point_is_the_99th_percentile_of_a_stage_without_warmup(drawn, tmp_path):
    found = drawn_by(agent_scaling, drawn, tmp_path, {"pensieve": FAST})
    reason, reflect = dict(found["0:pensieve"]), dict(found["1:pensieve"])
    assert list(reason) == list(reflect) == [1.0, 4.0, 16.0]
    assert reason[4.0] == pytest.approx(100 * 1.3 * 1.04 * 1.01)  # the slowest agent of the slowest seed
    assert reflect[16.0] == pytest.approx(20 * 2.5 * 1.16 * 1.01, rel=0.02)
    assert "the fewest here are 4" in drawn["agent_scaling"].caption
    assert "memory ran out" not in drawn["agent_scaling"].texts


def test_the_point_where_memory_runs_out_is_the_first_number_of_agents_with_a_refusal(drawn, tmp_path):
    found = drawn_by(agent_scaling, drawn, tmp_path, STRAIGHT, {"stateless": 4, "gpu_only": 16})
    assert [x for x, _ in found["0:stateless/out of memory"]] == [4.0]
    assert [x for x, _ in found["1:gpu_only/out of memory"]] == [16.0]
    assert "0:pensieve/out of memory" not in found
    assert "memory ran out" in drawn["agent_scaling"].texts


def test_density_compares_what_each_carries_and_says_when_it_is_a_bound(drawn, tmp_path):
    drawn_by(agent_ratios, drawn, tmp_path, STRAIGHT, {"stateless": 4, "gpu_only": 1})
    rows = {row["baseline"]: row for row in rows_of(tmp_path, "agent_ratios")}
    assert [rows[name]["carries_agents"] for name in STRAIGHT] == ["16", "", "1"]
    assert [rows[name]["out_of_memory_at"] for name in STRAIGHT] == ["none", "1", "4"]
    assert rows["stateless"]["density_ratio_text"] == "≤ 0.188", "3 of 4 were not tried, and are not known not to fit"
    assert rows["gpu_only"]["density_ratio_text"] == "–"
    assert rows["pensieve"]["density_ratio_text"] == "1"


def test_a_density_met_by_both_is_a_plain_ratio(drawn, tmp_path):
    """Pensieve carries 15, stateless 3; each is tried with one more."""
    counts = ("3", "4", "15", "16")
    drawn_by(agent_ratios, drawn, tmp_path, STRAIGHT, {"stateless": 4, "pensieve": 16}, counts)
    rows = {row["baseline"]: row for row in rows_of(tmp_path, "agent_ratios")}
    assert (rows["stateless"]["density_ratio_text"], float(rows["stateless"]["density_ratio"])) == ("0.2", 0.2)
    assert rows["gpu_only"]["density_ratio_text"] == "≥ 1.07"


def test_a_limit_that_was_not_bisected_is_a_range(drawn, tmp_path):
    [drawing] = agent_ratios.draw(
        agent_sweep(ResultsStore(MEMORY), STRAIGHT, {"pensieve": 16, "stateless": 4, "gpu_only": 1}), tmp_path
    )
    assert drawing.table is not None
    found = {line["baseline"]: (line["carries\nagents"], line["density\n(×)"]) for line in drawing.table}
    assert found == {"pensieve": ("4 to 15", "1"), "gpu_only": ("none", "–"), "stateless": ("1 to 3", "0.0667 to 0.75")}


def test_latencies_are_compared_at_the_largest_number_that_all_completed(drawn, tmp_path):
    drawn_by(agent_ratios, drawn, tmp_path, STRAIGHT)
    rows = {row["baseline"]: row for row in rows_of(tmp_path, "agent_ratios")}
    assert rows["stateless"]["compared_at_agents"] == "16"
    assert float(rows["stateless"]["reason_latency_ratio"]) == pytest.approx(4.0)
    assert float(rows["stateless"]["reflect_latency_ratio"]) == pytest.approx(10.0)
    assert float(rows["pensieve"]["reason_over_reflect"]) == pytest.approx(5.0)
    assert rows["stateless"]["reason_latency_ratio_n"] == "32"


def test_the_few_that_are_left_when_memory_ran_out_are_compared_with_nobody(drawn, tmp_path):
    drawn_by(agent_ratios, drawn, tmp_path, STRAIGHT, {"stateless": 16})
    assert {row["compared_at_agents"] for row in rows_of(tmp_path, "agent_ratios")} == {"4"}


def test_a_device_that_ran_out_of_memory_counts_too(store):
    source = agent_sweep(store, {"pensieve": FAST}, counts=("1",))
    with store.database.writing() as connection:
        connection.exec_driver_sql(
            "UPDATE turn SET status = 'failed', error = 'The device ran out of memory in this step.' "
            "WHERE trial_id = 1 AND phase = 'reflect'"
        )
        connection.exec_driver_sql("UPDATE turn SET status = 'failed', error = 'Lost.' WHERE trial_id = 2")
    [(_, [scaling])] = agents.read(source)
    assert scaling.loads[0].out_of_memory == 2
    assert scaling.out_of_memory_at == 1 and scaling.density is None


def test_the_summary_table_has_mean_median_and_99th_percentile(tmp_path):
    [drawing] = agent_table.draw(agent_sweep(ResultsStore(MEMORY), {"pensieve": FAST}, {"pensieve": 16}), tmp_path)
    rows = [row for row in rows_of(tmp_path, "agent_table") if (row["agents"], row["stage"]) == ("4", "reason")]
    assert [row["quantity"] for row in rows] == ["latency_ms_mean", "latency_ms_p50", "latency_ms_p99"]
    assert float(rows[0]["value"]) == pytest.approx(100 * 1.15 * 1.04 * 1.005)
    assert all(row["n"] == "16" for row in rows)
    assert drawing.table is not None
    assert [line["out of\nmemory"] for line in drawing.table[:3]] == ["–", "–", "2"]
    assert [line["baseline"] for line in drawing.table[:3]] == ["pensieve", "", ""]


def test_one_number_of_agents_makes_a_table_and_no_figure(store):
    source = agent_sweep(store, {"pensieve": FAST}, counts=("4",))
    assert agent_table.applies(source) and not agent_scaling.applies(source) and not agent_ratios.applies(source)
    assert "experiment=agents/scaling -m" in agent_scaling.missing(source)


@pytest.mark.parametrize("module", [agent_scaling, agent_table, agent_ratios], ids=lambda module: module.name)
def test_a_missing_baseline_names_the_command(module, store, tmp_path):
    agent_sweep(store, {"pensieve": FAST})
    with pytest.raises(
        MissingSeries, match=r"baseline ray_serverless.*`python runners/run.py baseline=ray_serverless -m`"
    ):
        module.draw(open_source(store, wanted=["pensieve", "ray_serverless"]), tmp_path)


@pytest.mark.parametrize("module", [agent_scaling, agent_table, agent_ratios], ids=lambda module: module.name)
def test_a_baseline_that_took_too_long_at_many_agents_is_drawn_at_few(module, tmp_path, drawn):
    store = ResultsStore(MEMORY)
    source = agent_sweep(store, {"pensieve": FAST, "stateless": SLOW})
    for trial in source.trials:
        if trial.baseline == "stateless" and trial.config["workload"]["agents"] == "16":
            store.finish_trial(trial.id, "failed", error="timeout")
    module.draw(open_source(store), tmp_path)
    rows = rows_of(tmp_path, module.name)
    if module is agent_ratios:
        assert {row["compared_at_agents"] for row in rows} == {"4"}, "the most at which both have trials"
        assert next(float(row["carries_agents"]) for row in rows if row["baseline"] == "stateless") == 4
    else:
        there = {(row["baseline"], row["agents"]) for row in rows}
        assert there == {("pensieve", n) for n in ("1", "4", "16")} | {("stateless", n) for n in ("1", "4")}


def staged_sweep(store, costs, **more):
    """Three agents reason and reflect once; a reason takes as many times as long as its prompt is longer than 192 tokens."""

    def turns(at, seed):
        longer, found = int(at["workload.reason_tokens"]) / 192, []
        for agent in range(3):
            own = 1 + agent / 10 + seed
            found.append(labelled(f"agent-{agent}", 1, "reason", costs[at["baseline"]]["reason"] * longer * own))
            found.append(labelled(f"agent-{agent}", 2, "reflect", costs[at["baseline"]]["reflect"] * own))
        return found

    axes = {"workload.reason_tokens": ["768", "192"], **more, "baseline": list(costs)}
    return fill(store, axes, turns, workload="agents")


def test_a_reflection_is_compared_with_the_reason_of_its_own_agent(drawn, tmp_path, store):
    source = staged_sweep(store, {"pensieve": FAST, "stateless": SLOW})
    assert agent_stages.applies(source) and not agent_scaling.applies(source)
    [drawing] = agent_stages.draw(source, tmp_path)
    lines = drawn["agent_stages"].lines
    assert flat(lines["pensieve"]) == pytest.approx([192, 5, 768, 20])
    assert flat(lines["stateless"]) == pytest.approx([192, 2, 768, 8])
    assert drawn["agent_stages"].clipped == []
    rows = {(row["baseline"], row["reason_tokens"]): row for row in rows_of(tmp_path, "agent_stages")}
    long = rows["pensieve", "768.0"]
    assert float(long["reason_ms_mean"]) / float(long["reflect_ms_mean"]) == pytest.approx(20)
    assert drawing.table is not None and len(drawing.table) == 4


def test_agents_that_never_reflected_are_named(store, tmp_path):
    staged_sweep(store, {"pensieve": FAST})
    with store.database.writing() as connection:
        connection.exec_driver_sql("UPDATE turn SET status = 'failed' WHERE phase = 'reflect'")
    with pytest.raises(MissingSeries, match="reasoned and reflected"):
        agent_stages.draw(open_source(store), tmp_path)
    assert not agent_stages.applies(agent_sweep(ResultsStore(MEMORY), {"pensieve": FAST}))
    moved = staged_sweep(ResultsStore(MEMORY), {"pensieve": FAST}, **{"hardware.migration": ["never", "always"]})
    assert not agent_stages.applies(moved), "what is compared there is how KV moves"
