"""The figure and the table of eviction policies, against the rows that they stand on."""

from __future__ import annotations

import csv

import pytest
from matplotlib.figure import Figure

from analysis import marks
from analysis.marks import Bar
from analysis.policies import policy_gap, policy_table
from analysis.sweep import Source
from pensieve.lab.results.frame import gap_closed, turn_frame
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.results.sweep_table import sweep_table
from pensieve.lab.statistics import Estimate
from tests.analysis.sweeps import answered, fill

SESSIONS = "abcdef"
HITS = {"lru": (10, 10), "fifo": (5, 5), "belady": (50, 30)}  # on GPU and CPU, of 100 history tokens
BOUND = 0.9


def swept(
    store: ResultsStore,
    hits=None,
    sizes=(),
    baselines=("pensieve",),
    metrics=lambda at, seed: {"bound_hit_rate": BOUND},
) -> Source:
    """hits: by policy; a conversation has a token more or less of them than the next one."""
    hits = hits or HITS

    def turns(at, seed):
        gpu, cpu = hits[at["eviction"]]
        odd = [1 if index % 2 else -1 for index in range(len(SESSIONS))]
        return [
            answered(session, number, 10.0 + gpu, history=100 * (number - 1), gpu=(gpu + one) * (number - 1), cpu=cpu)
            for session, one in zip(SESSIONS, odd, strict=True)
            for number in (1, 2)
            if number > 1 or not cpu
        ]

    axes = {"eviction": list(hits), "baseline": list(baselines), **({"cache.cpu": list(sizes)} if sizes else {})}
    return fill(store, axes, turns, metrics, seeds=(0,), summary=True)


def table_of(folder, name):
    with next(folder.glob(f"{name}*.csv")).open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_share_is_that_of_the_raw_rows_and_the_interval_holds_it(store, tmp_path, drawn):
    source = swept(store)
    policy_gap.draw(source, tmp_path)
    found = {row["eviction"]: row for row in table_of(tmp_path, "policy_gap")}
    for name, (gpu, cpu) in HITS.items():
        assert float(found[name]["hit_pct"]) == pytest.approx(gpu + cpu)
        expected = 100 * (gpu + cpu - 20) / (90 - 20)
        assert float(found[name]["gap_closed_pct"]) == pytest.approx(expected)
    assert found["lru"]["ci_low"] == "" and list(found) == ["belady", "lru", "fifo"]
    assert float(found["belady"]["ci_low"]) <= 100 * 60 / 70 <= float(found["belady"]["ci_high"])
    assert float(found["fifo"]["ci_high"]) < 0
    picture = drawn["policy_gap"]
    assert picture.lines["/bound"] == [(100.0, 0.0), (100.0, 1.0)]
    assert any("bound 90.0 %" in text for text in picture.texts) and not picture.clipped


def test_each_of_several_baselines_has_files_of_its_own(store, tmp_path, drawn):
    drawings = policy_gap.draw(swept(store, baselines=("pensieve", "gpu_only")), tmp_path)
    assert [one.csv.name for one in drawings] == [
        f"policy_gap-baseline-{name}.csv" for name in ("pensieve", "gpu_only")
    ]


def test_equal_policies_close_nothing_and_the_bound_itself_everything(store):
    source = swept(store, {"lru": (10, 10), "same": (10, 10)})
    lru, same = (turn_frame(store, [trial]) for trial in source.trials)
    nothing = gap_closed(same, lru, {0: BOUND})
    assert nothing is not None and nothing.ratio == 0.0 and nothing.ci_low == nothing.ci_high == 0.0
    whole = lru.copy()
    whole["gpu_hit_tokens"] = BOUND * whole["history_tokens"] - whole["cpu_hit_tokens"]
    all_of_it = gap_closed(whole, lru, {0: BOUND})
    assert all_of_it is not None and all_of_it.ratio == pytest.approx(1.0)
    assert gap_closed(same, lru, {0: 0.2}) is None, "there is no gap"
    assert gap_closed(same, lru, {1: BOUND}) is None, "of that seed nothing is known"


def test_each_size_has_its_own_start_and_bound(store, tmp_path, drawn):
    bounds = {"8 tokens": 0.9, "16 tokens": 0.6}
    source = swept(store, sizes=list(bounds), metrics=lambda at, seed: {"bound_hit_rate": bounds[at["cache.cpu"]]})
    for job in source.jobs:
        store.set_trial(job.last.id, gpu_tokens=0, cpu_tokens=int(job.last.config["cache"]["cpu"].split()[0]))
    [drawing] = policy_gap.draw(Source(store, source.sweep), tmp_path)
    rows = {(row["eviction"], row["size"]): row for row in table_of(tmp_path, "policy_gap")}
    assert float(rows["belady", "8 tokens"]["gap_closed_pct"]) == pytest.approx(100 * 60 / 70)
    assert float(rows["belady", "16 tokens"]["gap_closed_pct"]) == pytest.approx(100 * 60 / 40)
    assert len(drawn["policy_gap"].figure.axes) == 2 and "95 % interval" in drawing.caption


