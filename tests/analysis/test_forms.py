"""What the forms of figures draw, against what went into the database by hand."""

import csv

import pytest
from matplotlib.colors import to_hex

from analysis import style
from analysis.registry import FIGURES
from analysis.sweep import open_source
from pensieve import units
from pensieve.errors import MissingSeries
from pensieve.lab.results.store import ResultsStore
from tests.analysis.sweeps import answered, fill, flat
from tests.results.trials import MEMORY, turn

FAST, SLOW = {"reason": 100.0, "reflect": 20.0}, {"reason": 400.0, "reflect": 200.0}
COSTS = {"pensieve": FAST, "gpu_only": FAST, "stateless": SLOW}


def rows_of(folder, stem):
    with (folder / f"{stem}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def timed(session, number, phase, ms, **given):
    record = turn(session, number, ms, phase=phase, label="" if phase == "warmup" else phase, **given)
    record.latency_ms = ms
    return record


def agents(costs, store=None):
    """Agent a takes 1 + a / 10 times as long; of 16 agents the reflection of agent 0 is refused."""

    def turns(at, seed):
        n, found = int(at["workload.agents"]), []
        for agent in range(n):
            found.append(timed(f"warmup-{agent}", 1, "warmup", 9000.0))
            for number, stage in enumerate(("reason", "reflect"), 1):
                found.append(timed(f"agent-{agent}", number, stage, costs[at["baseline"]][stage] * (1 + agent / 10)))
        if n == 16:
            found[2].status, found[2].finish_reason, found[2].latency_ms = "refused", "capacity", None
        return found

    axes = {"workload.agents": ["4", "1", "16"], "baseline": list(costs)}
    return fill(store or ResultsStore(MEMORY), axes, turns, workload="agents")


def decoding():
    """Ten requests at 10 ms a token, half of it computing, 40 for stateless, which sends 1,024 bytes a token."""

    def turns(at, seed):
        far = at["baseline"] == "stateless"
        found = [timed("first", 1, "warmup", 9e5)]
        for number in range(1, 11):
            one = timed(str(number), 1, "throughput", 50 * (40.0 if far else 10.0), tokens=(1,) * 50, iteration=number)
            one.compute_ms, one.sent_bytes = 250.0, 50 * 1024 if far else None
            found.append(one)
        return found

    axes = {"baseline": ["pensieve", "stateless"]}
    return fill(ResultsStore(MEMORY), axes, turns, lambda at, seed: {"sent_bytes": 512e3}, workload="decode")


def test_a_point_is_the_percentile_of_its_facet_and_a_baseline_has_its_colour(drawn, tmp_path):
    FIGURES["agent_scaling"].draw(agents(COSTS), tmp_path)
    reason, reflect = (
        {line.get_gid(): line for line in axes.get_lines()} for axes in drawn["agent_scaling"].figure.axes
    )
    assert flat(zip(*reason["pensieve"].get_data(), strict=True)) == pytest.approx([1, 100, 4, 130, 16, 250])
    assert reflect["stateless"].get_ydata() == pytest.approx([200, 260, 500])
    assert all(to_hex(line.get_color()).upper() == style.colour(name.split("/")[0]) for name, line in reason.items())
    ended = {name: list(line.get_xdata()) for name, line in reason.items() if name.endswith("/memory ran out")}
    assert ended == {f"{name}/memory ran out": [16] for name in COSTS}, "the first number of agents that had no room"
    assert not drawn["agent_scaling"].clipped
    row = next(row for row in rows_of(tmp_path, "agent_scaling") if row["stage"] == "reflect" and row["agents"] == "4")
    assert (row["baseline"], row["n"], row["out_of_memory_turns"]) == ("pensieve", "8", "0")


def test_a_cell_that_no_trial_completed_is_left_out_and_named(drawn, store, tmp_path):
    source = agents(COSTS, store=store)
    for trial in source.trials:
        if trial.baseline == "stateless" and trial.config["workload"]["agents"] == "16":
            store.finish_trial(trial.id, "failed", error="timeout")
    FIGURES["agent_scaling"].draw(open_source(store), tmp_path)
    assert [x for x, _ in drawn["agent_scaling"].lines["stateless"]] == [1.0, 4.0]
    assert "Left out, without a completed trial: stateless (workload.agents=16)" in drawn["agent_scaling"].caption
    with pytest.raises(MissingSeries, match=r"baseline vllm.*`python runners/run.py baseline=vllm -m`"):
        FIGURES["agent_scaling"].draw(open_source(store, wanted=["pensieve", "vllm"]), tmp_path)


def test_bars_are_quantities_and_what_nobody_counted_is_not_drawn_as_none(drawn, tmp_path):
    FIGURES["disaggregation"].draw(decoding(), tmp_path)
    times, moved = drawn["disaggregation"].figure.axes
    widths = {
        patch.get_gid(): patch.get_width() for axes in (times, moved) for patch in axes.patches if patch.get_gid()
    }
    assert widths["pensieve/latency_ms_per_token"] == pytest.approx(10.0)
    assert widths["stateless/compute_ms_per_token"] == pytest.approx(5.0)
    assert widths["stateless/sent_bytes_per_token"] == 1024.0 and "stateless/received_bytes_per_token" not in widths
    assert {"sent 1.02 kB", "all 10"} <= set(drawn["disaggregation"].texts)
    rows = {row["baseline"]: row["sent_bytes_per_token"] for row in rows_of(tmp_path, "disaggregation")}
    assert rows == {"pensieve": "", "stateless": "1024.0"}


def test_latency_stands_over_the_achieved_rate_and_goodput_over_the_load(drawn, store, tmp_path):
    def turns(at, seed):
        return [answered("a", 1, 10.0, tokens=2, latency_ms=20.0)]

    def metrics(at, seed):
        return {"throughput_req_s": float(at["workload.request_rate"]) / 2}

    axes = {"workload.request_rate": ["4.0", "2.0"], "baseline": ["pensieve"]}
    for trial in fill(store, axes, turns, metrics, flags={}, slo={"slo.ttft_ms": "200"}).trials:
        rate = float(trial.config["workload"]["request_rate"])
        window = {"measure_start_s": 1.0 - 4.0 / rate, "measure_end_s": 1.0}  # of one turn
        store.set_trial(trial.id, engine={"workload": {"request_rate_per_s": rate}}, **window)
    for name in ("throughput_latency", "goodput"):
        FIGURES[name].draw(open_source(store), tmp_path)
    panes = [axes.get_lines()[0].get_data() for name in drawn for axes in drawn[name].figure.axes]
    assert [flat(zip(*one, strict=True)) for one in panes] == [
        [1, 10, 2, 10], [1, 10, 2, 10], [2, 0.5, 4, 1], [2, 1, 4, 2]
    ]  # fmt: skip
    assert [row["offered_req_s"] for row in rows_of(tmp_path, "throughput_latency")] == ["2.0", "4.0"]


def test_the_conversation_that_shows_most_is_drawn_turn_by_turn(store):
    """`plain` is always on the GPU, `mixed` meets all three."""
    found = {"plain": [(0, 0), (100, 0), (200, 0), (300, 0)], "mixed": [(0, 0), (100, 0), (50, 150), (0, 0)]}

    def turns(at, seed):
        kept = at["baseline"] == "pensieve"
        for session, own in found.items():
            for n, (gpu, cpu) in enumerate(own):
                yield answered(session, n + 1, 5.0, history=100 * n, gpu=gpu * kept, cpu=cpu * kept)

    source = fill(store, {"baseline": ["pensieve", "stateless"]}, turns, lambda at, seed: {"gpu_hit_rate": 0.5})
    [plot] = FIGURES["idea"].plots(source)
    assert plot.rows[0].keys() >= {"gpu_hit_tokens", "new_tokens"} and "disk_hit_tokens" not in plot.rows[0]
    three = ("gpu_hit_tokens", "cpu_hit_tokens", "recomputed_tokens")
    assert [tuple(row[name] for name in three) for row in plot.rows] == [
        (0, 0, 0), (100, 0, 0), (50, 150, 0), (0, 0, 300), (0, 0, 0), (0, 0, 100), (0, 0, 200), (0, 0, 300),
    ]  # fmt: skip
    assert "'mixed'" in plot.lead


def test_sizes_are_in_order_of_what_they_come_to():
    assert units.in_order(["2 ktokens", "768 tokens", "0"]) == ["0", "768 tokens", "2 ktokens"]
    assert units.in_order(["1GiB", "900MB", "2 KiB"]) == ["2 KiB", "900MB", "1GiB"]
    assert units.in_order(["4", "None", "16"]) == ["4", "16", "None"]
    assert units.in_order(["10", "9", "0.5"]) == ["0.5", "9", "10"]
    assert units.in_order(["retention_value", "lru"]) == ["retention_value", "lru"] and units.number("512/256") is None
    assert units.in_order(["1GiB", "768 tokens"]) == ["1GiB", "768 tokens"], "bytes and tokens cannot be told apart"
    assert tuple(map(units.number, ("2 ktokens", "2KB", "1e3", "None"))) == (2000, 2000, 1000, None)
