"""Claims: the file and what is said where it is wrong, conditions, measures on a small database whose answer is known, and
verdicts."""

import math
from types import SimpleNamespace

import pytest

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
    unmet,
)
from pensieve.lab.results.frame import Frame
from pensieve.lab.results.schema import Trial
from pensieve.lab.statistics import Estimate
from tests.results.synthetic import claim, measure, numbered, sweep, talk
from tests.results.trials import add_trial, trial_fields, turn

# The file of claims: what it may hold, what is said where it may not, and the one that ships.

ONE = """
- name: speedup
  text: It is faster
  source: somebody
  measure: speedup
  arguments: {turn: 5}
  of: [pensieve]
  against: [vllm, stateless]
  claimed: {low: 2.0}
  unit: x
  conditions: {model: [tiny]}
"""


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("measure: speedup", "measure: speedupp", "there is no measure speedupp; there are: axis_ratio, "),
        ("{turn: 5}", "{turns: 5}", "the measure speedup takes no turns"),
        (ONE, ONE + ONE, "two claims called speedup"),
        (ONE, "[", "cannot be read: "),
    ],
)
def test_a_malformed_file_is_one_sentence_that_names_the_entry(tmp_path, old, new, sentence):
    path = tmp_path / "claims.yaml"
    path.write_text(ONE.replace(old, new))
    with pytest.raises(ConfigError, match=sentence):
        read_claims(path)


def test_the_claims_that_ship_name_what_exists_and_bear_the_published_numbers():
    claims = read_claims(conf_folder() / "claims.yaml")
    for one in claims:
        assert set(one.of) | set(one.against) <= set(options("baseline")), one.name
        for group in ("model", "workload"):
            assert set(one.conditions.get(group, ())) <= set(options(group)), one.name
        assert one.source and one.text[0].isupper() and not one.text.endswith(".")
    assert [one.claimed.published for one in claims if "paper" in one.name] == [1.36, 1.70, 1.17, 1.58, 2.04, 3.0]
    assert all(one.claimed.low < one.claimed.high for one in claims)


# Trials against the conditions of a claim.


