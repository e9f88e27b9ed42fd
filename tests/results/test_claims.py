"""Claims: the file and what is said where it is wrong, conditions, measures on a small database whose answer is known, and
verdicts."""

import math
from types import SimpleNamespace

import pytest
from sqlalchemy import func, select

from pensieve.errors import ConfigError, MissingSeries
from pensieve.lab.compose.conf import conf_folder, options
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.claims import (
    Claimed,
    Measured,
    judge,
    judge_sweep,
    rates_at,
    read_claims,
    record_claims,
    unmet,
)
from pensieve.lab.results.frame import Frame
from pensieve.lab.results.schema import ClaimRow, Trial
from pensieve.lab.statistics import Estimate
from tests.results.synthetic import claim, measure, numbered, recorded_claims, sweep, talk
from tests.results.trials import add_trial, trial_fields, turn

# The file of claims: what it may hold, what is said where it may not, and the one that ships.

ONE = """
- name: speedup
  text: It is faster
  source: somebody
  measure: speedup
  arguments: {turn: 5}
  of: pensieve
  against: [vllm, stateless]
  claimed: {above: 2.0}
  unit: x
  conditions: {model: [tiny]}
"""


def read(tmp_path, text):
    path = tmp_path / "claims.yaml"
    path.write_text(text)
    return read_claims(path)


