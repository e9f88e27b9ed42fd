"""The capacity planner: a map of cache sizes for a load on a machine, each cell an ordinary trial, run where it matters.

The first seed runs a coarse grid and then the cells around the knee and the objective's border (refine.py); the other
seeds run the cells on which the answer depends (SizeMap.deciding). What to run next follows from what is known, so the same
command goes on where it was stopped, and finds trials that other commands ran.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import DictConfig
from rich import box
from rich.table import Table

from pensieve.lab.commands.size.parallel import performing
from pensieve.lab.commands.size.question import Load, SizeSettings, check_question, question_of, read
from pensieve.lab.commands.size.refine import Answers, lacking
from pensieve.lab.compose import TrialConfig, check, resolved
from pensieve.lab.results.digest import code_hash
from pensieve.lab.results.environment import git_commit, host
from pensieve.lab.results.identity import counts_for_sweep, sweep_key
from pensieve.lab.results.prices import Worth, prefill_seconds
from pensieve.lab.results.size_map import SETTINGS, SHOWN, Place, Question, SizeMap, milliseconds, read_map
from pensieve.lab.statistics import Estimate
from pensieve.lab.trial.job import Asked, Job, Outcome
from pensieve.lab.trial.summary import places
from pensieve.lab.trial.sweep import copy_sweep, draw_figures, figure_lines
from pensieve.lab.trial.terminal import (
    INTERRUPTED,
    close_at_exit,
    command_line,
    console,
    ends_interrupted,
    say,
    sweep_is_closed,
)
from pensieve.lab.trial.tracking import Tracking, open_tracking
from pensieve.serve.books.holding import TIERS


def size(cfg: DictConfig, typed: Sequence[str], folder: Path) -> int:
    """Run the map of a composed configuration and say what it shows; the exit status. typed: the command's overrides.

    folder: for the files of its trials. Raises PensieveError for what cannot be mapped.
    """
    settings, load = read(cfg)
    first = check(load.cfg)
    question = question_of(settings, load, first)
    tracking = open_tracking(first)
    check_question(load, question)
    store = tracking.store
    store.interrupt_dead()
    sweep_id = _open(tracking, load, question, typed, first)
    planner = _Planner(load, question, settings, first, tracking, sweep_id, folder)
    close_at_exit(planner.close)
    try:
        found = planner.run()
    except KeyboardInterrupt:
        ends_interrupted()
        planner.close("interrupted")
        done = sum(job.trial is not None for job in store.trials_of_sweep(sweep_id))
        say(f"Interrupted after {done} trials, which are kept; the same command goes on from there.")
        sys.exit(INTERRUPTED)
    sweep_is_closed()
    return planner.report(found)


def _open(tracking: Tracking, load: Load, question: Question, typed: Sequence[str], first: TrialConfig) -> int:
    """The map's row among the sweeps: the same question, load and code find it again; with force=true it is
    another one, until that one is complete."""
    plain = resolved(load.of(question.gpu[0], question.cpu[0], question.disk[0], question.seeds[0]))
    asked = question.model_dump_json()
    kept = [text for text in typed if counts_for_sweep(text) and not text.startswith(f"{SETTINGS}.")]
    return tracking.store.open_sweep(
        key=sweep_key([*kept, f"code={code_hash(plain)}"], {SETTINGS: asked}, [plain]),
        name=first.experiment_name,
        experiment=next((text.partition("=")[2] for text in kept if text.startswith("experiment=")), None),
        command=command_line(),
        overrides={
            **dict(text.lstrip("+").partition("=")[::2] for text in kept),
            "cache.gpu": f"choice({','.join(question.gpu)})",  # not every combination of them runs
            "cache.cpu": f"choice({','.join(question.cpu)})",
            **({"cache.disk": f"choice({','.join(size or '0' for size in question.disk)})"} if question.disks else {}),
            SETTINGS: asked,
        },
        n_expected=0,
        host=host(),
        git_commit=git_commit(),
        anew=first.force,
    )


# -- the trials ---------------------------------------------------------------------------------------------------------

Task = tuple[Place, int]  # a cell and a seed


@dataclass
class _Planner:
    load: Load
    question: Question
    settings: SizeSettings
    config: TrialConfig
    tracking: Tracking
    sweep_id: int
    folder: Path
    done: set[Task] = field(default_factory=set)
    failures: dict[Task, str] = field(default_factory=dict)
    round_began: float = field(default_factory=time.monotonic)
    in_round: int = 0

    def run(self) -> SizeMap:
        """Rounds of trials, until what is known asks for no other."""
        say(self._announcement())
        with performing(replace(self.tracking, mlflow=False), self._processes()) as perform:
            while tasks := self._wanted(self._map()):
                for asked, outcome in perform([self._asked(task) for task in tasks]):
                    self._note(self.question.where(asked.job.number), outcome, len(tasks))
                    if self.failures and self.config.trial.fail_fast:
                        return self._map()
        return self._map()

    def _map(self) -> SizeMap:
        return read_map(self.tracking.store, self.tracking.store.sweep(self.sweep_id))

    def _wanted(self, known: SizeMap) -> list[Task]:
        q = self.question

        def answers(place: Place) -> Answers | None:
            if place not in known.cells or q.seeds[0] not in known.cells[place].trials:
                return None
            return known.reaches(place), known.meets(place)

        if not self.settings.refine:
            return self._open_tasks(known, q.places, q.seeds)
        failed = {place for place, seed in self.failures if seed == q.seeds[0]}
        first = self._open_tasks(known, lacking(q.shape, answers, failed, q.mode), q.seeds[:1])
        if first or len(q.seeds) == 1:  # what follows from the only seed needs no trial of it
            return first
        return self._open_tasks(known, known.deciding, q.seeds)

    def _open_tasks(self, known: SizeMap, cells: Iterable[Place], seeds: Sequence[int]) -> list[Task]:
        tasks = [(place, seed) for place in sorted(cells) for seed in seeds]
        return [task for task in tasks if task not in self.done and not self._known(known, task)]

    def _known(self, known: SizeMap, task: Task) -> bool:
        place, seed = task
        return not self.config.force and place in known.cells and seed in known.cells[place].trials

    def _asked(self, task: Task) -> Asked:
        place, seed = task
        number = self.question.job(place, seed)
        folder = self.folder if self.tracking.kept else self.tracking.outputs
        job = Job(self._title(task), folder / str(number), self.sweep_id, number, preflight=False, progress="nothing")
        return Asked(resolved(self.load.of(*self.question.sizes(place), seed)), job)

    def _processes(self) -> int:
        if not self.config.hardware.simulated:
            return 1  # real trials wait for their device
        return self.settings.processes or len(os.sched_getaffinity(0))

    # -- what is said ---------------------------------------------------------------------------------------------------

    def _announcement(self) -> str:
        q = self.question
        seeds = f"{len(q.seeds)} seed{'s' * (len(q.seeds) > 1)}"
        sizes = f"cache.gpu = {', '.join(q.gpu)}; cache.cpu = {', '.join(q.cpu)}"
        sizes += f"; cache.disk = {', '.join(size or '0' for size in q.disk)}" if q.disks else ""
        return f"Map of {' x '.join(map(str, q.shape))} sizes, {seeds}: {sizes}"

    def _title(self, task: Task) -> str:
        place, seed = task
        gpu, cpu, disk = self.question.sizes(place)
        beside = f", disk {disk or '0'}" if self.question.disks else ""
        return f"GPU {gpu}, CPU {cpu}{beside}, seed {seed}"

    def _note(self, task: Task, outcome: Outcome, round_size: int) -> None:
        """A line a trial; how many there will be is known for one round at a time."""
        self.done.add(task)
        self.in_round = self.in_round % round_size + 1
        left = (time.monotonic() - self.round_began) / self.in_round * (round_size - self.in_round)
        head = f"[{len(self.done)}; round: {self.in_round} of {round_size}, {left:.0f} s left] {self._title(task)}"
        if self.in_round == round_size:
            self.round_began = time.monotonic()
        if not outcome.completed:
            self.failures[task] = str(outcome.error)
            say(f"{head}: {outcome.status}. {outcome.error}")
            return
        q = self.question
        values = {m.name: m.value for m in self.tracking.store.metrics_of(outcome.trial_id) if not m.label}
        missed, ttft = values.get("miss_rate"), values.get(f"ttft_ms_{q.percentile}")
        found = values.get("prompt_hit_rate") if q.of == "prompt" else None if missed is None else 1 - missed
        parts = [
            *([] if found is None else [f"{100 * found:.1f} % of {q.kind} found"]),
            *([] if ttft is None else [f"TTFT {q.percentile} {milliseconds(ttft)}"]),
            *(["found in the database"] if outcome.reused else []),
        ]
        say(f"{head}: {', '.join(parts)}")

    def close(self, status: str) -> None:
        """The map ends early."""
        self.tracking.store.interrupt_dead()
        jobs = self.tracking.store.trials_of_sweep(self.sweep_id)
        self.tracking.store.set_sweep(self.sweep_id, status=status, n_expected=len(jobs))

    def report(self, found: SizeMap) -> int:
        status = "failed" if self.failures else "completed"
        self.close(status)
        print(found.load() or "", " ".join(filter(None, (found.sentence(), found.inferred))), sep="\n")
        console().print(*tables_of(found), sep="\n")
        print(*places(self.tracking), sep="\n", flush=True)
        for sentence in dict.fromkeys(self.failures.values()):
            say(f"Not every cell has run: {sentence}")
        if self.tracking.kept:
            for line in figure_lines(draw_figures(self.tracking, self.config.tracking.url_env, self.sweep_id)):
                print(line, flush=True)
        copy_sweep(self.tracking, self.sweep_id, self.config.experiment_name, status)
        return 1 if self.failures else 0


# -- tables -------------------------------------------------------------------------------------------------------------


def tables_of(found: SizeMap) -> list[Table]:
    kept = _keeping_table(found)
    maps = [_map_table(found, beside) for beside in found.question.planes]
    return [*maps, _cpu_table(found), _answers_table(found), *([] if kept is None else [kept])]


def _map_table(found: SizeMap, beside: Place) -> Table:
    """GPU sizes down, CPU sizes across; in each cell what is found, and the time to first token under it. beside: of these
    cells the index of their disk, where there are several."""
    q = found.question
    shown, late = found.interpolated("found"), found.interpolated(found.objective)
    title = f"Share found (%), and TTFT {q.percentile} (ms) under it: * reaches {q.knee:.0%} of the most"
    title += f", + meets {q.slo_ttft_ms:g} ms" if q.slo_ttft_ms is not None else ""
    title += ", ~ interpolated" if shown or late else ""
    title += f"; cache.disk = {q.disk[beside[0]] or '0'}" if beside else ""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0))
    table.add_column("GPU \\ CPU", no_wrap=True)
    for size_text in q.cpu:
        table.add_column(size_text, justify="right", no_wrap=True)
    for gpu in range(len(q.gpu) - 1, -1, -1):
        cells = []
        for cpu in range(len(q.cpu)):
            place = (gpu, cpu, *beside)
            if place in found.cells:
                marks = "*" * found.reaches(place) + "+" * found.meets(place)
                share, ttft, sure = found.mean(place, "found"), found.mean(place, found.objective), ""
            else:
                marks, share, ttft, sure = "", shown.get(place), late.get(place), "~"
            above = "–" if share is None else f"{100 * share:.3g}"
            below = "–" if ttft is None else milliseconds(ttft).removesuffix(" ms")
            cells.append(f"{marks}{sure}{above}\n{sure}{below}")
        table.add_row(q.gpu[gpu], *cells)
    return table


def _cpu_table(found: SizeMap) -> Table:
    """A row for each GPU size: the CPU size that suffices beside it (and beside the largest disk, where there are several).
    What suffices with less GPU memory does so with more."""
    q = found.question
    title = "CPU memory needed beside each GPU size" + (f"; cache.disk = {q.disk[-1]}" if q.disks else "")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    fronts = {f"{q.knee:.0%} of what the largest find": found.smallest(found.reaches, q.planes[-1])}
    if q.slo_ttft_ms is not None:
        fronts[f"TTFT {q.percentile} within {q.slo_ttft_ms:g} ms"] = found.smallest(found.meets, q.planes[-1])
    for name in ("GPU", *fronts):
        table.add_column(name, justify="right")
    for gpu, size in enumerate(q.gpu):
        least = [min((place[1] for place in front if place[0] <= gpu), default=None) for front in fronts.values()]
        table.add_row(size, *("none on the map" if cpu is None else q.cpu[cpu] for cpu in least))
    return table


def _answers_table(found: SizeMap) -> Table:
    """The smallest sizes that suffice, and the largest, with everything that is told of a cell."""
    q = found.question
    rows = [("knee", place) for place in found.knee]
    rows += [(f"{q.slo_ttft_ms:g} ms", place) for place in found.meeting]
    rows.append(("largest", q.corner))
    table = Table(
        title="The smallest sizes that suffice", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    sizes = ("GPU", "CPU", "disk") if q.disks else ("GPU", "CPU")
    for name in ("", *sizes, "found", "bound", "TTFT p50", "TTFT p90", "tokens/s", "recomputed", "seeds"):
        table.add_column(name, justify="right" if name else "left")
    if q.prices.given:
        table.add_column("an hour", justify="right")
    for why, place in rows:
        if place not in found.cells:
            continue
        values = {name: found.estimate(place, name) for name in SHOWN}
        cost = found.an_hour(place)
        table.add_row(
            why, *(size or "0" for size in q.sizes(place)[: len(sizes)]),
            _with_interval(values["found"], 100, "%"), _with_interval(values["bound"], 100, "%", short=True),
            _with_interval(values["ttft_ms_p50"], 1, " ms", short=True), _with_interval(values["ttft_ms_p90"], 1, " ms"),
            _with_interval(values["throughput_output_tok_s"], 1, "", short=True),
            _with_interval(values["recomputed_s"], 1, " s", short=True), str(len(found.cells[place].trials)),
            *([] if cost is None else [f"{cost:.4g}"]),
        )  # fmt: skip
    return table


def _keeping_table(found: SizeMap) -> Table | None:
    """Of the sizes that the sentence names: what keeping took and saved by tier, by the ledger of their first seed, and how
    long KV may be idle before keeping it costs what computing it again would. None: nothing was kept, or has a price."""
    place = found.answer
    cell = None if place is None else found.cells.get(place)
    trial = None if cell is None else cell.one.trial
    worth = None if trial is None else Worth.of(trial, found.question.prices)
    if cell is None or place is None or worth is None:
        return None
    prefill = list(prefill_seconds(cell.one.metrics).items())
    shown = [prefill[at] for at in sorted({0, len(prefill) // 2, len(prefill) - 1})] if prefill else []
    table = Table(
        title=f"Is keeping worth it, with {found.name(place)}: paid back is the price of GPU time saved over that of memory",
        title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for head in ("tier", "idle GiB·s", "prefill saved", "paid back", *(f"even at {n:,} tokens" for n, _ in shown)):
        table.add_column(head, justify="left" if head == "tier" else "right")
    for tier in TIERS:
        idle, saved = cell.one.value("held_idle_gib_s", tier), cell.one.value("saved_s", tier)
        if not idle or saved is None or worth.gib(tier) is None:
            continue
        even = [worth.break_even_s(tokens, seconds, tier) for tokens, seconds in shown]
        paid = worth.paid_back(saved, idle, tier)
        table.add_row(
            tier, f"{idle:,.4g}", f"{saved:,.3g} s", "–" if paid is None else f"{paid:.3g}x",
            *("–" if seconds is None else f"{seconds:,.3g} s" for seconds in even),
        )  # fmt: skip
    return table if table.row_count else None


def _with_interval(found: Estimate | None, scale: float, unit: str, short: bool = False) -> str:
    if found is None:
        return "–"
    text = f"{found.value * scale:,.0f}" if found.value * scale >= 100 else f"{found.value * scale:.3g}"
    if short or found.ci_low is None or found.ci_high is None:
        return f"{text}{unit}"
    return f"{text}{unit} [{found.ci_low * scale:,.3g}, {found.ci_high * scale:,.3g}]"
