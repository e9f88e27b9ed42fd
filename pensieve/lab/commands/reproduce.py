"""Run a recorded trial again from its stored configuration, and say what differs: conditions first, then results.

The repetition is a trial of its own, with the first one's id in its identity and in column `flags`. It is compared with the
first one and never replaces it: no sweep shows it, no command reuses it, and pruning never deletes the first one for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from pensieve.errors import ResultsError
from pensieve.lab.compose.conf import outputs_folder
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import check
from pensieve.lab.results.environment import environment
from pensieve.lab.results.identity import Identity, input_files
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.results.tokens import compare_tokens
from pensieve.lab.trial.job import Job, Tracking, identity_of
from pensieve.lab.trial.run import run_trial
from pensieve.specs import ROUNDS_APART, SIXTEEN_BITS

COMPARED = (
    "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_mean", "throughput_output_tok_s", "gpu_hit_rate", "cpu_hit_rate", "miss_rate",
)  # fmt: skip


def reproduce(store: ResultsStore, trial_id: int, say: Callable[[str], None]) -> int:
    """Run the trial again, beside it in the same database; 0 where it completed and its outputs are the same.

    Raises ResultsError without such a trial, ConfigError where its configuration is no longer understood.
    """
    old = store.trial(trial_id)
    config = check({**old.config, "force": True})
    plan = plan_trial(config)
    for line in differences(old, identity_of(plan, old.config)):
        say(line)
    assert store.root is not None
    known = store.completed_trial(identity_of(plan, old.config, reproduces=trial_id).fingerprint)
    attempt = known.attempt + 1 if known else 1
    folder = store.root / "runs" / f"reproduce-{trial_id}-attempt-{attempt}"
    folder.mkdir(parents=True, exist_ok=True)
    tracking = Tracking(outputs_folder(), store, mlflow=False, kept=True)
    outcome = run_trial(config, old.config, tracking, Job(f"trial {trial_id} again", folder, reproduces=trial_id), say)
    if not outcome.completed:
        say(f"Trial {outcome.trial_id}, which repeats {trial_id}, failed: {outcome.error}")
        return 1
    print(f"Trial {outcome.trial_id} repeats trial {trial_id}.")
    for line in _results(store, trial_id, outcome.trial_id):
        print(line)
    same, sentence = _outputs(store, trial_id, outcome.trial_id)
    print(sentence)
    return 0 if same else 1


def differences(old: Trial, new: Identity) -> Iterable[str]:
    """A sentence for each condition that is no longer as it was when the trial ran."""
    before, now = old.environment.get("inputs") or {}, input_files(old.config)
    changed = sorted(name for name in {**before, **now} if before.get(name) != now.get(name))
    if changed:
        yield f"The data differs: what {', '.join(changed)} names has another content now, or is not there."
    if old.code_hash != new.code_hash:
        was = _version(old.environment.get("git") or {})
        yield f"The code differs: the trial ran {was}, this is {_version(environment()['git'])}."
    if old.platform != new.platform:
        yield f"The platform differs: the trial ran on {old.platform!r}, this is {new.platform!r}."


def _version(git: dict[str, object]) -> str:
    commit = str(git.get("commit") or "no commit")[:12]
    return f"{commit} with changes {str(git.get('diff_sha256'))[:12]}" if git.get("dirty") else commit


def _results(store: ResultsStore, before: int, after: int) -> Iterable[str]:
    old, new = ({m.name: m for m in store.metrics_of(i) if m.label == ""} for i in (before, after))
    for name in COMPARED:
        a, b = (side[name].value if name in side else None for side in (old, new))
        if a is None or b is None:
            continue
        change = f"{(b - a) / a:+.1%}" if a else ("same" if a == b else "-")
        yield f"  {name:<26} {a:>10.4g} -> {b:<10.4g} {change}"


def _outputs(store: ResultsStore, before: int, after: int) -> tuple[bool, str]:
    paths: list[Path] = []
    for trial_id in (before, after):
        found = store.artifacts_of(trial_id, "tokens")
        if not found or not found[0].path.is_file():
            return True, f"The tokens of trial {trial_id} were not kept, so outputs are not compared."
        paths.append(found[0].path)
    try:
        compared = compare_tokens(*paths)
    except ResultsError as error:
        return False, str(error)
    if compared.turns_differing == 0:
        return True, f"Outputs are identical, token for token, in {compared.turns_compared:,} turns."
    note = f" {ROUNDS_APART}" if store.trial(before).dtype in SIXTEEN_BITS else ""
    return False, f"Outputs differ in {compared.turns_differing:,} of {compared.turns_compared:,} turns.{note}"
