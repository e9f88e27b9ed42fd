"""Live turns in the results database."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import func, select

pytest.importorskip("fastapi")

from pensieve.errors import ConfigError, TrialRunning
from pensieve.lab.results.schema import miss_table
from pensieve.lab.results.store import open_store
from pensieve.serve.server.create import server_of
from pensieve.serve.server.recording import start_recording
from tests.server.test_chat import composed


@pytest.fixture
def config(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    fields = composed("hardware=sim_h100", "tracking=local")
    del fields["chat"]
    return fields


def test_live_turns_are_those_of_a_trial(config: dict[str, Any], tmp_path: Any) -> None:
    with server_of(config) as server:
        server.generate("before", text="not recorded", max_new_tokens=2)
        recording = start_recording(server, config)
        turns = [server.generate("a", text=f"message {i}", max_new_tokens=3).turn for i in range(3)]
        with pytest.raises(TrialRunning):
            start_recording(server, config)
        recording.close()
    store = open_store(tmp_path, create=False)
    trial = store.trial(recording.trial_id)
    assert (trial.workload, trial.status, trial.baseline) == ("live", "completed", "pensieve")
    rows = store.turns_of(recording.trial_id)
    assert [row.ordinal for row in rows] == [0, 1, 2]
    assert [row.ttft_ms for row in rows] == [turn.ttft_ms for turn in turns]
    assert [row.gpu_hit_tokens for row in rows] == [turn.gpu_hit_tokens for turn in turns]
    assert 0 <= rows[0].intended_s < rows[1].intended_s < trial.measure_end_s
    with store.database.reading() as connection:
        ms = connection.scalar(select(func.sum(miss_table.c.ms)).where(miss_table.c.trial_id == recording.trial_id))
    assert ms == pytest.approx(sum(turn.ttft_ms for turn in turns))
    assert turns[0].token_ids, "the conversation keeps its own"


def test_without_a_database_it_is_refused(config: dict[str, Any]) -> None:
    with server_of(config) as server, pytest.raises(ConfigError, match="tracking"):
        start_recording(server, {**config, "tracking": {"name": "off", "url_env": None, "mlflow": False}})