@pytest.mark.parametrize(
    ("claimed", "low", "high", "number", "shown"),
    [
        ({"above": 2.0}, 2.0, math.inf, 2.0, "> 2"),
        ({"below": 200}, -math.inf, 200, 200, "< 200"),
        ({"between": [1.5, 2.5]}, 1.5, 2.5, 1.5, "1.5 to 2.5"),
        ({"between": [1e3, 1e5]}, 1e3, 1e5, 1e3, "1,000 to 100,000"),
        ({"about": 1.36, "give_or_take": 0.136}, 1.224, 1.496, 1.36, "about 1.36 (± 0.136)"),
    ],
)
def test_what_is_claimed_becomes_bounds(claimed, low, high, number, shown):
    found = Claimed.model_validate(claimed)
    assert (*found.ends, found.number) == (pytest.approx(low), pytest.approx(high), number)
    assert found.shown == shown


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("{above: 2.0}", "{above: 2.0, below: 3.0}", "give one of above, below, between and about"),
        ("{above: 2.0}", "{}", "give one of"),
        ("{above: 2.0}", "{about: 2.0}", "about needs give_or_take"),
        ("{above: 2.0}", "{between: [3, 2]}", "lower end first"),
        ("measure: speedup", "measure: speedupp", "there is no measure speedupp; there are: axis_ratio, "),
        ("{turn: 5}", "{turns: 5}", "the measure speedup takes no turns"),
        ("unit: x", "unit: x\n  colour: red", r"Claim 1.colour of claims.yaml cannot be used"),
        ("  unit: x\n", "", r"1.unit of claims.yaml cannot be used: Field required"),
        ("name: speedup", "name: Speed up", r"Claim 1.name"),
        (ONE, ONE + ONE, "two claims called speedup"),
        (ONE, "[", "not YAML: "),
        (ONE, "name: x", "valid list"),
    ],
)
def test_a_malformed_file_is_one_sentence_that_names_the_entry(tmp_path, old, new, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read(tmp_path, ONE.replace(old, new))
    with pytest.raises(ConfigError, match="cannot be read from"):
        read_claims(tmp_path / "none.yaml")


def test_the_claims_that_ship_name_what_exists_and_bear_the_published_numbers():
    claims = read_claims(conf_folder() / "claims.yaml")
    for one in claims:
        assert set(one.of) | set(one.against) <= set(options("baseline")), one.name
        for group in ("model", "workload"):
            assert set(one.conditions.get(group, ())) <= set(options(group)), one.name
        assert one.source and one.text[0].isupper() and not one.text.endswith(".")
    claimed = {one.name: one.claimed.shown for one in claims}
    assert [shown.split()[1] for name, shown in claimed.items() if "paper" in name] == (
        ["1.36", "1.7", "1.17", "1.58", "2.04", "3"]
    )
    assert claimed["throughput"] == "1.5 to 2.5" and claimed["awareness_bytes"] == "1,000 to 100,000"


# Trials against the conditions of a claim.


@pytest.mark.parametrize(
    ("field", "wanted", "clause"),
    [
        ("model", ("opt_13b", "t*y"), None),
        ("simulated", (False,), None),
        ("device", (None,), None),
        ("workload.users", (6,), None),
        ("flags.load", ("closed",), None),
        ("model", ("opt_13b", "opt_66b"), "model is tiny, gpt2 here, claimed for opt_13b or opt_66b"),
        ("device", ("*A100*",), "device is not set here, claimed for *A100*"),
        ("workload.users", (1,), "workload.users is 6 here, claimed for 1"),
    ],
)
def test_a_condition_that_is_not_met_is_a_clause(field, wanted, clause):
    config = {"workload": {"name": "chat", "users": 6}}
    trials = [Trial(**trial_fields(config=config, flags={"load": "closed"}, model=name)) for name in ("tiny", "gpt2")]
    assert unmet({field: wanted}, trials if clause else trials[:1]) == ([clause] if clause else [])


# Each reduction on a small database whose answer is known.

FAST, SLOW = talk(10.0, 20.0, 30.0), talk(10.0, 40.0, 90.0)


def both(ours=FAST, theirs=SLOW, **kw):
    return sweep({"pensieve": ours, "stateless": theirs}, **kw)


@pytest.mark.parametrize(("turn_", "expected"), [(2, 2.0), ("first", 1.0), ("last", 3.0), (None, 140 / 60)])
def test_speedup_is_theirs_over_ours_at_a_turn(turn_, expected):
    found = measure(both(), "speedup", theirs="stateless", turn=turn_)
    assert found.value == pytest.approx(expected)
    assert (found.ci_low, found.ci_high) == (pytest.approx(expected), pytest.approx(expected))
    assert (found.n, found.groups) == (20, 5)
    with pytest.raises(MissingSeries, match="no conversation has ttft_ms at turn 9 in both"):
        measure(both(), "speedup", theirs="stateless", turn=9)


def staged(ours, theirs=1.0, phase="warmed"):
    """Two stages a conversation, and with it another phase, which are told apart by label and phase."""

    def turns(seed):
        return numbered(
            turn(f"s{s}", 1 + place, ms, phase=own, label=label, iteration=s)
            for s in range(4)
            for place, (ms, own, label) in enumerate([(ours, "chat", "hot"), (theirs, phase, "cold")])
        )

    return turns


def test_a_measure_takes_the_turns_of_a_label_or_a_phase():
    store = both(staged(10.0, 1.0), staged(30.0, 7.0))
    assert measure(store, "speedup", theirs="stateless", label="hot").value == pytest.approx(3.0)
    assert measure(store, "speedup", theirs="stateless", phase="warmed").value == pytest.approx(7.0)
    assert measure(store, "label_ratio", label="hot", to="cold", column="ttft_ms").value == pytest.approx(10.0)
    with pytest.raises(MissingSeries, match="ttft_ms of turns labelled hot and warm"):
        measure(store, "label_ratio", label="hot", to="warm", column="ttft_ms")


def test_an_axis_is_read_at_its_ends():
    sizes = {"axis": "scheduler.max_batch_tokens", "values": [64, 2048, 256]}
    store = sweep({"pensieve": lambda seed, size: staged(1.0, float(size), "miss")(seed)}, seeds=1, **sizes)
    found = measure(store, "axis_ratio", over=sizes["axis"], phase="miss")
    assert (found.value, found.n, found.groups) == (pytest.approx(2048 / 64), 4, 1)
    with pytest.raises(MissingSeries, match="no round has ttft_ms in phase hit"):
        measure(store, "axis_ratio", over=sizes["axis"], phase="hit")
    one = sweep({"pensieve": lambda seed, size: FAST(seed)}, axis=sizes["axis"], values=[64])
    with pytest.raises(MissingSeries, match="in phase chat at two values"):
        measure(one, "axis_ratio", over=sizes["axis"], phase="chat")


def test_a_metric_of_a_trial_is_compared_by_seed_or_taken_as_it_is():
    name = "throughput_output_tok_s"
    metrics = {"pensieve": lambda seed: {name: 30.0 + seed}, "stateless": lambda seed: {name: 10.0 + seed / 3}}
    store = both(metrics=metrics)
    found = measure(store, "metric_ratio", theirs="stateless", name=name)
    assert (found.value, found.ci_low, found.n) == (pytest.approx(3.0), pytest.approx(3.0), 5)
    found = measure(store, "metric_value", name=name)
    assert found.value == pytest.approx(32.0) and found.ci_low < 32.0 < found.ci_high
    with pytest.raises(MissingSeries, match="no seed has ttft_ms_p50 of both"):
        measure(store, "metric_ratio", theirs="stateless", name="ttft_ms_p50")
    with pytest.raises(MissingSeries, match="no trial has ttft_ms_p50"):
        measure(store, "metric_value", name="ttft_ms_p50")
    repeats = both(seeds=1, metrics=metrics)
    for repeat in range(1, 9):
        for job, own in enumerate(("pensieve", "stateless")):
            throughput = {name: metrics[own](repeat)[name]}
            config = {"workload": {"name": "chat"}}
            add_trial(repeats, 1, 2 * repeat + job, own, FAST(0), throughput, repeat=repeat, config=config)
    found = measure(repeats, "metric_value", name=name)
    assert (found.n, found.groups, found.ci_low) == (9, 1, None), "repeats are no seeds"
    alone = both(seeds=1)
    [job, _] = Frame(alone, 1).jobs
    alone.add_metrics(job.trial.id, [MetricValue("latency_ms_p99", 0.8, n=90, n_unit="turns", ci_low=0.7, ci_high=0.9)])
    found = measure(alone, "metric_value", name="latency_ms_p99")
    assert (found.value, found.ci_low, found.ci_high, found.n) == (0.8, 0.7, 0.9, 90)


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ([(1.0, 50.0), (2.0, 100.0), (3.0, 200.0)], 2.5),
        ([(1.0, 50.0), (2.0, 150.0)], None),  # reached, not passed
        ([(1.0, 200.0), (2.0, 100.0), (3.0, 300.0)], 2.25),  # noise below the knee: the last crossing counts
        ([(1.0, 50.0), (2.0, 60.0)], None),
        ([(1.0, 250.0), (2.0, 260.0)], None),
        ([(1.0, 50.0)], None),
    ],
)
def test_where_a_latency_passes_its_limit(curve, expected):
    trials = [(x, SimpleNamespace(seed=0, repeat=0, throughput=x, latency=y)) for x, y in curve]
    found = rates_at(SimpleNamespace(metric=getattr), trials, 150.0, "latency", "throughput")  # type: ignore[arg-type]
    assert found == ({} if expected is None else {(0, 0): pytest.approx(expected)})


