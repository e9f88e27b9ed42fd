"""A machine measured whole: the arithmetic between its cells, and a simulated machine measured and simulated again."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pensieve.errors import ConfigError
from pensieve.lab.compose.build import _measured_before
from pensieve.lab.compose.plan import TrialPlan, awaits_profile, plan_trial
from pensieve.lab.compose.settings import check, resolved
from pensieve.lab.metrics import summarise
from pensieve.lab.trial import machine
from pensieve.lab.trial.job import MEASURED_AT, Job, open_tracking
from pensieve.lab.trial.machine import _grid, host_times, measure_beside, measure_grids, measure_machine
from pensieve.lab.trial.run import run_trial
from pensieve.serve.systems import inline_system
from pensieve.serve.systems.profiling import load_s, profile_of
from pensieve.sim.machine_profile import Grid, MachineProfile, ProfiledCost, read_profile
from pensieve.sim.profile import powers_of_two
from pensieve.sim.worker import SimulatedWorker, VirtualClock, simulated_cost
from tests.composed import composed, replayed

POOL = 2048  # tokens of each tier
TIERS = (f"cache.gpu={POOL} tokens", f"cache.cpu={POOL} tokens")


def test_times_are_linear_between_cells_and_go_on_beyond_them():
    grid = Grid(rows=(2, 4, 8), columns=(0, 32, 64), seconds=((1.0, 2.0, 4.0), (2.0, 4.0, 8.0), (4.0, 8.0)))
    assert (grid.at(2, 0), grid.at(4, 64), grid.at(8, 32)) == (1.0, 8.0, 8.0)
    assert grid.at(2, 48) == 3.0
    assert grid.at(3, 32) == 3.0
    assert grid.at(3, 48) == (3.0 + 6.0) / 2
    assert grid.at(4, 96) == 12.0  # at the last slope
    assert grid.at(8, 64) == 12.0  # a row that ends before
    assert grid.at(16, 32) == 16.0  # twice the work
    assert grid.at(1, 32) == 2.0  # none below the first
    assert grid.covers(4, 64) and grid.covers(3, 33)
    assert not (grid.covers(8, 33) or grid.covers(9, 0) or grid.covers(2, 65))


def test_the_median_of_the_rounds_counts_and_a_spent_budget_ends_the_rows():
    asked: list[tuple[int, int]] = []

    def cell(row: int, column: int) -> float | None:
        asked.append((row, column))
        return None if row + column > 40 else (100.0 if len(asked) == 1 else float(row))

    grid = _grid((2, 16), (0, 32), cell, rounds=3, budget_s=1e9)
    assert grid.seconds == ((2.0, 2.0), (16.0,))
    spent = _grid((2, 16), (0, 32), lambda row, column: 1.0, rounds=3, budget_s=1.5)
    assert spent.seconds == ((1.0, 1.0), (1.0,))
    assert powers_of_two(2, 9) == (2, 4, 8) and powers_of_two(4, 3) == ()


def replies(seconds: dict[int, tuple[float, ...]]) -> Grid:
    """By tokens of the prompt: what the first token and those after it take beyond their iterations."""
    columns = tuple(range(len(next(iter(seconds.values())))))
    return Grid(rows=tuple(seconds), columns=columns, seconds=tuple(seconds.values()))


def measured_of(*overrides: str) -> MachineProfile:
    """A simulated machine, measured through plans as a real one is."""
    plan = plan_trial(check(composed(*TIERS, *overrides)))
    worker = SimulatedWorker(plan.model, plan.hardware, clock := VirtualClock(), plan.chunk_tokens)
    worker.start(plan.gpu_blocks, plan.cpu_blocks)
    size, blocks = plan.chunk_tokens, plan.gpu_blocks
    where = {"model": plan.model.name, "dtype": plan.model.dtype, "machine": plan.hardware.name}
    costs = profile_of(worker, clock, size, POOL, plan.model.max_context, blocks, {**where, "of": str(overrides)}, 512)
    prefill, decode = measure_grids(worker, clock, size, blocks, POOL, 512, 64, rounds=1, budget_s=1e9)
    inward, outward = (load_s(worker, clock, blocks, inward=way) for way in (True, False))
    return MachineProfile(
        costs=costs, prefill=prefill, decode=decode, reply=replies({64: (0.0,)}), block_bytes=plan.block_bytes,
        h2d_block_s=inward, d2h_block_s=outward, overhead_s=0.0, overlaps=True, where=where, measured={},
    )  # fmt: skip


@pytest.fixture(scope="module")
def h100() -> MachineProfile:
    return measured_of()


@pytest.fixture(scope="module")
def plan() -> TrialPlan:
    return plan_trial(check(composed(*TIERS)))


def priced(profile: MachineProfile, plan: TrialPlan) -> ProfiledCost:
    return ProfiledCost(profile, plan.model, replace(plan.hardware, step_overhead_s=0.0), 32)


def test_iterations_that_were_not_measured_take_what_the_machine_takes(h100, plan):
    truth = simulated_cost(plan.model, plan.hardware, 32)
    cost = priced(h100, plan)
    for runs in ([(0, 300)], [(700, 1000)], [(900, 901)] * 23, [(100, 101), (1500, 1501)], [(0, 97)]):
        assert cost.iteration_s(runs, 1) == pytest.approx(truth.iteration_s(runs, len(runs)), rel=0.05)
    mixed = [(900, 901)] * 20 + [(300, 500)]
    assert cost.iteration_s(mixed, 21) == pytest.approx(truth.iteration_s(mixed, 21), rel=0.2)
    alone = cost.iteration_s(mixed[:20], 20), cost.iteration_s(mixed[20:], 1)
    assert max(alone) < cost.iteration_s(mixed, 21) < sum(alone)
    assert not cost.extrapolated()
    cost.iteration_s([(0, 1024)], 1)
    assert cost.extrapolated()["profile"]["iterations"] == 1
    assert cost.iteration_s([], 0) == 0.0
    for blocks in (1, 10):
        for way in (True, False):
            assert cost.transfer_s(blocks, way) == pytest.approx(truth.transfer_s(blocks, way), rel=1e-3)
    assert cost.recompute_s(1024) == h100.costs.recompute_s(1024)  # one number for policy and simulator


def test_what_the_host_takes_of_a_prompt_is_charged_once_a_prompt(h100, plan):
    plain, slow = (
        priced(h100.model_copy(update={"reply": grid}), plan)
        for grid in (replies({64: (0.0,)}), replies({64: (0.25,), 192: (0.75,)}))
    )
    for runs, sampled, more in (
        ([(0, 64)], 1, 0.25),
        ([(0, 512)], 0, 0.0),  # a part of a longer prompt
        ([(512, 600)], 1, 0.25 + 0.5 * 24 / 128),  # its last
        ([(0, 64), (32, 96), (9, 10)], 3, 0.5),
        ([(0, 2), (0, 512)], 2, 1.5),  # beyond what was measured it does not grow
        ([(9, 10), (99, 100)], 2, 0.0),
        ([], 0, 0.0),
    ):
        assert slow.iteration_s(runs, sampled) == pytest.approx(plain.iteration_s(runs, sampled) + more)


def test_the_first_decodes_after_a_prefill_take_longer_with_and_without_windows(h100, plan, tmp_path, monkeypatch):
    settling = h100.model_copy(update={"reply": replies({64: (0.0, 0.5, 0.25), 128: (0.0, 1.0, 0.75)})})
    plain, cost = priced(h100, plan), priced(settling, plan)
    decodes, prefill, longer, longest = [(9, 10)], [(0, 64), (9, 10)], [(0, 96)], [(0, 64), (0, 256)]
    asked = [decodes, prefill, decodes, decodes, decodes, longer, decodes, decodes, longest, decodes, decodes, decodes]
    more = [cost.iteration_s(runs, 1) - plain.iteration_s(runs, 1) for runs in asked]
    assert more == pytest.approx([0.0, 0.0, 0.5, 0.25, 0.0, 0.0, 0.75, 0.5, 0.0, 1.0, 0.75, 0.0])
    file = tmp_path / "machine.json"
    after = replies({32: (0.0, 0.003, 0.002, 0.001), 256: (0.0, 0.009, 0.004, 0.0)})
    settling.model_copy(update={"reply": after}).write(file)
    load = (*TIERS, "workload=rounds", "workload.rounds=2", "workload.pressure=2", "hardware=sim_profile")

    def told() -> list[tuple[str, int, float | None, float | None]]:
        turns = replayed(*load, f"hardware.profile={file}")[0].turns
        return [(turn.session, turn.turn, turn.first_token_s, turn.finished_s) for turn in turns]

    windows = told()
    monkeypatch.setattr(inline_system, "forward_for", lambda *worker: None)
    assert told() == windows


def test_the_time_of_the_host_is_what_neither_grid_knows(h100, plan):
    """On a simulated machine whose iterations are known, less what grids are told to have seen of them."""
    truth = simulated_cost(plan.model, plan.hardware, 32)

    def measured(step_s: float, prompt_s: float):
        lengths, contexts = powers_of_two(32, 512), powers_of_two(32, 1024)
        prefills = tuple((truth.iteration_s([(32, 32 + count)], 1) - prompt_s,) for count in lengths)
        more = tuple(truth.iteration_s([(at, at + 1)], 1) - step_s for at in contexts)
        decode = Grid(rows=(1, 2), columns=contexts, seconds=(more, more))
        iteration_s, reply = host_times(plan, Grid(rows=lengths, columns=(32,), seconds=prefills), decode, POOL)
        assert reply.rows == lengths and len(reply.columns) == 17
        assert all(later == pytest.approx(0.0, abs=2e-6) for row in reply.seconds for later in row[1:])
        return iteration_s, *(row[0] for row in reply.seconds)

    assert measured(0.0, 0.0) == pytest.approx((0.0, *[0.0] * 5), abs=2e-6)
    assert measured(2e-4, 5e-4) == pytest.approx(
        (2e-4, *[3e-4] * 5), abs=2e-6
    )  # an iteration's share is in its own time


@pytest.mark.parametrize("pool", [1024, 32768])
def test_decodes_that_settle_are_measured_as_they_are_simulated(h100, tmp_path, pool):
    """A machine that is simulated by a profile, measured again; in the smaller pool prompts wait for copies."""
    file = tmp_path / "machine.json"
    told = {length: (0.004, 0.003 * place, 0.002, 0.001, 0.0) for place, length in enumerate(powers_of_two(32, 512))}
    h100.model_copy(update={"reply": replies(told), "overlaps": False}).write(file)
    tiers = (f"cache.gpu={pool} tokens", f"cache.cpu={pool} tokens")
    plan = plan_trial(check(composed(*tiers, "hardware=sim_profile", f"hardware.profile={file}")))
    iteration_s, reply = host_times(plan, h100.prefill, h100.decode, pool)
    assert iteration_s == pytest.approx(0.0, abs=1e-6)
    assert reply.rows == tuple(told)
    for row, expected in zip(reply.seconds, told.values(), strict=True):
        waits_s = 0.2e-3 if pool == 1024 else 1e-6
        assert expected[0] - 1e-6 <= row[0] <= expected[0] + waits_s
        assert row[1:] == pytest.approx((*expected[1:], *[0.0] * 12), abs=1e-6)


def test_a_machine_and_its_profile_serve_the_same_trial_alike(h100, tmp_path):
    """The circle: measure a machine, simulate it by its profile, hold both against each other where the cache thrashes."""
    file = tmp_path / "machine.json"
    h100.write(file)
    rounds = ("workload=rounds", "workload.rounds=4", "workload.order=random", "workload.pressure=2")
    there, _ = replayed(*TIERS, *rounds)
    here, system = replayed(*TIERS, *rounds, "hardware=sim_profile", f"hardware.profile={file}")
    ours, theirs = ({(m.name, m.label): m.value for m in summarise(one.measurement)} for one in (here, there))
    for rate in ("gpu_hit_rate", "cpu_hit_rate", "miss_rate"):
        assert ours[rate, ""] == pytest.approx(theirs[rate, ""], abs=0.01)
    assert theirs["cpu_hit_rate", ""] > 0.1 and theirs["miss_rate", ""] > 0.1
    assert ours["throughput_output_tok_s", ""] == pytest.approx(theirs["throughput_output_tok_s", ""], rel=0.05)
    assert ours["ttft_ms_mean", ""] == pytest.approx(theirs["ttft_ms_mean", ""], rel=0.1)
    assert system.settings()["cost"]["kind"] == "machine profile"
    assert system.engine.scheduler.settings.copy_ahead == "paper"
    h100.model_copy(update={"overlaps": False}).write(file)
    _, cpu = replayed(*TIERS, *rounds[:1], "hardware=sim_profile", f"hardware.profile={file}")
    assert cpu.engine.scheduler.settings.copy_ahead == "never", "a CPU makes no copies ahead of time"


def test_a_machine_is_measured_whole_and_at_the_prices_of_a_trial(h100, plan):
    found = measure_machine(plan, 1, 1e9)
    assert (found.decode.rows[0], found.prefill.rows[:2], found.reply.rows[0]) == (1, (2, 4), 32)
    assert found.decode.at(1, 512) == pytest.approx(h100.decode.at(1, 512), rel=1e-6)
    assert found.prefill.at(256, 512) == pytest.approx(h100.prefill.at(256, 512), rel=1e-6)
    assert found.reply.seconds == pytest.approx(np.zeros((len(found.reply.rows), 17)), abs=2e-6)  # all is in the grids
    assert found.where["model"] == plan.model.name and found.measured["rounds"] == 1
    assert "dtype" in found.costs.where and "machine" not in found.costs.where  # the key of a trial's own prices


def test_a_real_trial_measures_the_machine_beside_itself_once_a_process(h100, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    monkeypatch.setattr(machine, "_written", {})
    asked: list[str] = []

    def measured(plan, rounds: int, budget_s: float) -> MachineProfile:
        asked.append(plan.config.trial.measure_machine)
        where = {**h100.where, "dtype": "float32"}
        return h100.model_copy(update={"where": where, "measured": {"at": f"minute {len(asked)}"}})

    monkeypatch.setattr(machine, "measure_machine", measured)

    def planned(hardware: str, repeat: int, *more: str):
        asking = ("experiment=machine/fidelity", f"hardware={hardware}", f"repeat={repeat}")
        return plan_trial(check(composed(*asking, *more)))

    assert awaits_profile(planned("sim_paired", 0).config) and not awaits_profile(planned("cpu", 0).config)
    for pressure in ("workload.pressure=0.5", "workload.pressure=1.0"):
        assert measure_beside(planned("cpu", 0, pressure)) == "minute 1"
        assert measure_beside(planned("sim_paired", 0, pressure)) is None
    first = tmp_path / "profiles" / "beside-tiny-0.json"
    assert asked == [str(first)]
    simulated = planned("sim_paired", 0)
    assert not awaits_profile(simulated.config) and simulated.config.hardware.profile == str(first)
    assert simulated.model.dtype == "float32" and not simulated.hardware.step_overhead_s
    assert awaits_profile(planned("sim_paired", 1).config)  # each repeat has its own
    measure_beside(planned("cpu", 1))
    assert [Path(one).name for one in asked] == ["beside-tiny-0.json", "beside-tiny-1.json"]
    assert measure_beside(plan_trial(check(composed("hardware=cpu", *TIERS)))) is None  # nobody asked
    assert len(asked) == 2
    assert measure_beside(planned("cpu", 1, "cache.gpu=2048 tokens")) == "minute 3"  # another setting, another machine
    for other in ("baseline=gpu_only", "baseline=vllm", "hardware.gpus=2"):
        with pytest.raises(ConfigError, match=r"profile"):
            measure_beside(planned("cpu", 2, other))
    with pytest.raises(ConfigError, match=r"^trial\.measure_machine=/proc/none/x\.json cannot be written"):
        measure_beside(plan_trial(check(composed("hardware=cpu", *TIERS, "trial.measure_machine=/proc/none/x.json"))))


def test_a_real_trial_and_its_simulation_record_the_same_measurement(h100, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_written", {})
    told = {"at": "2026-11-23T02:00:00.000+00:00", "seconds": 1.0, "others_cpu_share": 0.0}
    mine = h100.model_copy(update={"where": {**h100.where, "dtype": "float32"}, "measured": told})
    monkeypatch.setattr(machine, "measure_machine", lambda plan, rounds, budget_s: mine)
    load = (*TIERS, "workload=rounds", "workload.conversations=1", "workload.rounds=1", "workload.warmup_turns=1")
    engines = []
    for hardware in ("cpu", "sim_paired"):
        fields = composed(*load, f"hardware={hardware}", f"trial.measure_machine={tmp_path}/beside.json")
        tracking = open_tracking(check(fields).tracking)
        outcome = run_trial(Job("one", tmp_path, resolved(fields)), tracking)
        assert outcome.completed, outcome.error
        engines.append(tracking.store.trial(outcome.trial_id).engine)
    real, simulated = engines
    assert real[MEASURED_AT] == told["at"] == simulated["cost"]["measured"]["at"]
    assert MEASURED_AT not in simulated


def test_a_profile_of_something_else_or_that_nobody_has_measured_is_refused_in_a_sentence(h100, tmp_path):
    file = tmp_path / "machine.json"
    h100.write(file)
    assert read_profile(str(file)) == h100
    fields = composed("hardware=sim_paired", *TIERS, f"trial.measure_machine={tmp_path}/none.json")
    with pytest.raises(ConfigError, match=r"no .*/none\.json yet: .* Run hardware=local before hardware=sim_paired"):
        run_trial(Job("one", tmp_path, resolved(fields)), open_tracking(check(fields).tracking))

    def planned(*overrides: str) -> None:
        plan_trial(check(composed("hardware=sim_profile", f"hardware.profile={file}", *overrides)))

    planned(*TIERS)
    for other, words in (
        ("model=llama_25m", r"measured with model tiny, and this trial has llama_25m"),
        ("cache.chunk_tokens=16", r"chunk_tokens 32, and this trial has 16"),
        (f"hardware.profile={tmp_path}/absent", r"no profile at .*absent; measure one with python runners/profile\.py"),
        ("hardware.profile=null", r"hardware\.profile"),
    ):
        with pytest.raises(ConfigError, match=words):
            planned(other)
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"is no profile of a machine"):
        planned()


def test_a_real_machine_takes_its_costs_from_the_file_and_a_simulated_one_its_times(h100, tmp_path):
    file = tmp_path / "machine.json"
    h100.model_copy(update={"where": {**h100.where, "dtype": "float32"}}).write(file)
    real = plan_trial(check(composed("hardware=cpu", f"hardware.profile={file}", *TIERS)))
    assert _measured_before(real) == h100.costs
    assert _measured_before(plan_trial(check(composed("hardware=cpu", *TIERS)))) is None
    simulated = plan_trial(check(composed("hardware=sim_profile", f"hardware.profile={file}", *TIERS)))
    assert _measured_before(simulated) is None
    assert simulated.model.dtype == "float32"


def test_the_runners_folder_hides_no_module_of_the_standard_library():
    """`python runners/run.py` puts runners/ first on the path, and cProfile imports profile."""
    runners = Path(__file__).parents[2] / "runners"
    program = "import sys; sys.path[0] = sys.argv[1]; import _verb, profile; assert 'runners' not in profile.__file__"
    subprocess.run([sys.executable, "-c", program, str(runners)], check=True)
    for runner in runners.glob("[a-z]*.py"):
        assert re.findall(r"import \w+", runner.read_text()) == ["import call"], runner.name
