from __future__ import annotations

import csv
import json

import pytest

from analysis import conversations, figures, style
from analysis.conversations import ttft_by_turn
from analysis.sweep import open_source
from pensieve.errors import MissingSeries
from pensieve.lab.results.store import ResultsStore, open_store
from tests.analysis.sweeps import answered, fill
from tests.results.trials import MEMORY, conversation_turns, trial_fields, turn

FAST = (40.0, 42.0, 44.0)
SLOW = (40.0, 80.0, 150.0)
SUFFIXES = (".png", ".pdf", ".txt", ".csv", ".json")


def chat(store, ttft, **columns):
    return fill(
        store,
        {"baseline": list(ttft)},
        lambda at, seed: conversation_turns(ttft[at["baseline"]]),
        summary=True,
        **columns,
    )


def ys(drawn, baseline, stem="ttft_by_turn"):
    return [y for _, y in drawn[stem].lines[baseline]]


def test_a_line_is_the_median_over_seeds_and_conversations_without_warmup(store, drawn, tmp_path):
    ttft_by_turn.draw(chat(store, {"pensieve": FAST, "stateless": SLOW}), tmp_path)
    lines = drawn["ttft_by_turn"].lines
    assert [x for x, _ in lines["pensieve"]] == [1, 2, 3]
    assert ys(drawn, "pensieve") == pytest.approx([1.1 * ms for ms in FAST])  # conversations at 1.0, 1.1 and 1.2 times
    assert ys(drawn, "stateless") == pytest.approx([1.1 * ms for ms in SLOW])
    assert {"turn of the conversation", "time to first token (ms)"} <= set(drawn["ttft_by_turn"].texts)


def test_swapping_two_baselines_in_the_database_swaps_the_drawn_data(drawn, tmp_path):
    def picture(ttft):
        ttft_by_turn.draw(chat(ResultsStore(MEMORY), ttft), tmp_path)
        return drawn["ttft_by_turn"]

    straight = picture({"pensieve": FAST, "gpu_only": SLOW, "stateless": SLOW})
    swapped = picture({"pensieve": SLOW, "gpu_only": FAST, "stateless": SLOW})
    assert swapped.lines["gpu_only"] == straight.lines["pensieve"] != straight.lines["gpu_only"]
    assert swapped.lines["pensieve"] == straight.lines["gpu_only"]
    assert swapped.lines["stateless"] == straight.lines["stateless"]
    for name in straight.lines:
        assert swapped.colours[name] == straight.colours[name] == style.colour(name).upper()


def test_the_ideal_is_the_fastest_turn_of_as_many_new_tokens_that_had_nothing_to_restore(store, drawn, tmp_path):
    turns = {
        "pensieve": [
            answered("a", 1, 30.0, queue_ms=5.0, new=10),
            answered("a", 2, 28.0, queue_ms=4.0, new=20, history=50, gpu=50),
        ],
        "stateless": [answered("a", 1, 31.0, queue_ms=1.0, new=10), answered("a", 2, 20.0, new=20, history=50)],
    }
    source = fill(store, {"baseline": list(turns)}, lambda at, seed: turns[at["baseline"]], seeds=[0], summary=True)
    [drawing] = ttft_by_turn.draw(source, tmp_path)
    # Turn 1: pensieve's second turn had more tokens and took 24 ms from its admission on. The 20 ms of stateless do not
    # count: that turn recomputed its history.
    assert drawn["ttft_by_turn"].lines["ideal"] == [(1, 24.0), (2, 24.0)]
    assert "ideal" in drawn["ttft_by_turn"].texts
    with drawing.csv.open(newline="") as file:
        assert [row["ttft_ms_median"] for row in csv.DictReader(file) if row["baseline"] == "ideal"] == ["24.0", "24.0"]


def test_without_token_counts_there_is_no_ideal(store, drawn, tmp_path):
    ttft_by_turn.draw(chat(store, {"pensieve": FAST}), tmp_path)
    assert list(drawn["ttft_by_turn"].lines) == ["pensieve"]