def test_throughput_at_latency_is_read_between_rates():
    def of(capacity):
        return lambda seed, rate: {
            "throughput_req_s": float(rate),
            "normalized_latency_ms_p90": 100.0 * rate / capacity,
        }

    axis = "workload.request_rate"
    metrics = {"pensieve": of(3.0), "stateless": of(2.0)}
    turns = {name: lambda seed, rate: talk(10.0)(seed) for name in metrics}
    few, store = (sweep(turns, seeds=seeds, metrics=metrics, axis=axis, values=[1, 2, 3, 4]) for seeds in (4, 5))
    found = measure(few, "throughput_at_latency_ratio", theirs="stateless", over=axis, limit=120.0)
    assert (found.value, found.ci_low, found.ci_high) == (pytest.approx(3.6 / 2.4), None, None)
    found = measure(store, "throughput_at_latency_ratio", theirs="stateless", over=axis, limit=120.0)
    assert (found.value, found.ci_low, found.n) == (pytest.approx(3.6 / 2.4), pytest.approx(1.5), 5)
    with pytest.raises(MissingSeries, match="crosses 900 ms"):
        measure(store, "throughput_at_latency_ratio", theirs="stateless", over=axis, limit=900.0)


# Claims against whole sweeps, and the table they end up in.

TEN_MS, THIRTY_MS = talk(10.0, 10.0), talk(30.0, 30.0)


