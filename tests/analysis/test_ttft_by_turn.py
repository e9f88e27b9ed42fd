from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence

import pytest
from matplotlib import pyplot as plt

from analysis import style, ttft_by_turn
from pensieve.errors import MissingSeries, ResultsError
from pensieve.results.store import ResultsStore, open_store
from tests.results.trials import MEMORY, add_trial, conversation_turns, open_sweep, trial_fields, turn

FAST = [40.0, 42.0, 44.0]
SLOW = [40.0, 80.0, 150.0]


@pytest.fixture
def store() -> ResultsStore:
    return ResultsStore(MEMORY)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict[str, object]]]:
    """What was drawn, taken from the axes just before they are saved: label -> points and colour."""
    drawn: dict[str, dict[str, object]] = {}
    save = style.save

    def spy(figure, stem):
        for line in figure.axes[0].get_lines():
            drawn[line.get_label()] = {
                "y": list(line.get_ydata()),
                "x": list(line.get_xdata()),
                "colour": line.get_color(),
            }
        drawn["texts"] = {"all": [text.get_text() for text in (*figure.texts, *figure.axes[0].texts)]}
        drawn["axes"] = {"x": figure.axes[0].get_xlabel(), "y": figure.axes[0].get_ylabel()}
        return save(figure, stem)

    monkeypatch.setattr(style, "save", spy)
    yield drawn
    plt.close("all")


def sweep_of(store: ResultsStore, ttft: dict[str, Sequence[float]], seeds: int = 2, **changed: object) -> int:
    sweep = open_sweep(store, seed="0,1", baseline=",".join(ttft))
    for seed in range(seeds):
        for index, (baseline, medians) in enumerate(ttft.items()):
            job = seed * len(ttft) + index
            add_trial(store, sweep, job, baseline, conversation_turns(medians), seed=seed, **changed)
    return sweep


def test_a_line_is_the_median_over_seeds_and_conversations_without_warmup(store, lines, tmp_path):
    sweep, [panel] = ttft_by_turn.read(store, sweep_of(store, {"pensieve": FAST, "stateless": SLOW}))
    ttft_by_turn.draw(panel, sweep, tmp_path)
    assert lines["pensieve"]["x"] == [1, 2, 3]
    assert lines["pensieve"]["y"] == pytest.approx([1.1 * ms for ms in FAST])  # conversations at 1.0, 1.1 and 1.2 times
    assert lines["stateless"]["y"] == pytest.approx([1.1 * ms for ms in SLOW])
    assert lines["axes"] == {"x": "turn of the conversation", "y": "time to first token (ms)"}


def test_swapping_two_baselines_in_the_database_swaps_the_drawn_data(lines, tmp_path):
    def drawn(ttft):
        store = ResultsStore(MEMORY)
        sweep, [panel] = ttft_by_turn.read(store, sweep_of(store, ttft))
        ttft_by_turn.draw(panel, sweep, tmp_path)
        return {name: (lines[name]["y"], lines[name]["colour"]) for name in ("pensieve", "gpu_only", "stateless")}

    straight = drawn({"pensieve": FAST, "gpu_only": SLOW, "stateless": SLOW})
    swapped = drawn({"pensieve": SLOW, "gpu_only": FAST, "stateless": SLOW})
    assert swapped["gpu_only"][0] == straight["pensieve"][0]
    assert swapped["pensieve"][0] == straight["gpu_only"][0]
    assert swapped["stateless"] == straight["stateless"]
    for name in straight:
        assert swapped[name][1] == straight[name][1] == style.colour(name)


def test_names_stand_beside_their_lines_and_the_footnote_says_what_ran(store, lines, tmp_path):
    sweep, [panel] = ttft_by_turn.read(store, sweep_of(store, {"pensieve": FAST, "stateless": SLOW}, device="cpu"))
    ttft_by_turn.draw(panel, sweep, tmp_path)
    texts = lines["texts"]["all"]
    assert {"pensieve", "stateless", "Time to first token by turn"} <= set(texts)
    note = " ".join(" ".join(texts).split())
    for part in ("n = 6 conversations a point, 2 seeds", "random weights", "measured on cpu, float32", "trials 1-4"):
        assert part in note


def test_simulated_trials_are_called_so(store):
    sweep, [panel] = ttft_by_turn.read(store, sweep_of(store, {"pensieve": FAST}, simulated=True, device="sim_h100"))
    assert "SIMULATED by a cost model of sim_h100" in ttft_by_turn.footnote(panel, sweep)


