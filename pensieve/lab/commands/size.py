"""The capacity planner: a map of cache sizes for a load on a machine, each cell an ordinary trial.

The first seed runs every cell, the other seeds those on which the answer depends (SizeMap.deciding). What to run next follows
from what is known, so the same command goes on where it was stopped, and finds trials that other commands ran.
"""

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table as RichTable

from pensieve.errors import ConfigError
from pensieve.lab.compose.build import check_memory, longest_conversation, make_workload, preflight
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import TrialPlan, auto_gpu_blocks, plan_trial
from pensieve.lab.compose.settings import TrialConfig, check, check_node, resolved
from pensieve.lab.results.environment import git_commit, host
from pensieve.lab.results.identity import code_hash, counts_for_sweep, sweep_key
from pensieve.lab.results.mlflow_runs import copy_sweep
from pensieve.lab.results.size_map import SETTINGS, Place, Prices, Question, SizeMap, read_map
from pensieve.lab.reuse import reuse_of
from pensieve.lab.trial.job import Job, Outcome, Tracking, open_tracking
from pensieve.lab.trial.sweep import brief, drawing, performing, places, print_figures
from pensieve.lab.trial.terminal import INTERRUPTED, command_line, console, ends_interrupted, say
from pensieve.lab.workload.base import WorkloadPlan
from pensieve.units import NONE, ceil_div, duration, grid, parse_capacity, percent, significant

log = logging.getLogger(__name__)

# -- what a map asks: the load, and the sizes and seeds of its cells, as configured or as machine and load suggest ----------

UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))

Size = str | int | float