def verdict(store, **changed):
    [one] = judge_sweep(store, 1, [claim(**changed)])
    return one.verdict, one.why


def test_verdicts_of_a_sweep():
    def uneven(seed):
        return talk(10.0 * (1 + 4 * seed), 10.0)(seed)

    store = sweep({"pensieve": TEN_MS, "stateless": THIRTY_MS})
    assert verdict(store)[0] == "holds"
    assert verdict(sweep({"pensieve": THIRTY_MS, "stateless": TEN_MS}))[0] == "fails"
    across = verdict(sweep({"pensieve": uneven, "stateless": THIRTY_MS}), claimed={"above": 1.3})
    assert across == ("inconclusive", "the interval lies across the claim's bound")
    absent = verdict(store, against=["vllm", "gpu_only"])
    assert absent == ("not comparable", "no completed trial of vllm or gpu_only in this sweep")


def test_a_condition_that_differs_leaves_the_measurement_to_be_seen():
    store = sweep({"pensieve": TEN_MS, "stateless": THIRTY_MS})
    [one] = judge_sweep(store, 1, [claim(conditions={"model": ["opt_13b"]})])
    assert (one.verdict, one.measured.found.value) == ("not comparable", pytest.approx(3.0))
    assert "model is tiny here, claimed for opt_13b" in one.why
    [one] = judge_sweep(store, 1, [claim(conditions={"workload": ["hotness"]})])  # is another question
    assert (one.verdict, one.measured) == ("not comparable", None)


def test_of_several_workloads_those_that_the_claim_is_about_are_taken():
    store = sweep({"pensieve": TEN_MS, "stateless": THIRTY_MS})
    for job, name in enumerate(("pensieve", "stateless"), start=50):
        add_trial(store, 1, job, name, TEN_MS(0), workload="other", config={"workload": {"name": "chat"}})
    [one] = judge_sweep(store, 1, [claim(conditions={"workload": ["chat"]})])
    assert (one.verdict, one.trial_ids) == ("holds", tuple(range(1, 11)))


def test_every_group_of_a_sweep_is_judged_by_itself():
    def ours(seed, cache):
        return talk(10.0 if cache == "large" else 30.0)(seed)

    turns = {"pensieve": ours, "stateless": lambda seed, cache: talk(30.0)(seed)}
    store = sweep(turns, axis="cache.size", values=["large", "small"])
    found = {one.name: one.verdict for one in judge_sweep(store, 1, [claim()])}
    assert found == {"speedup (cache.size=large)": "holds", "speedup (cache.size=small)": "fails"}


def test_what_no_group_can_speak_to_is_said_once_of_the_nearest_group():
    turns = {"pensieve": lambda seed, size: TEN_MS(seed), "stateless": lambda seed, size: THIRTY_MS(seed)}
    store = sweep(turns, axis="cache.size", values=[1, 2, 3])
    conditions = {"model": ["opt_13b"], "cache.size": [2]}
    [one] = judge_sweep(store, 1, [claim(conditions=conditions)])
    assert one.name == "speedup (cache.size=2)"
    assert one.differences == ("model is tiny here, claimed for opt_13b",)