def test_names_stand_beside_their_lines_and_the_footnote_says_what_ran(store, drawn, tmp_path):
    ttft_by_turn.draw(chat(store, {"pensieve": FAST, "stateless": SLOW}, device="cpu"), tmp_path)
    texts = drawn["ttft_by_turn"].texts
    assert {"pensieve", "stateless", "Time to first token by turn"} <= set(texts)
    note = drawn["ttft_by_turn"].caption
    assert note.startswith("Time to first token by turn. Median")
    for part in (
        "n = 6 conversations, 2 seeds",
        "random weights",
        "measured on cpu, float32",
        "load closed",
        "cache cold at the start",
        "code d",
        "sweep 1, trials 1-4",
    ):
        assert part in note


def test_files_land_in_the_outputs_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    chat(open_store(tmp_path), {"pensieve": FAST, "stateless": SLOW}, seeds=range(5))
    assert figures.main(["ttft_by_turn"]) == 0
    paths = [tmp_path / "figures" / "sweep-1" / f"ttft_by_turn{suffix}" for suffix in SUFFIXES]
    assert capsys.readouterr().out.split() == [str(path) for path in paths]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert paths[1].read_bytes().startswith(b"%PDF")
    with paths[3].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["baseline"], row["turn"]) for row in rows[:3]] == [("pensieve", str(number)) for number in (1, 2, 3)]
    last = rows[-1]
    assert float(last["ttft_ms_median"]) == pytest.approx(165.0)
    assert float(last["ci_low"]) <= 165.0 <= float(last["ci_high"])
    assert (last["n"], last["n_seeds"], last["trials"]) == ("15", "5", "2 4 6 8 10")
    assert json.loads(paths[4].read_text())["trials"] == list(range(1, 11))


def test_a_swept_field_gets_a_figure_for_each_value(store, drawn, tmp_path):
    axes = {"workload.pressure": ["1.0", "4.0"], "baseline": ["pensieve", "stateless"]}
    ttft = {"1.0": FAST, "4.0": SLOW}
    source = fill(store, axes, lambda at, seed: conversation_turns(ttft[at["workload.pressure"]]), seeds=[0])
    ttft_by_turn.draw(source, tmp_path)
    assert list(drawn) == ["ttft_by_turn-workload.pressure-1.0", "ttft_by_turn-workload.pressure-4.0"]
    assert [ys(drawn, "stateless", stem)[-1] for stem in drawn] == pytest.approx([48.4, 165.0])


def test_a_baseline_without_a_measured_turn_is_missing(store):
    source = fill(store, {"baseline": ["pensieve"]}, lambda at, seed: [turn("w", 1, 9.0, phase="warmup")])
    with pytest.raises(MissingSeries, match=r"measured turn of pensieve; run `run.py -m`"):
        list(conversations.read_ttft_by_turn(source))


def test_turns_that_did_not_complete_are_not_drawn_as_if_they_had(store):
    turns = [turn("a", 1, 10.0), turn("b", 1, 9000.0, status="timeout"), turn("c", 1, 12.0)]
    source = fill(store, {"baseline": ["pensieve"]}, lambda at, seed: turns, seeds=[0])
    [(_, lines, _)] = conversations.read_ttft_by_turn(source)
    assert (lines["pensieve"][1].value, lines["pensieve"][1].n) == (10.0, 2)


def test_a_newer_failed_attempt_leaves_the_completed_one_standing(store):
    source = chat(store, {"pensieve": FAST})
    again = store.begin_trial(trial_fields(source.trials[0].fingerprint))
    store.link(source.sweep.id, again, 0, reused=False)
    store.finish_trial(again, "failed", error="No memory.")
    [(panel, _, _)] = conversations.read_ttft_by_turn(open_source(store))
    assert panel.provenance.trials == (1, 2)


def test_a_sweep_of_single_turns_is_not_for_it(store, drawn, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    chat(open_store(tmp_path), {"pensieve": (10.0,)})
    assert figures.main(["ttft_by_turn"]) == 1
    assert "run `python runners/run.py -m`" in capsys.readouterr().err


def test_no_database_is_one_sentence_and_an_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path / "nothing"))
    assert figures.main(["ttft_by_turn"]) == 1
    error = capsys.readouterr().err.strip()
    assert "run.py -m" in error
    assert "\n" not in error
