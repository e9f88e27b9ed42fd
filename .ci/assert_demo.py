"""What a demo run must have shown, read from its database: every path exercised, outputs identical, nothing failed.

Pensieve comes before the others at equal GPU memory; by how much is printed, and left to the machine.
"""

import sys
from pathlib import Path

from pensieve.lab.results.store import open_store
from pensieve.lab.results.sweep_table import sweep_table
from pensieve.lab.statistics import paired_ratio
from pensieve.serve.record import is_measured

LEAST_SHARE = 0.02  # of the history tokens, for GPU hits, CPU hits and recomputation each

store = open_store(Path(sys.argv[1]), create=False)
sweep = store.latest_sweep()
assert sweep is not None
jobs = store.trials_of_sweep(sweep.id)
assert all(job.trial is not None for job in jobs), "a trial did not complete"

turns: dict[str, dict[int, dict[tuple[int, str], float]]] = {}
tokens = dict.fromkeys(("history_tokens", "gpu_hit_tokens", "cpu_hit_tokens", "recomputed_tokens"), 0)
for job in jobs:
    trial = job.trial
    assert trial is not None
    of_turn = turns.setdefault(trial.baseline, {})
    for turn in store.turns_of(trial.id):
        if not is_measured(turn.phase):
            continue
        of_turn.setdefault(turn.turn, {})[trial.seed, turn.session] = turn.ttft_ms
        if trial.baseline == "pensieve":
            for name in tokens:
                tokens[name] += getattr(turn, name)
assert set(turns) == {"pensieve", "gpu_only", "stateless", "prefix_cache"}, sorted(turns)

for name, count in tokens.items():
    share = count / tokens["history_tokens"]
    print(f"pensieve {name} = {share:.1%} of history")
    assert share >= LEAST_SHARE, f"{name}: the demo does not exercise this path"
last = max(turns["stateless"])
for baseline, least in (("stateless", 1.0), ("gpu_only", 0.9), ("prefix_cache", 0.9)):
    ratio = paired_ratio(turns[baseline][last], turns["pensieve"][last])
    print(f"turn {last}, {baseline} / pensieve: {ratio}")
    # The order, not the size, and with room for noise: three seeds on a machine shared with others have no interval.
    assert ratio.value > least, f"{baseline} is faster"
text = sweep_table(store, sweep.id).text(110)
assert "identical" in text, text
