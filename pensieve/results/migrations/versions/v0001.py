"""The schema as it was first: sweeps, trials, and what trials leave behind."""

from __future__ import annotations

from alembic import op
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Float,
    ForeignKeyConstraint,
    Integer,
    PrimaryKeyConstraint,
    Text,
    UniqueConstraint,
    text,
)  # fmt: skip

revision = "0001"
down_revision = None

Moment = DateTime(timezone=True)
BigId = BigInteger().with_variant(Integer, "sqlite")


def upgrade() -> None:
    running = text("status = 'running'")
    op.create_table(
        "sweep",
        Column("id", Integer, nullable=False),
        Column("key", Text, nullable=False),
        Column("name", Text, nullable=False),
        Column("experiment", Text, nullable=True),
        Column("command", Text, nullable=True),
        Column("overrides", JSON, nullable=False),
        Column("n_expected", Integer, nullable=False),
        Column("status", Text, nullable=False),
        Column("host", Text, nullable=False),
        Column("git_commit", Text, nullable=True),
        Column("mlflow_run_id", Text, nullable=True),
        Column("started_at", Moment, nullable=False),
        Column("finished_at", Moment, nullable=True),
        PrimaryKeyConstraint("id", name="pk_sweep"),
        UniqueConstraint("key", name="uq_sweep_key"),
    )
    op.create_table(
        "trial",
        Column("id", Integer, nullable=False),
        Column("fingerprint", Text, nullable=False),
        Column("config_hash", Text, nullable=False),
        Column("code_hash", Text, nullable=False),
        Column("platform", Text, nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("experiment", Text, nullable=True),
        Column("model", Text, nullable=False),
        Column("baseline", Text, nullable=False),
        Column("eviction", Text, nullable=True),
        Column("scheduler", Text, nullable=True),
        Column("cache", Text, nullable=True),
        Column("workload", Text, nullable=False),
        Column("hardware", Text, nullable=False),
        Column("seed", Integer, nullable=False),
        Column("repeat", Integer, nullable=False),
        Column("weights", Text, nullable=True),
        Column("model_revision", Text, nullable=True),
        Column("dtype", Text, nullable=True),
        Column("device", Text, nullable=True),
        Column("device_count", Integer, nullable=True),
        Column("simulated", Boolean, nullable=False),
        Column("contended", Boolean, nullable=False),
        Column("gpu_tokens", BigInteger, nullable=True),
        Column("cpu_tokens", BigInteger, nullable=True),
        Column("gpu_bytes", BigInteger, nullable=True),
        Column("cpu_bytes", BigInteger, nullable=True),
        Column("kv_bytes_per_token", BigInteger, nullable=True),
        Column("working_set_tokens", BigInteger, nullable=True),
        Column("measure_start_s", Float, nullable=True),
        Column("measure_end_s", Float, nullable=True),
        Column("status", Text, nullable=False),
        Column("error", Text, nullable=True),
        Column("traceback", Text, nullable=True),
        Column("host", Text, nullable=False),
        Column("pid", Integer, nullable=False),
        Column("process_started_at", Moment, nullable=False),
        Column("heartbeat_at", Moment, nullable=False),
        Column("started_at", Moment, nullable=False),
        Column("finished_at", Moment, nullable=True),
        Column("git_commit", Text, nullable=True),
        Column("mlflow_run_id", Text, nullable=True),
        Column("config", JSON, nullable=False),
        Column("environment", JSON, nullable=False),
        Column("engine", JSON, nullable=False),
        Column("flags", JSON, nullable=False),
        PrimaryKeyConstraint("id", name="pk_trial"),
        UniqueConstraint("fingerprint", "attempt", name="uq_trial_fingerprint_attempt"),
    )
    op.create_index("ix_trial_config_hash", "trial", ["config_hash"])
    op.create_index(
        "uq_trial_fingerprint_running",
        "trial",
        ["fingerprint"],
        unique=True,
        sqlite_where=running,
        postgresql_where=running,
    )
    op.create_table(
        "artifact",
        Column("trial_id", Integer, nullable=False),
        Column("kind", Text, nullable=False),
        Column("path", Text, nullable=False),
        Column("sha256", Text, nullable=True),
        PrimaryKeyConstraint("trial_id", "kind", "path", name="pk_artifact"),
        ForeignKeyConstraint(["trial_id"], ["trial.id"], name="fk_artifact_trial_id_trial", ondelete="CASCADE"),
    )
    op.create_table(
        "claim",
        Column("sweep_id", Integer, nullable=False),
        Column("name", Text, nullable=False),
        Column("claimed", Float, nullable=True),
        Column("measured", Float, nullable=True),
        Column("ci_low", Float, nullable=True),
        Column("ci_high", Float, nullable=True),
        Column("n", Integer, nullable=True),
        Column("verdict", Text, nullable=False),
        Column("trial_ids", JSON, nullable=False),
        PrimaryKeyConstraint("sweep_id", "name", name="pk_claim"),
        ForeignKeyConstraint(["sweep_id"], ["sweep.id"], name="fk_claim_sweep_id_sweep", ondelete="CASCADE"),
    )
    op.create_table(
        "metric",
        Column("trial_id", Integer, nullable=False),
        Column("name", Text, nullable=False),
        Column("label", Text, nullable=False, server_default=""),
        Column("value", Float, nullable=True),
        Column("unit", Text, nullable=False),
        Column("n", Integer, nullable=True),
        Column("n_unit", Text, nullable=True),
        Column("ci_low", Float, nullable=True),
        Column("ci_high", Float, nullable=True),
        Column("limit_value", Float, nullable=True),
        PrimaryKeyConstraint("trial_id", "name", "label", name="pk_metric"),
        ForeignKeyConstraint(["trial_id"], ["trial.id"], name="fk_metric_trial_id_trial", ondelete="CASCADE"),
    )
    op.create_table(
        "sample",
        Column("trial_id", Integer, nullable=False),
        Column("at_s", Float, nullable=False),
        Column("device", Text, nullable=False, server_default=""),
        Column("name", Text, nullable=False),
        Column("value", Float, nullable=True),
        Column("unit", Text, nullable=False),
        ForeignKeyConstraint(["trial_id"], ["trial.id"], name="fk_sample_trial_id_trial", ondelete="CASCADE"),
    )
    op.create_index("ix_sample_trial_id", "sample", ["trial_id"])
    op.create_table(
        "sweep_trial",
        Column("sweep_id", Integer, nullable=False),
        Column("trial_id", Integer, nullable=False),
        Column("job", Integer, nullable=False),
        Column("reused", Boolean, nullable=False),
        PrimaryKeyConstraint("sweep_id", "job", name="pk_sweep_trial"),
        ForeignKeyConstraint(["sweep_id"], ["sweep.id"], name="fk_sweep_trial_sweep_id_sweep", ondelete="CASCADE"),
        ForeignKeyConstraint(["trial_id"], ["trial.id"], name="fk_sweep_trial_trial_id_trial", ondelete="CASCADE"),
    )
    op.create_index("ix_sweep_trial_trial_id", "sweep_trial", ["trial_id"])
    op.create_table(
        "turn",
        Column("id", BigId, nullable=False),
        Column("trial_id", Integer, nullable=False),
        Column("ordinal", Integer, nullable=False),
        Column("session", Text, nullable=False),
        Column("turn", Integer, nullable=False),
        Column("iteration", Integer, nullable=False),
        Column("label", Text, nullable=False),
        Column("phase", Text, nullable=False),
        Column("stream", Boolean, nullable=False),
        Column("status", Text, nullable=False),
        Column("finish_reason", Text, nullable=True),
        Column("error", Text, nullable=True),
        Column("intended_s", Float, nullable=False),
        Column("sent_s", Float, nullable=True),
        Column("arrived_s", Float, nullable=True),
        Column("admitted_s", Float, nullable=True),
        Column("first_token_s", Float, nullable=True),
        Column("finished_s", Float, nullable=True),
        Column("queue_ms", Float, nullable=True),
        Column("ttft_ms", Float, nullable=True),
        Column("latency_ms", Float, nullable=True),
        Column("compute_ms", Float, nullable=True),
        Column("transfer_ms", Float, nullable=True),
        Column("prompt_tokens", Integer, nullable=True),
        Column("output_tokens", Integer, nullable=False),
        Column("history_tokens", Integer, nullable=True),
        Column("gpu_hit_tokens", Integer, nullable=True),
        Column("cpu_hit_tokens", Integer, nullable=True),
        Column("recomputed_tokens", Integer, nullable=True),
        Column("shared_hit_tokens", Integer, nullable=True),
        Column("new_tokens", Integer, nullable=True),
        Column("resumed_swapped_tokens", Integer, nullable=False),
        Column("resumed_recomputed_tokens", Integer, nullable=False),
        Column("cpu_recomputed_tokens", Integer, nullable=False),
        Column("h2d_bytes", BigInteger, nullable=False),
        Column("d2h_bytes", BigInteger, nullable=False),
        Column("sent_bytes", BigInteger, nullable=False),
        Column("received_bytes", BigInteger, nullable=False),
        Column("output_sha256", Text, nullable=True),
        PrimaryKeyConstraint("id", name="pk_turn"),
        ForeignKeyConstraint(["trial_id"], ["trial.id"], name="fk_turn_trial_id_trial", ondelete="CASCADE"),
    )
    op.create_index("ix_turn_trial_id", "turn", ["trial_id"])
    columns = ", ".join(f"t.{name}" for name in _TRIAL_COLUMNS.split())
    op.execute(
        f"CREATE VIEW current_trial AS SELECT {columns} FROM trial t WHERE t.status = 'completed' AND t.attempt = "
        "(SELECT MAX(u.attempt) FROM trial u WHERE u.fingerprint = t.fingerprint AND u.status = 'completed')"
    )


_TRIAL_COLUMNS = """

id fingerprint config_hash code_hash platform attempt experiment model baseline eviction scheduler cache workload
hardware seed repeat weights model_revision dtype device device_count simulated contended gpu_tokens cpu_tokens
gpu_bytes cpu_bytes kv_bytes_per_token working_set_tokens measure_start_s measure_end_s status error traceback host
pid process_started_at heartbeat_at started_at finished_at git_commit mlflow_run_id config environment engine flags
"""
