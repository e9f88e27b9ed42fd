"""The task function of runners/run.py: one job, alone or of a sweep."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from pensieve.compose import TrialConfig, check, resolved
from pensieve.compose.explain import explain
from pensieve.errors import PensieveError
from pensieve.trial.inspection import show, wanted
from pensieve.trial.jobs import SweepMembership, current_membership
from pensieve.trial.liveness import end_with
from pensieve.trial.outcome import Outcome
from pensieve.trial.run import run_trial
from pensieve.trial.summary import brief, places, summary
from pensieve.trial.task import Job
from pensieve.trial.terminal import FULL_TRACE, INTERRUPTED, console, leave_quietly, say
from pensieve.trial.tracking import Tracking, open_tracking

log = logging.getLogger(__name__)

RESOLVED_FILE = "config.resolved.yaml"


def run_job(cfg: DictConfig) -> None:
    """Run the trial that Hydra composed. In a sweep a failed trial is recorded and the next one runs."""
    membership = current_membership()
    if membership is not None:
        _of_sweep(cfg, *membership)
        return
    try:
        _single(cfg)
    except BrokenPipeError:
        leave_quietly()
    except (PensieveError, OSError) as error:
        if FULL_TRACE:
            raise
        sys.exit(explain(error))  # raised through Hydra, it would come with lines of Hydra's own


def _single(cfg: DictConfig) -> None:
    config, plain = check(cfg), resolved(cfg)
    if wanted(config):
        show([config])
        return
    tracking = open_tracking(config)
    job = Job(title=f"{config.model.name} {config.baseline.name}", folder=_folder(cfg, tracking.kept, tracking.outputs))
    try:
        outcome = run_trial(config, plain, tracking, job, say)
    except KeyboardInterrupt:
        say("Interrupted; the trial is marked so, and the same command runs it again.")
        sys.exit(INTERRUPTED)
    if not outcome.completed:
        say(str(outcome.error))
        sys.exit(1)
    if outcome.reused:
        say(f"Trial {outcome.trial_id} is this one and is completed; force=true runs it again.")
    console().print(summary(tracking.store, outcome.trial_id))
    for line in places(tracking):
        print(line)


def _of_sweep(cfg: DictConfig, membership: SweepMembership, number: int) -> None:
    if membership.owner is not None:
        end_with(membership.owner)
    config = check(cfg)
    tracking = open_tracking(config, Path(membership.outputs))
    if config.trial.fail_fast and tracking.store.sweep(membership.sweep_id).status == "failed":
        return  # by returning: a job that exits would take the sweep's table with it
    try:
        _record(cfg, config, tracking, membership, number)
    except KeyboardInterrupt:
        tracking.store.set_sweep(membership.sweep_id, status="interrupted")
        say("Interrupted; the trial is marked so, and the same command runs what is missing.")
        sys.exit(INTERRUPTED)


def _record(cfg: DictConfig, config: TrialConfig, tracking: Tracking, membership: SweepMembership, number: int) -> None:
    swept = " ".join(str(text) for text in HydraConfig.get().overrides.task if _key(text) in membership.axes)
    title = f"[{number + 1}/{membership.n_expected}] {swept}"
    try:
        job = Job(
            title=title,
            folder=_folder(cfg, tracking.kept, tracking.outputs / str(number)),
            sweep_id=membership.sweep_id,
            number=number,
            mlflow_run_id=membership.mlflow_run_id,
            preflight=False,
        )
        outcome = run_trial(config, resolved(cfg), tracking, job, say)
    except Exception as error:  # before there was a trial to record it in; the others go on
        log.info("job %s could not begin its trial", number, exc_info=error)
        outcome = Outcome(0, "failed", error=explain(error))
    if outcome.reused:
        say(f"{title}: trial {outcome.trial_id} is this one and is completed (force=true runs it again)")
    elif outcome.completed:
        say(f"{title}: {brief(tracking.store, outcome.trial_id)}")
    else:
        say(f"{title}: failed. {outcome.error}")
        if config.trial.fail_fast:
            tracking.store.set_sweep(membership.sweep_id, status="failed")
            say("trial.fail_fast=true: no further trial of this sweep begins.")


def _key(override: object) -> str:
    return str(override).partition("=")[0].lstrip("+")


def _folder(cfg: DictConfig, kept: bool, otherwise: Path) -> Path:
    """The folder of this job's files; Hydra's own, with the resolved configuration beside Hydra's unresolved one."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    plain = OmegaConf.create(resolved(cfg))
    (folder / RESOLVED_FILE).write_text(OmegaConf.to_yaml(plain), encoding="utf-8")
    return folder if kept else otherwise
