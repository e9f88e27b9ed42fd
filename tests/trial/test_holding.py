"""A trial's ledger of holding, held against its own rows: what was held, what was found, and what that saved."""

import pytest
from sqlalchemy import text

from pensieve.lab.compose.plan import plan_trial
from pensieve.sim.worker import simulated_cost
from tests.composed import checked
from tests.results.trials import holdings_of
from tests.test_holding import positions_s
from tests.trial.running import run

BUSY = (
    "hardware=sim_h100", "cache=cramped", "workload.pressure=2", "workload.users=6", "workload.conversations=6",
    "workload.min_turns=5", "workload.max_turns=5", "workload.think_time_s=0.5", "workload.think_time_cap_s=null",
    "workload.max_new_tokens=8", "workload.turns_per_s=8",
)  # fmt: skip
GIB = 1024**3


def rows(tracking, trial, query):
    with tracking.store.database.reading() as connection:
        return connection.execute(text(query), {"trial": trial}).all()


def by_tier(tracking, trial, column):
    query = f"SELECT tier, sum({column}) FROM holding WHERE trial_id = :trial GROUP BY tier"
    return dict(map(tuple, rows(tracking, trial, query)))


def metrics(tracking, trial):
    return {(one.name, one.label): one.value for one in tracking.store.metrics_of(trial)}


@pytest.mark.parametrize("baseline", ["pensieve", "prefix_cache"])
def test_sums_of_the_rows(tracking, baseline):
    """Held: the readings of the pools' occupancy, summed over time. Saved, with recomputed: the whole history in seconds."""
    words = (*BUSY, f"baseline={baseline}")
    trial = run(tracking, *words).trial_id
    found, held, plan = metrics(tracking, trial), by_tier(tracking, trial, "gib_s"), plan_trial(checked(*words))
    block_gib = plan.chunk_tokens * plan.model.kv_bytes_per_token / GIB
    assert set(held) == {"gpu", "cpu"} if baseline == "pensieve" else {"gpu"}
    for tier, gib_s in held.items():
        assert found["held_gib_s", tier] == pytest.approx(gib_s)
        readings = rows(
            tracking,
            trial,
            f"SELECT at_s, value FROM sample WHERE trial_id = :trial AND name = '{tier}_blocks_used' ORDER BY at_s",
        )
        assert len(readings) > 50
        step_s = (readings[-1].at_s - readings[0].at_s) / (len(readings) - 1)
        assert sum(one.value for one in readings) * step_s * block_gib == pytest.approx(gib_s, rel=0.03)
    for name, column in (("held_idle_gib_s", "idle_gib_s"), ("saved_s", "saved_s")):
        for tier, value in by_tier(tracking, trial, column).items():
            assert found[name, tier] == pytest.approx(value)
    assert all(0 <= idle <= held[tier] for tier, idle in by_tier(tracking, trial, "idle_gib_s").items())
    cost = simulated_cost(plan.model, plan.hardware, plan.chunk_tokens)
    turns = rows(tracking, trial, "SELECT * FROM turn WHERE trial_id = :trial AND history_tokens IS NOT NULL")
    whole = sum(positions_s(cost, 0, one.history_tokens + one.shared_hit_tokens, plan.chunk_tokens) for one in turns)
    again = [one for one in turns if one.recomputed_tokens]
    saved = sum(by_tier(tracking, trial, "saved_s").values())
    assert all(one.phase != "warmup" for one in again)
    assert saved + found["recomputed_s", ""] == pytest.approx(whole)
    hit = {one.session for one in turns if one.gpu_hit_tokens or one.cpu_hit_tokens or one.shared_hit_tokens}
    assert hit == {one.session for one in holdings_of(tracking.store, trial) if one.saved_s}
    assert len(hit) > 4 and again
    told = {int(label): value for (name, label), value in found.items() if name == "prefill_s"}
    assert sorted(told) == [32 * 2**n for n in range(len(told))]
    assert max(told) <= max(one.prompt_tokens for one in turns) < 2 * max(told)
    for tokens, seconds in told.items():
        assert seconds == pytest.approx(positions_s(cost, 0, tokens, plan.chunk_tokens))


# -- with a disk tier, whose trial claims no bound

SMALL = (
    "model=llama2_70b", "hardware=sim_h100", "hardware.gpus=2", "workload=chat", "workload.conversations=12",
    "workload.min_turns=4", "workload.max_turns=4", "cache.gpu='1024 tokens'", "cache.cpu='512 tokens'",
)  # fmt: skip
TIERS = ("gpu_hit", "cpu_hit", "disk_hit", "recomputed")


def test_the_rates_are_those_of_the_rows_and_sum_to_the_history(tracking):
    rates = {}
    for disk in ("0 tokens", "16384 tokens"):
        outcome = run(tracking, *SMALL, f"cache.disk='{disk}'")
        sums = ", ".join(f"sum({name}_tokens)" for name in TIERS)
        counted = "trial_id = :trial AND status = 'completed' AND phase NOT IN ('warmup', 'rewarm')"
        query = f"SELECT sum(history_tokens), {sums} FROM turn WHERE {counted}"
        [(history, *parts)] = rows(tracking, outcome.trial_id, query)
        assert sum(parts) == history > 0
        values = {name: value for (name, label), value in metrics(tracking, outcome.trial_id).items() if not label}
        named = [values[name] for name in ("gpu_hit_rate", "cpu_hit_rate", "disk_hit_rate", "miss_rate")]
        assert named == [part / history for part in parts]
        rates[disk] = named
        assert (values["bound_hit_rate"] is None) is (disk != "0 tokens")
    without, with_disk = rates.values()
    assert without[2] == 0.0 < with_disk[2] and with_disk[3] < without[3]