def test_rows_of_the_table_are_replaced_not_added():
    store = sweep({"pensieve": TEN_MS, "stateless": THIRTY_MS})
    other = store.open_sweep("other", "chat", None, None, {}, 0, "host", None)
    record_claims(store, other, judge_sweep(store, other, [claim(name="kept")]))
    first = [claim(), claim(name="dropped", claimed={"between": [1.0, 2.0]})]
    record_claims(store, 1, judge_sweep(store, 1, first))
    assert [(row.name, row.verdict) for row in recorded_claims(store, 1)] == [
        ("dropped", "fails"),
        ("speedup", "holds"),
    ]
    for _ in range(2):
        record_claims(store, 1, judge_sweep(store, 1, [claim(claimed={"below": 1.0})]))
    [row] = recorded_claims(store, 1)
    assert (row.name, row.verdict, row.claimed) == ("speedup", "fails", 1.0)
    assert (row.measured, row.n, row.trial_ids) == (pytest.approx(3.0), 20, list(range(1, 11)))
    with store.database.reading() as connection:
        assert connection.scalar(select(func.count()).select_from(ClaimRow)) == 2


# Each verdict from the intervals that call for it.

RANGE, ABOVE, BELOW = Claimed(between=(1.5, 2.5)), Claimed(above=2.0), Claimed(below=1.0)


def measured(low, high, value=None, seeds=3, n=18):
    value = value if value is not None else ((low or 0) + (high or 0)) / 2
    return Measured(Estimate(value, low, high, n, seeds), "conversations")


@pytest.mark.parametrize(
    ("claimed", "low", "high", "verdict", "word"),
    [
        (RANGE, 1.5, 2.5, "holds", "within"),
        (RANGE, 2.0, 2.0, "holds", "within"),
        (RANGE, 2.6, 3.0, "fails", "above"),
        (RANGE, 1.0, 1.4, "fails", "below"),
        (RANGE, 1.0, 1.6, "inconclusive", "across"),
        (RANGE, 2.4, 3.0, "inconclusive", "across"),
        (RANGE, 1.0, 3.0, "inconclusive", "across"),
        (ABOVE, 2.0, 9.0, "holds", "within"),
        (ABOVE, 1.0, 1.9, "fails", "below"),
        (ABOVE, 1.9, 2.1, "inconclusive", "across"),
        (BELOW, -0.5, 1.0, "holds", "within"),
        (BELOW, 1.1, 1.2, "fails", "above"),
        (BELOW, 0.9, 1.1, "inconclusive", "across"),
    ],
)
def test_a_claim_holds_or_fails_only_where_the_whole_interval_does(claimed, low, high, verdict, word):
    found, why = judge(claimed, measured(low, high), [])
    assert found == verdict and word in why


def test_what_comes_before_the_interval():
    few = measured(1.9, 2.0, seeds=1)
    assert judge(RANGE, few, [], fewest_seeds=3) == ("inconclusive", "one seed, and 3 are needed")
    assert judge(RANGE, measured(1.9, 2.0, seeds=2), [], fewest_seeds=3)[1] == "2 seeds, and 3 are needed"
    assert judge(RANGE, few, [], fewest_seeds=1)[0] == "holds"
    found, why = judge(RANGE, measured(None, None, value=2.0, n=4), [])
    assert found == "inconclusive" and "n = 4 conversations, 3 seeds" in why
    unlike = judge(RANGE, few, ["model is tiny here", "workload is chat here"], fewest_seeds=3)
    assert unlike == ("not comparable", "model is tiny here; workload is chat here")
    for nothing in (None, measured(1.0, 2.0, value=math.nan), measured(1.0, 2.0, value=math.inf)):
        assert judge(RANGE, nothing, [])[0] == "not comparable"
