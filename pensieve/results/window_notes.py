"""What is to be known of the throughput column: sentences under the table, from the flags of its trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pensieve.results.schema import Trial
from pensieve.window import HALVES_MAY_DIFFER

_SENTENCES = {
    "window": "Throughput is over all measured turns, with start-up and drain, where the load is too small for a window",
    "not_steady": "The window began before three mean conversation durations had passed",
    "late_warmup": "Warm-up turns were still running when the window began",
    "few_turns": "Few turns finished in the window",
    "halves": f"The halves of the window differ by over {HALVES_MAY_DIFFER:.0%} in output tokens",
}


def window_notes(trials: Sequence[Trial]) -> list[str]:
    """One sentence for each flag of a throughput window, with the trials that have it by baseline."""
    notes = []
    totals = Counter(trial.baseline for trial in trials)
    for flag, sentence in _SENTENCES.items():
        flagged = Counter(trial.baseline for trial in trials if flag in trial.flags)
        if flagged == totals:
            notes.append(f"{sentence}: all trials.")
        elif flagged:
            each = ", ".join(f"{name} {count} of {totals[name]}" for name, count in flagged.items())
            notes.append(f"{sentence}: {each}.")
    drained = {t.baseline: max(_drain(o) for o in trials if o.baseline == t.baseline) for t in trials if _drain(t) > 0}
    if drained:
        each = ", ".join(f"{name} {share:.0%}" for name, share in drained.items())
        notes.append(f"Output tokens after the window, which throughput leaves out, at most: {each}.")
    return notes


def _drain(trial: Trial) -> float:
    return float(trial.flags.get("drain_share") or 0.0)