@pytest.mark.parametrize(
    ("field", "wanted", "clause"),
    [
        ("model", ("opt_13b", "t*y"), None),
        ("device", (None,), None),
        ("workload.users", (6,), None),
        ("flags.load", ("closed",), None),
        ("model", ("opt_13b", "opt_66b"), "model is tiny, gpt2 here, claimed for opt_13b or opt_66b"),
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


def test_speedup_is_theirs_over_ours_at_a_turn():
    store = both()
    for turn_, expected in ((2, 2.0), ("first", 1.0), ("last", 3.0), (None, 140 / 60)):
        found = measure(store, "speedup", theirs="stateless", turn=turn_)
        assert (found.value, found.ci_low, found.ci_high) == pytest.approx((expected, expected, expected))
        assert (found.n, found.groups) == (20, 5)
    with pytest.raises(MissingSeries, match="no conversation has ttft_ms at turn 9 in both"):
        measure(store, "speedup", theirs="stateless", turn=9)


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
    repeats = both(seeds=1, metrics=metrics)
    for repeat in range(1, 9):
        add_trial(repeats, 1, 1 + repeat, "pensieve", FAST(0), metrics["pensieve"](repeat), repeat=repeat)
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
        ([(1.0, 50.0), (2.0, 150.0), (3.0, 200.0)], 2.0),
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
            "normalized_latency_ms_p90": 100.0 * float(rate) / capacity,
        }

    axis = "workload.request_rate"
    metrics = {"pensieve": of(3.0), "stateless": of(2.0)}
    turns = {name: lambda seed, rate: talk(10.0)(seed) for name in metrics}
    few, store = (sweep(turns, seeds=seeds, metrics=metrics, axis=axis, values=[1, 2, 3, 4]) for seeds in (4, 5))
    for evidence, low in ((few, None), (store, 1.5)):
        found = measure(evidence, "throughput_at_latency_ratio", theirs="stateless", over=axis, limit=120.0)
        assert (found.value, found.ci_low) == (pytest.approx(3.6 / 2.4), low and pytest.approx(low))
    with pytest.raises(MissingSeries, match="crosses 900 ms"):
        measure(store, "throughput_at_latency_ratio", theirs="stateless", over=axis, limit=900.0)


# Claims against whole sweeps, and the table they end up in.

TEN_MS, THIRTY_MS = talk(10.0, 10.0), talk(30.0, 30.0)


def test_verdicts_of_a_sweep():
    store = sweep({"pensieve": TEN_MS, "stateless": THIRTY_MS})
    for changed, verdict, why, value in (
        ({}, "holds", "within the claim", 3.0),
        ({"claimed": {"high": 1.0}}, "fails", "above the claim", 3.0),
        ({"against": ["vllm", "gpu_only"]}, "not comparable", "no completed trial of vllm or gpu_only", None),
        ({"conditions": {"model": ["opt_13b"]}}, "not comparable", "model is tiny here, claimed for opt_13b", 3.0),
        ({"conditions": {"workload": ["hotness"]}}, "not comparable", "", None),  # another question
    ):
        [one] = judge_sweep(store, 1, [claim(**changed)])
        assert one.verdict == verdict and why in one.why
        assert (one.measured and one.measured.found.value) == (value and pytest.approx(value))


def test_of_several_workloads_those_that_the_claim_is_about_are_taken():
    store = sweep({"pensieve": TEN_MS, "stateless": THIRTY_MS})
    for job, name in enumerate(("pensieve", "stateless"), start=50):
        add_trial(store, 1, job, name, TEN_MS(0), workload="other", config={"workload": {"name": "chat"}})
    [one] = judge_sweep(store, 1, [claim(conditions={"workload": ["chat"]})])
    assert (one.verdict, one.trial_ids) == ("holds", tuple(range(1, 11)))


def test_every_group_is_judged_and_what_none_can_speak_to_is_said_once_of_the_nearest():
    turns = {
        "pensieve": lambda seed, cache: talk(10.0 if cache == "large" else 30.0)(seed),
        "stateless": lambda seed, cache: talk(30.0)(seed),
    }
    store = sweep(turns, axis="cache.size", values=["large", "small"])
    found = {one.name: one.verdict for one in judge_sweep(store, 1, [claim()])}
    assert found == {"speedup (cache.size=large)": "holds", "speedup (cache.size=small)": "fails"}
    [one] = judge_sweep(store, 1, [claim(conditions={"model": ["opt_13b"], "cache.size": ["small"]})])
    assert (one.name, one.differences) == ("speedup (cache.size=small)", ("model is tiny here, claimed for opt_13b",))


# Each verdict from the intervals that call for it.

RANGE, ABOVE, BELOW = Claimed(low=1.5, high=2.5), Claimed(low=2.0), Claimed(high=1.0)


def measured(low, high, value=None, seeds=3, n=18):
    value = value if value is not None else ((low or 0) + (high or 0)) / 2
    return Measured(Estimate(value, low, high, n, seeds), "conversations")


def test_a_claim_holds_or_fails_only_where_the_whole_interval_does():
    for claimed, low, high, verdict, word in (
        (RANGE, 1.5, 2.5, "holds", "within"),
        (RANGE, 2.6, 3.0, "fails", "above"),
        (RANGE, 1.0, 1.4, "fails", "below"),
        (RANGE, 1.0, 1.6, "inconclusive", "across"),
        (RANGE, 2.4, 3.0, "inconclusive", "across"),
        (ABOVE, 2.0, 9.0, "holds", "within"),
        (ABOVE, 1.0, 1.9, "fails", "below"),
        (BELOW, -0.5, 1.0, "holds", "within"),
        (BELOW, 0.9, 1.1, "inconclusive", "across"),
    ):
        found, why = judge(claimed, measured(low, high), [])
        assert found == verdict and word in why


def test_what_comes_before_the_interval():
    few = measured(1.9, 2.0, seeds=1)
    assert judge(RANGE, few, [], fewest_seeds=3) == ("inconclusive", "one seed, and 3 are needed")
    assert judge(RANGE, few, [], fewest_seeds=1)[0] == "holds"
    found, why = judge(RANGE, measured(None, None, value=2.0, n=4), [])
    assert found == "inconclusive" and "n = 4 conversations, 3 seeds" in why
    unlike = judge(RANGE, few, ["model is tiny here", "workload is chat here"], fewest_seeds=3)
    assert unlike == ("not comparable", "model is tiny here; workload is chat here")
    for nothing in (None, measured(1.0, 2.0, value=math.nan), measured(1.0, 2.0, value=math.inf)):
        assert judge(RANGE, nothing, [])[0] == "not comparable"