def test_long_names_leave_the_titles_whole(store, tmp_path, drawn):
    """The name of a policy takes a third of the width."""
    sizes = ("131072 tokens", "262144 tokens")
    source = swept(store, {"lru": (50, 2), "adaptive_retention": (50, 1), "learned_unguarded": (50, 10)}, sizes=sizes)
    for job in source.jobs:
        tokens = int(job.last.config["cache"]["cpu"].split()[0])
        store.set_trial(job.last.id, gpu_tokens=393216, cpu_tokens=tokens)
    policy_gap.draw(Source(store, source.sweep), tmp_path)
    picture = drawn["policy_gap"]
    assert any(text.startswith("524k tokens: lru 52.0 %") for text in picture.texts) and not picture.clipped


@pytest.mark.parametrize(("value", "high", "place"), [(-3.0, 8.0, 8.0), (-3.0, -1.0, 0.0), (5.0, 9.0, 9.0)])
def test_the_number_beside_a_bar_is_clear_of_its_interval(value, high, place):
    figure = Figure()
    axes = figure.subplots()
    marks.draw_bar(axes, Bar(Estimate(value, -12.0, high, 6, 6), "black", "22.0 %", "bar"), 0.0)
    [text] = axes.texts
    assert text.get_text() == "22.0 %" and text.xy[0] == place


@pytest.mark.parametrize(("found", "cut"), [(10, True), (70, False)])
def test_a_policy_that_loses_many_times_the_gap_leaves_the_others_their_width(store, tmp_path, drawn, found, cut):
    [drawing] = policy_gap.draw(swept(store, {"lru": (80, 5), "fifo": (found, 12), "belady": (80, 8)}), tmp_path)
    [axes] = drawn["policy_gap"].figure.axes
    rows = {row["eviction"]: float(row["gap_closed_pct"]) for row in table_of(tmp_path, "policy_gap")}
    assert rows["fifo"] == pytest.approx(100 * (found + 12 - 85) / 5)
    assert (axes.get_xlim()[0] == -150.0) == cut and (axes.get_xlim()[0] > rows["fifo"]) == cut
    assert ("cut off" in drawing.caption) == cut


def test_the_table_has_times_beside_the_shares(store, tmp_path, drawn):
    [drawing] = policy_table.draw(swept(store), tmp_path)
    assert drawing.table is not None
    line = {line["policy"]: line for line in drawing.table}["belady"]
    assert line["hits"].startswith("80.0") and line["bound"] == "90.0" and line["closed"].startswith("85.7")
    assert line["TTFT p50\n(ms)"].startswith("60.0")
    [row] = [row for row in table_of(tmp_path, "policy_table") if row["eviction"] == "belady"]
    assert float(row["ttft_ms_p90"]) == 60.0


def test_the_table_says_by_how_much_each_finds_more_than_the_papers_policy(store, tmp_path, drawn):
    hits = {"lru": (10, 10), "retention_value": (10, 20), "fifo": (5, 5), "belady": (50, 30)}
    [drawing] = policy_table.draw(swept(store, hits), tmp_path)
    rows = {row["eviction"]: row for row in table_of(tmp_path, "policy_table")}
    for name, expected in {"lru": -10, "fifo": -20, "belady": 50}.items():
        row = rows[name]
        assert float(row["more_than_retention_value_pct"]) == pytest.approx(expected)
        low, high = float(row["more_ci_low"]), float(row["more_ci_high"])
        assert low <= expected + 1e-9 and expected - 1e-9 <= high
    assert rows["retention_value"]["more_than_retention_value_pct"] == ""
    assert {line["policy"]: line["more"].split("\n")[0] for line in drawing.table}["belady"] == "50.0"
    alone = ResultsStore("sqlite://")
    [drawing] = policy_table.draw(swept(alone), tmp_path)
    assert {line["more"] for line in drawing.table} == {"–"}, "nothing to compare with"


def test_no_share_reaches_beyond_none_and_all(store, tmp_path, drawn):
    """Of six conversations that find 0 or 2, and 98 or 100 of 100 tokens."""
    [drawing] = policy_table.draw(swept(store, {"lru": (1, 0), "belady": (99, 0)}), tmp_path)
    ends = {line["policy"]: line["hits"].split("\n")[1].strip("[]").split(", ") for line in drawing.table}
    assert 0.0 <= float(ends["lru"][0]) < 1.0 and 99.0 < float(ends["belady"][1]) <= 100.0


def test_without_least_recently_used_or_a_bound_there_is_no_such_figure(store):
    assert not policy_gap.applies(swept(store, {"fifo": (1, 1), "belady": (2, 2)}))
    assert not policy_gap.applies(swept(ResultsStore("sqlite://"), metrics=lambda at, seed: {}))


def test_the_table_of_the_sweep_says_it_too(store):
    table = sweep_table(store, swept(store).sweep.id)
    closed = {row.group["eviction"]: row.gap_closed for row in table.rows}
    assert closed["lru"] is None and closed["belady"].ratio == pytest.approx(60 / 70)
    text = table.text(140)
    assert "closed %" in text and "86 (" in text and any(note.code == "gap_closed" for note in table.notes)