class SizeSettings(BaseModel):
    """The fields of `size` in conf/size.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu: list[Size] | None = Field(None, min_length=1)
    cpu: list[Size] | None = Field(None, min_length=1)
    points: int = Field(6, ge=1)
    seeds: list[int] = Field([0, 1, 2, 3, 4], min_length=1)
    knee: float = Field(0.99, gt=0.0, le=1.0)
    percentile: Literal["p50", "p90", "p99"] = "p90"
    by: Literal["trials", "reuse"] = "trials"
    prices: Prices = Prices()


def cell_of(load: DictConfig, gpu: Size, cpu: Size, seed: int) -> DictConfig:
    """load: what is asked of every cell, the configuration without the sizes and the seed."""
    cell = load.copy()
    for name, value in {"cache.gpu": gpu, "cache.cpu": cpu, "seed": seed}.items():
        OmegaConf.update(cell, name, value)
    return cell


def planned(load: DictConfig, gpu: Size, cpu: Size, seed: int) -> TrialPlan:
    return plan_trial(check(cell_of(load, gpu, cpu, seed)))


def read(cfg: DictConfig) -> tuple[SizeSettings, DictConfig]:
    base = cfg.copy()
    with open_dict(base):
        given = OmegaConf.to_container(base.pop("size"), resolve=True)
        base.pop("hydra", None)
    settings = check_node(SizeSettings, {"size": given}, "size")
    if base.workload.get("inspect"):
        raise ConfigError("workload.inspect=true runs nothing, so there is no map; use it with runners/run.py.")
    return settings, base


def question_of(settings: SizeSettings, load: DictConfig, config: TrialConfig) -> Question:
    plan = plan_trial(config)
    if config.baseline.engine is not None:
        raise ConfigError(
            f"baseline={config.baseline.name} sizes its cache itself; the map needs a baseline in the engine, such as "
            "baseline=pensieve."
        )
    gpu, cpu = settings.gpu, settings.cpu
    if not config.baseline.cpu_tier:
        if len(cpu or ()) > 1:
            raise ConfigError(
                f"baseline={config.baseline.name} has no CPU tier; leave size.cpu out, or use baseline=pensieve."
            )
        cpu = ["0GB"] if cpu is None else cpu
    if gpu is None or cpu is None:
        loads = [_described(planned(load, config.cache.gpu, config.cache.cpu, seed)) for seed in settings.seeds]
        suggested = default_sizes(plan, loads, settings.points)
        gpu, cpu = suggested[0] if gpu is None else gpu, suggested[1] if cpu is None else cpu
    return Question(
        gpu=_ascending(gpu, "size.gpu"),
        cpu=_ascending(cpu, "size.cpu"),
        seeds=tuple(dict.fromkeys(settings.seeds)),
        **settings.model_dump(include={"knee", "percentile", "prices"}),
        slo_ttft_ms=config.slo.ttft_ms,
        devices=plan.device.count,
    )


def _ascending(sizes: Sequence[Size], field: str) -> tuple[str, ...]:
    """As typed, in order and each once. Bytes and tokens cannot be ordered without a model, so one map has one of them."""
    read = {str(size): parse_capacity(size, field) for size in sizes}
    amounts = {text: one.bytes or one.tokens or 0 for text, one in read.items()}
    if len({read[text].tokens is None for text, amount in amounts.items() if amount}) > 1:
        raise ConfigError(f"{field} mixes bytes and tokens; give all sizes in one of them.")
    return tuple(sorted({amount: text for text, amount in amounts.items()}.values(), key=lambda text: amounts[text]))


def _described(plan: TrialPlan) -> WorkloadPlan:
    return make_workload(plan, build_tokenizer(plan.config.model, plan.model.vocab, plan.device.simulated)).describe()


def default_sizes(plan: TrialPlan, loads: Sequence[WorkloadPlan], points: int) -> tuple[list[Size], list[Size]]:
    """Sizes a device, evenly spread in their logarithms. GPU: from what the longest conversation takes; CPU: from none. Both
    up to what the machine has, and no more than all conversations take together. loads: of each seed. Raises ConfigError and
    HardwareMissing without room."""
    device, count = plan.device, plan.device.count
    block = plan.block_bytes
    slots = int((plan.config.baseline.cache or {}).get("n_slots") or 1)
    longest = max(longest_conversation(one) or plan.model.max_context for one in loads)
    blocks = slots * (ceil_div(longest, plan.chunk_tokens) + 2)
    least = ceil_div(blocks, count) * block  # a device has whole blocks
    room = auto_gpu_blocks(plan, 0) * block / count
    beside = device.cpu_bytes / count
    if device.shared:  # both tiers are in one memory
        room = beside = room / 2
    everything = 1.05 * max(one.working_set_tokens for one in loads) * plan.model.kv_bytes_per_token / count
    most_gpu, most_cpu = min(room, max(everything, least)), min(beside, max(everything, least))
    if least > most_gpu:
        raise ConfigError(
            f"The longest conversation needs {_text(_two_digits(least, math.ceil))} of KV, and {device.label} has room for "
            f"{_text(_two_digits(most_gpu, math.floor))}; use a larger machine, more devices (hardware.gpus) or a smaller "
            "workload.max_turns."
        )
    return _spread(least, most_gpu, points), ["0GB", *_spread(least, most_cpu, points - 1)]


def _spread(low: float, high: float, points: int) -> list[Size]:
    """Sizes of two digits from `low`, rounded up, to `high`, rounded down."""
    least, most = _two_digits(low, math.ceil), _two_digits(high, math.floor)
    between = (_two_digits(value, round) for value in np.geomspace(low, high, points)[1:-1])
    found = sorted({least, *between, most} if points > 1 else {least})
    sizes: list[Size] = [_text(amount) for amount in found if least <= amount <= max(least, most)]
    return sizes[:points]


def _two_digits(amount: float, to_whole: Callable[[float], int]) -> int:
    step = 10.0 ** (math.floor(math.log10(amount)) - 1)
    return round(to_whole(round(amount / step, 6)) * step)


def _text(amount: int) -> str:
    """ "43GB", "4.3GB"."""
    scale, unit = next((one for one in UNITS if amount >= one[0]), UNITS[-1])
    return f"{amount / scale:g}{unit}"


def check_question(load: DictConfig, question: Question) -> None:
    """The smallest sizes must hold the longest conversation of every seed, the largest must fit the machine, and both must be
    asked the same. Raises PensieveError."""
    smallest, largest = question.sizes((0, 0)), question.sizes(question.corner)
    most = planned(load, *largest, question.seeds[0])
    check_memory(most)
    for seed in question.seeds:
        preflight(planned(load, *smallest, seed))
    least = planned(load, *smallest, question.seeds[0])
    asked = [(one.sessions, one.turns, one.working_set_tokens) for one in (_described(least), _described(most))]
    if asked[0] != asked[1]:
        raise ConfigError(
            f"workload={most.config.workload.get('name')} asks more of a larger cache, so that the cells of a map would not "
            "be comparable; set workload.pressure=0, or use workload=sharegpt or workload=trace."
        )


def computed(load: DictConfig, question: Question, config: TrialConfig) -> Question:
    """The question with what one pass says of each cell. Raises ConfigError where a pass does not say what trials would."""
    if config.eviction.get("name") != "lru" or config.baseline.name not in ("pensieve", "gpu_only"):
        raise ConfigError(
            "size.by=reuse counts what least-recently-used tiers find of each conversation's own KV; set eviction=lru and "
            "baseline=pensieve or gpu_only, or size.by=trials."
        )
    if question.slo_ttft_ms is not None or question.prices.given or load.cache.disk:
        raise ConfigError(
            "size.by=reuse knows no times, prices or disk; leave slo.ttft_ms, size.prices and cache.disk out, or set "
            "size.by=trials."
        )
    gpu = [planned(load, size, question.cpu[0], 0).gpu_blocks for size in question.gpu]
    cpu = [planned(load, question.gpu[0], size, 0).cpu_blocks for size in question.cpu]
    shares = []
    for seed in question.seeds:
        plan = planned(load, *question.sizes(question.corner), seed)
        tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, plan.device.simulated)
        reuse = reuse_of(make_workload(plan, tokenizer), plan.chunk_tokens)
        shares.append(tuple(tuple(reuse.found(own + beside) for beside in cpu) for own in gpu))
    return question.model_copy(update={"reuse": tuple(shares)})


# -- the command --------------------------------------------------------------------------------------------------------


def size_command(cfg: DictConfig) -> int:
    """What `pensieve size` does once Hydra has composed the configuration."""
    hydra = HydraConfig.get()
    if hydra.mode is not None and hydra.mode.name == "MULTIRUN":
        sys.exit("A map is a sweep of its own: leave -m out, and give sizes as size.gpu=[4GB,8GB].")
    return size(cfg, list(hydra.overrides.task), Path(hydra.runtime.output_dir))


def size(cfg: DictConfig, typed: Sequence[str], folder: Path) -> int:
    """Run the map of a composed configuration and say what it shows; the exit status. typed: the command's overrides.

    folder: for the files of its trials. Raises PensieveError for what cannot be mapped.
    """
    settings, load = read(cfg)
    first = check(load)
    question = question_of(settings, load, first)
    tracking = open_tracking(first.tracking)
    check_question(load, question)
    if settings.by == "reuse":
        question = computed(load, question, first)
    store = tracking.store
    store.interrupt_dead()
    sweep_id = _open(tracking, load, question, typed, first)
    planner = _Planner(load, question, first, tracking, sweep_id, folder)
    try:
        found = planner.run()
    except KeyboardInterrupt:
        ends_interrupted()
        planner.close("interrupted")
        done = sum(job.trial is not None for job in store.trials_of_sweep(sweep_id))
        say(f"Interrupted after {done} trials, which are kept; the same command goes on from there.")
        sys.exit(INTERRUPTED)
    except Exception:
        planner.close("failed")
        raise
    return planner.report(found)


def _open(tracking: Tracking, load: DictConfig, question: Question, typed: Sequence[str], first: TrialConfig) -> int:
    """The map's row among the sweeps: the same question, load and code find it again; with force=true it is
    another one."""
    plain = resolved(cell_of(load, *question.sizes((0, 0)), question.seeds[0]))
    asked = question.model_dump_json()
    kept = [text for text in typed if counts_for_sweep(text) and not text.startswith(f"{SETTINGS}.")]
    return tracking.store.open_sweep(
        key=sweep_key([*kept, f"code={code_hash(plain)}"], {SETTINGS: asked}, [plain]),
        name=first.experiment_name,
        experiment=next((text.partition("=")[2] for text in kept if text.startswith("experiment=")), None),
        command=command_line(),
        overrides={
            **dict(text.lstrip("+").partition("=")[::2] for text in kept),
            # Not every combination of them runs.
            **{axis: f"choice({','.join(sizes)})" for axis, sizes in question.axes.items()},
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
    load: DictConfig
    question: Question
    config: TrialConfig
    tracking: Tracking
    sweep_id: int
    folder: Path
    done: set[Task] = field(default_factory=set)
    failures: dict[Task, str] = field(default_factory=dict)

    def run(self) -> SizeMap:
        """Rounds of trials, until what is known asks for no other."""
        q = self.question
        axes = "; ".join(f"{axis} = {', '.join(sizes)}" for axis, sizes in q.axes.items())
        shape = " x ".join(str(len(sizes)) for sizes in q.axes.values())
        say(f"Map of {shape} sizes, {len(q.seeds)} seed{'s' * (len(q.seeds) > 1)}: {axes}")
        while tasks := self._wanted(self._map()):
            began = time.monotonic()
            with performing([self._job(task) for task in tasks], self.tracking) as performed:
                for count, (job, outcome) in enumerate(performed, start=1):
                    left_s = (time.monotonic() - began) / count * (len(tasks) - count)
                    self._note(job, outcome, f"[{count} of {len(tasks)} in this round, {duration(left_s)} left]")
        return self._map()

    def _map(self) -> SizeMap:
        return read_map(self.tracking.store, self.tracking.store.sweep(self.sweep_id))

    def _wanted(self, known: SizeMap) -> list[Task]:
        q = self.question

        def lacks(cells: Iterable[Place], seeds: Sequence[int]) -> list[Task]:
            tasks = [(place, seed) for place in sorted(cells) for seed in seeds]
            again = self.config.force
            return [task for task in tasks if task not in self.done and (again or task[1] not in known.seeds(task[0]))]

        return lacks(q.places, q.seeds[:1]) or lacks(known.deciding, q.seeds)

    def _job(self, task: Task) -> Job:
        place, seed = task
        number = self.question.jobs.index(task)
        sizes = zip(self.question.axes.items(), place, strict=True)
        title = ", ".join([*(f"{axis}={at[index]}" for (axis, at), index in sizes), f"seed={seed}"])
        folder = self.folder if self.tracking.kept else self.tracking.outputs
        config = resolved(cell_of(self.load, *self.question.sizes(place), seed))
        return Job(title, folder / str(number), config, self.sweep_id, number, shown=False)

    def _note(self, job: Job, outcome: Outcome, head: str) -> None:
        task = self.question.jobs[job.number]
        self.done.add(task)
        if not outcome.completed:
            self.failures[task] = str(outcome.error)
            what = f"{outcome.status}. {outcome.error}"
        else:
            what = brief(self.tracking.store, outcome.trial_id) + ", found in the database" * outcome.reused
        say(f"{head} {job.title}: {what}")

    def close(self, status: str) -> None:
        """The map ends early."""
        self.tracking.store.interrupt_dead()
        jobs = self.tracking.store.trials_of_sweep(self.sweep_id)
        self.tracking.store.set_sweep(self.sweep_id, status=status, n_expected=len(jobs))

    def report(self, found: SizeMap) -> int:
        status = "failed" if self.failures else "completed"
        self.close(status)
        print(found.load() or "", found.sentence(), sep="\n")
        console().print(map_of(found))
        print(*places(self.tracking), sep="\n", flush=True)
        for sentence in dict.fromkeys(self.failures.values()):
            say(f"Not every cell has run: {sentence}")
        with drawing(self.tracking, self.config.tracking.url_env, self.sweep_id) as figures:
            if self.tracking.mlflow:
                copy_sweep(self.tracking.outputs, self.tracking.store, self.sweep_id)
            print_figures(figures())
        return 1 if self.failures else 0


def map_of(found: SizeMap) -> RichTable:
    """GPU sizes down, CPU sizes across; in each cell what is found, and the time to first token under it."""
    q = found.question

    def cell(place: Place) -> str:
        if place not in found.cells:
            return NONE
        late = found.mean(place, found.objective)
        marks = "*" * found.reaches(place) + "+" * found.meets(place)
        under = "" if q.reuse else f"\n{NONE if late is None else significant(late)}"
        return f"{marks}{percent(found.mean(place, 'found'))}{under}"

    lines = [
        {"GPU \\ CPU": size, **{beside: cell((gpu, cpu)) for cpu, beside in enumerate(q.cpu)}}
        for gpu, size in reversed(list(enumerate(q.gpu)))
    ]
    what = "Share found (%)" + ("" if q.reuse else f", and TTFT {q.percentile} (ms) under it")
    slo = "" if q.slo_ttft_ms is None else f", + meets {q.slo_ttft_ms:g} ms"
    return grid(lines, f"{what}: * reaches {q.knee:.0%} of the most{slo}", fold=True)
