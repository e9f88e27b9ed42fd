from __future__ import annotations

import pytest
from sqlalchemy import inspect, text
from sqlalchemy.exc import IntegrityError

from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.schema import VERSION_TABLE
from pensieve.lab.results.store import ResultsStore
from tests.results.trials import MEMORY, trial_fields

CONTRACT = {
    "sweep": "id key name experiment command overrides n_expected status host git_commit mlflow_run_id started_at "
    "finished_at",
    "sweep_trial": "sweep_id trial_id job reused",
    "trial": "id fingerprint config_hash code_hash platform attempt experiment model baseline eviction scheduler cache "
    "workload hardware seed repeat weights model_revision dtype device device_count simulated contended gpu_tokens "
    "cpu_tokens gpu_bytes cpu_bytes kv_bytes_per_token working_set_tokens measure_start_s measure_end_s status error "
    "traceback host pid process_started_at heartbeat_at started_at finished_at git_commit mlflow_run_id config "
    "environment engine flags",
    "metric": "trial_id name label value unit n n_unit ci_low ci_high limit_value",
    "turn": "id trial_id ordinal session turn iteration label phase stream status finish_reason error intended_s sent_s "
    "arrived_s admitted_s first_token_s finished_s queue_ms ttft_ms latency_ms compute_ms transfer_ms prompt_tokens "
    "output_tokens history_tokens gpu_hit_tokens cpu_hit_tokens recomputed_tokens shared_hit_tokens new_tokens "
    "resumed_swapped_tokens resumed_recomputed_tokens cpu_recomputed_tokens h2d_bytes d2h_bytes sent_bytes "
    "received_bytes output_sha256 disk_hit_tokens",
    "sample": "trial_id at_s device name value unit",
    "miss": "trial_id turn_id cause evicted_by tokens ms",
    "holding": "trial_id session tier gib_s saved_s idle_gib_s",
    "artifact": "trial_id kind path sha256",
    "claim": "sweep_id name claimed measured ci_low ci_high n verdict trial_ids",
    VERSION_TABLE: "version_num",
}


@pytest.fixture
def store() -> ResultsStore:
    return ResultsStore(MEMORY)


def test_tables_and_columns_are_the_contract(store: ResultsStore) -> None:
    with store.database.reading() as connection:
        inspector = inspect(connection)
        found = {t: " ".join(c["name"] for c in inspector.get_columns(t)) for t in inspector.get_table_names()}
        view = " ".join(c["name"] for c in inspector.get_columns("current_trial"))
    assert found == CONTRACT
    assert view == CONTRACT["trial"]


def test_primary_key_of_metric_and_default_label(store: ResultsStore) -> None:
    trial = store.begin_trial(trial_fields())
    with store.database.writing() as connection:
        connection.execute(
            text(f"INSERT INTO metric (trial_id, name, value, unit) VALUES ({trial}, 'power_w', 1, 'W')")
        )
    assert [(m.name, m.label, m.value) for m in store.metrics_of(trial)] == [("power_w", "", 1.0)]
    with pytest.raises(IntegrityError):
        store.add_metrics(trial, [MetricValue("power_w", 2.0)])


@pytest.mark.parametrize(
    ("status", "attempt"), [("completed", 1), ("running", 2)], ids=["same attempt twice", "two running"]
)
def test_uniqueness_of_trials(store: ResultsStore, status: str, attempt: int) -> None:
    trial = store.begin_trial(trial_fields())
    columns = [c for c in CONTRACT["trial"].split() if c not in ("id", "status", "attempt")]
    copied = ", ".join(columns)
    statement = text(f"INSERT INTO trial ({copied}, status, attempt) SELECT {copied}, :s, :a FROM trial WHERE id = :id")
    with pytest.raises(IntegrityError), store.database.writing() as connection:
        connection.execute(statement, {"s": status, "a": attempt, "id": trial})
    with store.database.writing() as connection:  # what the constraints allow
        connection.execute(statement, {"s": "completed", "a": 2, "id": trial})
