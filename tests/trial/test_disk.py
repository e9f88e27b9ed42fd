"""A trial with a disk tier: its rates from its own rows, and that it claims no bound."""

from sqlalchemy import text

from tests.trial.running import run

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
        with tracking.store.database.reading() as connection:
            history, *parts = connection.execute(
                text(
                    f"SELECT sum(history_tokens), {sums} FROM turn WHERE trial_id = :trial AND status = 'completed' "
                    "AND phase NOT IN ('warmup', 'rewarm')"
                ),
                {"trial": outcome.trial_id},
            ).one()
        assert sum(parts) == history > 0
        values = {one.name: one.value for one in tracking.store.metrics_of(outcome.trial_id) if not one.label}
        named = [values[name] for name in ("gpu_hit_rate", "cpu_hit_rate", "disk_hit_rate", "miss_rate")]
        assert named == [part / history for part in parts]
        rates[disk] = named
        assert (values["bound_hit_rate"] is None) is (disk != "0 tokens")
    without, with_disk = rates.values()
    assert without[2] == 0.0 < with_disk[2] and with_disk[3] < without[3]
