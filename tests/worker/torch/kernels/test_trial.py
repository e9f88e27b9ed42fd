"""A whole trial on the Triton kernel, by the command a user types, in Triton's interpreter; see conftest.py."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

from tests.typed import typed

ARCHITECTURE = {
    "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 32,
}  # fmt: skip
SAID = {
    "bread": ("How long does a loaf rise?", "An hour.", "And in a cold kitchen?", "Two."),
    "trees": ("Which trees lose their needles?", "Larches.", "Only those?", "No."),
    "rain": ("Where does it rain most?", "In hills.", "Why there?", "Air rises."),
}


def rows(outputs, query):
    with closing(sqlite3.connect(outputs / "results.db")) as connection:
        return connection.execute(query).fetchall()


def test_a_trial_on_the_triton_kernel_gives_the_reference_tokens(tmp_path):
    """Prompts, appends to a history that was kept on GPU or came back from CPU, and decoding, several in a batch."""
    conversations = [
        {"id": name, "conversations": [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(said)]}
        for name, said in SAID.items()
    ]
    (tmp_path / "said.json").write_text(json.dumps(conversations))
    outputs = tmp_path / "outputs"
    words = (
        "-m", "attention_backend=triton,reference", "baseline=pensieve", "seed=0", "cache.gpu=128 tokens",
        "cache.cpu=256 tokens", "cache.chunk_tokens=16", "hardware.threads=1", "tracking.mlflow=false",
        "trial.exclusive=false", "workload=trace", "workload.format=sharegpt", f"workload.path={tmp_path / 'said.json'}",
        "workload.max_new_tokens=3", "workload.warmup_turns=1", "workload.request_rate=50", "workload.think_time_s=0.5",
        *(f"model.architecture.{name}={value}" for name, value in ARCHITECTURE.items()),
    )  # fmt: skip
    done = typed("runners/run.py", *words, outputs=outputs, timeout_s=250)
    assert done.returncode == 0, done.stderr
    served = rows(outputs, "select json_extract(engine, '$.attention_backend') from trial order by id")
    assert served == [("triton",), ("reference",)]
    outputs_of = [
        rows(outputs, f"select session, turn, output_sha256 from turn where trial_id = {trial} order by 1, 2")
        for trial in (1, 2)
    ]
    assert outputs_of[0] == outputs_of[1]
    assert len(outputs_of[0]) >= 2 * len(SAID)
    assert all(digest for _, _, digest in outputs_of[0])
    [(history, found)] = rows(
        outputs, "select sum(history_tokens), sum(gpu_hit_tokens + cpu_hit_tokens) from turn where trial_id = 1"
    )
    assert found == history > 0
