"""The capacity planner on small maps: what it says, what it runs, and what it finds again."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from hydra import compose
from omegaconf import DictConfig

from pensieve.errors import CapacityError, ConfigError, HardwareMissing
from pensieve.lab.commands import size as planner
from pensieve.lab.commands.size import question_of, read, size
from pensieve.lab.compose.settings import check, resolved
from pensieve.lab.results.frame import Cell
from pensieve.lab.results.size_map import Question, SizeMap, read_map
from pensieve.lab.results.store import open_store
from pensieve.lab.statistics import nearest_rank
from pensieve.lab.trial import sweep as run_module
from pensieve.lab.trial.job import Job, open_tracking
from pensieve.lab.trial.run import run_trial
from tests.composed import SHORT, hydra_session

LOAD = ("model=tiny", "hardware=sim_h100", "workload=chat", *SHORT)
GPU = [f"{size} tokens" for size in (640, 1536, 12288)]
CPU = [f"{size} tokens" for size in (0, 1024, 12288)]


def listed(sizes):
    return f"[{','.join(sizes)}]"


MAP = (f"size.gpu={listed(GPU)}", f"size.cpu={listed(CPU)}", "trial.isolate=false", "tracking.mlflow=false")


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    monkeypatch.setattr("pensieve.lab.commands.size.drawing", lambda *_: nullcontext(list))
    return tmp_path


def composed(*overrides, name="size"):
    with hydra_session():
        cfg = compose(config_name=name, overrides=list(overrides))
    assert isinstance(cfg, DictConfig)
    return cfg


def planned(outputs, *overrides, load=LOAD):
    """Run a map in this process, and read it as figures do."""
    typed = [*load, *MAP, *overrides]
    status = size(composed(*typed), typed, outputs / "cells")
    store = open_store(outputs)
    return status, read_map(store, store.latest_sweep())


def trials(outputs):
    with open_store(outputs).database.reading() as connection:
        return connection.exec_driver_sql("select count(*) from trial where status = 'completed'").scalar()


@pytest.mark.slow
def test_a_cell_is_the_trial_of_the_ordinary_command_and_the_map_says_what_its_rows_say(outputs, capsys):
    asked = ("size.seeds=[3]",)
    status, whole = planned(outputs, *asked)
    first = capsys.readouterr()
    assert status == 0
    traffic, answer, *_ = first.out.splitlines()
    assert traffic.startswith("Load (")
    assert answer.startswith("99% of what 12288 tokens of GPU and 12288 tokens of CPU KV find needs ")
    assert trials(outputs) == len(whole.cells) == len(GPU) * len(CPU)
    planned(outputs, *asked)
    assert trials(outputs) == len(whole.cells), "the same command runs nothing"
    store = open_store(outputs)
    for place, cell in whole.cells.items():
        [one] = cell
        turns = [turn for turn in store.turns_of(one.id) if turn.phase != "warmup" and turn.history_tokens is not None]
        hits = sum(turn.gpu_hit_tokens + turn.cpu_hit_tokens for turn in turns)
        assert whole.mean(place, "found") == pytest.approx(hits / sum(turn.history_tokens for turn in turns))
        assert whole.mean(place, "ttft_ms_p90") == nearest_rank([turn.ttft_ms for turn in turns], 0.9)
        assert one.gpu_tokens == int(GPU[place[0]].split()[0]) and one.cpu_tokens == int(CPU[place[1]].split()[0])
    sizes = (f"cache.gpu={GPU[0]}", f"cache.cpu={CPU[-1]}")
    alone = composed(*LOAD, "seed=3", *sizes, "cache=demo", "tracking.mlflow=false", name="config")
    again = run_trial(Job("", outputs / "x", resolved(alone)), open_tracking(check(alone).tracking))
    assert again.reused, "a cell is the trial that runners/run.py would run"


def test_ctrl_c_keeps_what_is_there(outputs, monkeypatch, capsys):
    begun = []
    real = run_module.run_trial

    def third_is_interrupted(job, tracking):
        begun.append(job.number)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return real(job, tracking)

    monkeypatch.setattr(run_module, "run_trial", third_is_interrupted)
    two = ("size.gpu=[1024 tokens,4096 tokens]", "size.cpu=[0 tokens,4096 tokens]", "size.seeds=[3]")
    with pytest.raises(SystemExit) as left:
        planned(outputs, *two)
    assert left.value.code == 130
    assert "Interrupted after 2 trials" in capsys.readouterr().err
    assert open_store(outputs).latest_sweep().status == "interrupted"
    status, found = planned(outputs, *two)
    assert (status, len(found.cells), len(begun)) == (0, 4, 5), "what was there is not run again"
    assert open_store(outputs).latest_sweep().status == "completed"
    # An objective that nobody meets is an answer too; trials are judged again, and none is run.
    status, found = planned(
        outputs, *two, "slo.ttft_ms=0.001", "size.prices.gpu_gib_hour=1", "size.prices.cpu_gib_hour=0.1"
    )
    assert (status, len(begun)) == (0, 9)
    assert trials(outputs) == 4
    said = capsys.readouterr().out
    assert "No size on this map meets 0.001 ms at p90: the best is" in said
    assert "More memory alone does not do it" in said
    # Prices: of the knee the cheapest, by arithmetic of its own.
    rows = {(r["cache.gpu"], r["cache.cpu"]): r for r in found.rows()}
    for (gpu, cpu), row in rows.items():
        each = found.trial((0, 0)).kv_bytes_per_token / 2**30
        assert row["cost_an_hour"] == pytest.approx(each * (int(gpu.split()[0]) + 0.1 * int(cpu.split()[0])))
    assert found.pick(knee := found.smallest(found.reaches)) == min(
        knee, key=lambda p: rows[found.question.gpu[p[0]], found.question.cpu[p[1]]]["cost_an_hour"]
    )


def test_one_pass_fills_the_map_without_a_trial(outputs, capsys):
    typed = [*LOAD, *MAP, "size.by=reuse", "eviction=lru", "size.seeds=[3,4]"]
    assert (size(composed(*typed), typed, outputs / "cells"), trials(outputs)) == (0, 0)
    store = open_store(outputs)
    found = read_map(store, store.sweep_named("latest"))
    assert "in an open loop" in capsys.readouterr().out
    assert set(found.cells) == set(found.question.places)
    shares = {place: found.mean(place, "found") for place in found.cells}
    assert shares[2, 2] == 1.0 > shares[0, 0]
    assert found.mean((0, 0), "ttft_ms_p90") is None


@pytest.mark.parametrize(
    ("overrides", "error", "part"),
    [
        (["size.by=reuse"], ConfigError, "set eviction=lru"),
        (["size.by=reuse", "eviction=lru", "slo.ttft_ms=9"], ConfigError, "knows no times"),
        (["size.gpu=[4GB,100 tokens]"], ConfigError, "mixes bytes and tokens"),
        (["size.cpu=[0GB,1GB]", "baseline=gpu_only"], ConfigError, "has no CPU tier"),
        (["size.gpu=[4000000GB]"], HardwareMissing, "are there; use"),
        (["size.gpu=[64 tokens]"], CapacityError, "blocks of 32"),
        (["workload.pressure=2"], ConfigError, "asks more of a larger cache"),
        (["baseline=gpu_only"], ConfigError, "has no CPU tier"),
        (["baseline=llama_cpp", "hardware=cpu"], ConfigError, "sizes its cache itself"),
    ],
)
def test_what_cannot_be_mapped_gets_a_sentence(outputs, overrides, error, part):
    with pytest.raises(error) as refused:
        planned(outputs, *overrides)
    assert part in str(refused.value)
    assert trials(outputs) == 0


def test_the_default_sizes_hold_the_longest_conversation_of_every_seed_and_fit_the_machine():
    from pensieve.lab.commands.size import check_question, planned
    from pensieve.lab.compose.build import check_memory
    from pensieve.units import parse_capacity

    for machine, points, *more in (
        ("sim_a100_80g", 12), ("sim_gtx1650", 5),
        ("sim_h100", 12, "model=llama3_1_8b", "hardware.gpus=4", "cache.chunk_tokens=512"),  # blocks are whole on each device
    ):  # fmt: skip
        words = ("model=llama_25m", f"hardware={machine}", f"size.points={points}", "workload.conversations=30", *more)
        settings, load = read(composed(*words))
        question = question_of(settings, load, check(load))
        check_question(load, question)
        sizes = [parse_capacity(size).bytes for size in question.gpu]
        assert sizes == sorted(set(sizes)) and len(sizes) == points
        assert question.cpu[0] == "0GB" and len(question.cpu) == points
        check_memory(planned(load, *question.sizes(question.corner), 0))


# -- in words, of made-up trials ----------------------------------------------------------------------------------------


class Made:
    """A frame of trials that say what they found, and their TTFT."""

    def metrics(self, trials, name):
        told = {(one.seed, 0): {"miss_rate": 1 - one.found, "ttft_ms_p90": one.ttft}.get(name) for one in trials}
        return {key: value for key, value in told.items() if value is not None}


def cell(seeds):
    """found and TTFT by seed."""
    trials = [SimpleNamespace(seed=seed, found=found, ttft=ttft) for seed, (found, ttft) in seeds.items()]
    return Cell("pensieve", {}, trials)


def made(cells, **question):
    """cells: by GPU and CPU size, a pair of what is found and the TTFT for each seed."""
    sizes = {"gpu": ("20GB", "40GB", "80GB"), "cpu": ("0GB", "90GB", "220GB"), "seeds": (0, 1), **question}
    return SizeMap(Question(**sizes), Made(), {place: cell(dict(enumerate(seeds))) for place, seeds in cells.items()})


def test_the_smallest_sizes_are_those_with_less_of_one_tier_and_no_more_of_the_other():
    known = made(
        {
            (0, 0): [(0.2, 900.0)], (1, 1): [(0.66, 480.0), (0.70, 460.0)], (1, 0): [(0.4, 700.0)], (0, 1): [(0.5, 800.0)],
            (2, 2): [(0.68, 300.0), (0.72, 310.0)], (1, 2): [(0.70, 350.0)], (2, 1): [(0.69, 340.0)],
        },
        slo_ttft_ms=500.0,
    )  # fmt: skip
    # (1, 1) finds 0.68 of 0.70 over both seeds, which is below 99 %; (1, 2) is compared by the one seed it has: 0.70 of 0.68.
    assert known.share((1, 1)) == pytest.approx(0.68 / 0.70)
    assert known.share((1, 2)) == pytest.approx(0.70 / 0.68)
    assert (known.smallest(known.reaches), known.smallest(known.meets)) == ([(1, 2), (2, 1)], [(1, 1)])
    # Just below the smallest ones: (0, 2) and (2, 0) too, which have not run.
    assert known.deciding == {(2, 2), (1, 2), (0, 2), (2, 1), (2, 0), (1, 1), (0, 1), (1, 0)}


STEADY, SHAKY, THREE = (410.0, 400.0, 420.0, 390.0, 405.0), (410.0, 400.0, 420.0, 390.0, 800.0), (400.0,) * 3
LARGEST = {(2, 2): [(0.7, 300.0 + seed) for seed in range(5)]}


@pytest.mark.parametrize(
    ("cells", "slo", "said"),
    [
        ({(0, 0): [(0.7, ttft) for ttft in STEADY], **LARGEST}, 500.0, "To meet 500 ms at p90 you need 20 GB of GPU"),
        (  # the mean is 484 ms
            {(0, 0): [(0.7, ttft) for ttft in SHAKY], **LARGEST}, 500.0,
            "To meet 500 ms at p90 you need 80 GB of GPU and 220 GB of CPU KV (TTFT p90 302 ms, 95 % interval up to 304 ms;",
        ),
        (  # three seeds agree by accident
            {(0, 0): [(0.65, ttft) for ttft in THREE], (2, 2): LARGEST[2, 2][:3]}, 500.0,
            "Too few seeds to recommend a size for 500 ms at p90",
        ),
        ({(0, 0): [(0.7, 200.0)], (2, 2): [(0.7, 300.0)]}, 100.0, "No size on this map meets 100 ms at p90"),
        (LARGEST, None, "99% of what 80 GB of GPU and 220 GB of CPU KV find needs 80 GB of GPU"),
    ],
)  # fmt: skip
def test_a_size_is_recommended_only_where_its_whole_interval_meets_the_objective(cells, slo, said):
    known = made(cells, slo_ttft_ms=slo, seeds=(0, 1, 2, 3, 4))
    assert known.sentence().startswith(said)


def test_the_cells_just_below_the_smallest_run_with_every_seed():
    """With the second seed a smaller cell suffices than with the first."""
    sizes = tuple(f"{size}GB" for size in range(12))
    question = Question(gpu=("8GB", "16GB"), cpu=sizes, seeds=(0, 1), knee=0.95)
    # By seed and GPU size, from the sixth CPU size on; of 0.7 the 0.66 are 94.3 %.
    most = {0: (0.66, 0.7), 1: (0.9, 0.9)}
    ran = {}

    def known():
        return SizeMap(question, Made(), {place: cell(seeds) for place, seeds in sorted(ran.items())})

    plan = planner._Planner(None, question, type("C", (), {"force": False}), None, 1, None)
    while tasks := plan._wanted(known()):
        for place, seed in tasks:
            ran.setdefault(place, {})[seed] = (most[seed][place[0]] if place[1] >= 5 else 0.4, 500.0)
    assert (found := known()).smallest(found.reaches) == [(0, 5)], "what all seeds say of every size: 1.56 of 1.6"
    assert all(ran[place].keys() == {0, 1} for place in ((1, 5), (0, 5), (0, 4), (1, 11)))
    assert sum(map(len, ran.values())) < 2 * len(ran), "not every cell runs with every seed"