def test_files_land_in_the_outputs_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    sweep_of(open_store(tmp_path), {"pensieve": FAST, "stateless": SLOW})
    assert ttft_by_turn.main([]) == 0
    figures = tmp_path / "figures"
    paths = [figures / f"ttft_by_turn{suffix}" for suffix in (".png", ".pdf", ".csv")]
    assert capsys.readouterr().out.split() == [str(path) for path in paths]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert paths[1].read_bytes().startswith(b"%PDF")
    with paths[2].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["baseline"], row["turn"]) for row in rows[:3]] == [
        ("pensieve", "1"),
        ("pensieve", "2"),
        ("pensieve", "3"),
    ]
    last = rows[-1]
    assert float(last["ttft_ms_median"]) == pytest.approx(165.0)
    assert float(last["ci_low"]) <= 165.0 <= float(last["ci_high"])
    assert (last["n"], last["n_seeds"], last["trials"]) == ("6", "2", "2 4")


def test_only_the_current_trials_of_the_chosen_sweep_are_drawn(store):
    first = sweep_of(store, {"pensieve": FAST})
    other = store.open_sweep("another", "chat", "pensieve", "run.py -m", {}, 1, "host", None)
    add_trial(store, other, 0, "pensieve", conversation_turns(SLOW), seed=5)
    _, [latest] = ttft_by_turn.read(store, None)
    _, [chosen] = ttft_by_turn.read(store, first)
    assert latest.series[0].turns[3].value == pytest.approx(165.0)
    assert chosen.series[0].turns[3].value == pytest.approx(48.4)


def test_a_swept_field_gets_a_figure_for_each_value(store, tmp_path):
    sweep_id = open_sweep(store, seed="0", baseline="pensieve,stateless")
    job = 0
    for pressure, slow in ((1.0, FAST), (4.0, SLOW)):
        for baseline in ("pensieve", "stateless"):
            config = {"workload": {"name": "chat", "pressure": pressure}, "baseline": {"name": baseline}, "seed": 0}
            add_trial(store, sweep_id, job, baseline, conversation_turns(slow), config=config)
            job += 1
    sweep, panels = ttft_by_turn.read(store, sweep_id)
    assert [dict(panel.group) for panel in panels] == [{"workload.pressure": "1.0"}, {"workload.pressure": "4.0"}]
    assert [panel.series[1].turns[3].value for panel in panels] == pytest.approx([48.4, 165.0])
    names = {path.name for panel in panels for path in ttft_by_turn.draw(panel, sweep, tmp_path)}
    assert "ttft_by_turn-workload.pressure-4.0.png" in names
    assert len(names) == 6


def test_a_missing_series_names_the_command_that_makes_it(store):
    with pytest.raises(MissingSeries, match=r"run `python runners/run.py -m`"):
        ttft_by_turn.read(store, None)
    sweep = sweep_of(store, {"pensieve": FAST})
    with pytest.raises(MissingSeries, match=r"baseline vllm; run `python runners/run.py baseline=vllm -m`"):
        ttft_by_turn.read(store, sweep, ["pensieve", "vllm"])


def test_a_baseline_whose_trials_failed_is_missing_not_left_out(store):
    sweep = sweep_of(store, {"pensieve": FAST})
    failed = store.begin_trial(trial_fields("x", baseline="stateless"))
    store.link(sweep, failed, 9, reused=False)
    store.finish_trial(failed, "failed", error="No memory.")
    with pytest.raises(MissingSeries, match=r"no completed trial of baseline stateless; run `run.py -m`"):
        ttft_by_turn.read(store, sweep)


def test_turns_that_did_not_complete_are_not_drawn_as_if_they_had(store):
    sweep_id = open_sweep(store)
    turns = [turn("a", 1, 10.0), turn("b", 1, 9000.0, status="timeout"), turn("c", 1, 12.0)]
    add_trial(store, sweep_id, 0, "pensieve", turns)
    _, [panel] = ttft_by_turn.read(store, sweep_id)
    assert (panel.series[0].turns[1].value, panel.series[0].turns[1].n) == (10.0, 2)


def test_contended_trials_are_refused(store):
    sweep = sweep_of(store, {"pensieve": FAST}, contended=True)
    with pytest.raises(ResultsError, match="shared their device"):
        ttft_by_turn.read(store, sweep)


def test_no_database_is_one_sentence_and_an_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path / "nothing"))
    assert ttft_by_turn.main([]) == 1
    error = capsys.readouterr().err.strip()
    assert "run.py -m" in error
    assert "\n" not in error
