import json
import re

import pytest

from analysis import figures, registry
from analysis.sweep import open_source
from pensieve.errors import ConfigError, MissingSeries
from pensieve.lab.compose.conf import conf_folder
from pensieve.lab.results.store import open_store
from tests.analysis.sweeps import answered, fill


def chat(store, command="run.py -m", baselines=("pensieve", "stateless")):
    def turns(at, seed):
        return [
            answered(s, number, 10.0 * number, history=50 * (number - 1), gpu=40 * (number - 1))
            for s in "ab"
            for number in (1, 2, 3)
        ]

    return fill(store, {"baseline": list(baselines)}, turns, summary=True, command=command)


def test_what_was_let_through_is_said_in_the_picture_and_beside_it(store, drawn, tmp_path):
    for trial in chat(store).trials[::2]:
        store.set_trial(trial.id, simulated=True)
    [drawing] = registry.FIGURES["ttft_by_turn"].draw(open_source(store, allow_mixed=True), tmp_path)
    warning = next(text for text in drawn["ttft_by_turn"].texts if text.startswith("MIXED: "))
    told = json.loads(drawing.files["json"].read_text())
    assert told["allow_mixed"] is True
    assert warning.startswith(" ".join(["MIXED:", *"; ".join(told["mixed"]).split()]))


def test_what_a_sweep_supports_is_drawn_and_the_rest_is_named_by_help(outputs, drawn, capsys):
    chat(open_store(outputs))
    assert figures.main([]) == 0
    assert set(drawn) == {"ttft_by_turn", "hit_rates"}  # and speedup, which is a table
    assert [one.clipped for one in drawn.values()] == [[]] * 2
    shares = drawn["hit_rates"].bars
    assert shares["pensieve/GPU hit"] == (0, 80) and shares["pensieve/recomputed"] == (80, 20)
    told = capsys.readouterr()
    assert str(outputs / "figures" / "sweep-1" / "hit_rates.png") in told.out.splitlines()
    assert told.err == f"{len(registry.FIGURES) - 4} figures need other experiments (--help names them).\n", (
        "idea is asked"
    )
    with pytest.raises(SystemExit):
        figures.main(["--help"])
    assert "python runners/run.py experiment=users/hotness -m" in capsys.readouterr().out


def test_a_folder_a_sweep_and_latest_is_the_one_that_was_drawn_last(outputs, drawn, capsys):
    store, elsewhere = open_store(outputs), outputs / "elsewhere"
    chat(store)
    chat(store, "run.py other -m")
    latest = outputs / "figures" / "latest"
    for words, folder in (
        ([], "sweep-2"),
        (["--sweep", "1"], "sweep-1"),
        (["--sweep", "2", "--to", str(elsewhere)], "sweep-1"),
    ):
        assert figures.main(["ttft_by_turn", *words]) == 0
        assert latest.resolve().name == folder
    assert {one.name for one in (outputs / "figures").iterdir()} == {"latest", "sweep-1", "sweep-2"}
    assert (elsewhere / "ttft_by_turn.png").exists()


def test_the_caption_is_a_file_and_in_the_pdf_and_one_line_is_in_the_picture(outputs, capsys):
    chat(open_store(outputs))
    assert figures.main(["ttft_by_turn"]) == 0
    folder = outputs / "figures" / "latest"
    caption = (folder / "ttft_by_turn.txt").read_text(encoding="utf-8")
    assert caption.startswith("Time to first token by turn. ")
    assert "load closed" in caption and "trials 1-4" in caption
    pdf = (folder / "ttft_by_turn.pdf").read_bytes()
    assert b"/Title" in pdf and b"/Subject" in pdf


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (MissingSeries("There is no patience."), "broken: There is no patience."),
        (ValueError("none"), "broken: the figure has a fault, please report it: ValueError: none (test_figures.py"),
    ],
)
def test_a_figure_that_cannot_be_drawn_is_named_and_does_not_take_the_others_with_it(
    outputs, drawn, capsys, monkeypatch, fault, said
):
    class Broken(registry.Figure):
        def plots(self, source):
            raise fault

    chat(open_store(outputs))
    broken = Broken(name="broken", title="Broken", shows="", command="", form="lines", applies={})
    monkeypatch.setattr(registry, "FIGURES", {"broken": broken, "ttft_by_turn": registry.FIGURES["ttft_by_turn"]})
    assert figures.main([]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(said)
    assert list(drawn) == ["ttft_by_turn"]


def test_every_file_of_conf_figure_names_a_command_whose_overlay_there_is():
    experiments = conf_folder() / "experiment"
    for name, figure in registry.FIGURES.items():
        assert figure.name == name and figure.command.startswith("python runners/")
        for overlay in re.findall(r"experiment=(\S+)", figure.command):
            assert (experiments / f"{overlay}.yaml").is_file(), name


def test_a_figure_of_ones_own_that_is_written_wrong_is_told_by_its_field(store, tmp_path):
    file = {"title": "T", "shows": "s", "command": "c", "form": "bars", "applies": {"has_turns": True}, "lead": "L"}
    file["sides"] = [{"says": "ms", "quantities": [{"of": "queue_ms", "how": "mean", "labelled": "x"}]}]
    (tmp_path / "mine.yaml").write_text(json.dumps(file))
    figure = registry.read_figures(tmp_path)["mine"]
    source = chat(store)
    assert figure.holds(source)
    with pytest.raises(ConfigError, match=r"mine.yaml: sides.0.quantities.0.labelled: Extra inputs are not permitted"):
        figure.draw(source, tmp_path)


def test_named_figures_are_drawn_and_one_that_does_not_apply_is_told_with_its_command(outputs, drawn, capsys):
    chat(open_store(outputs))
    assert figures.main(["speedup", "goodput", "hit_rates"]) == 1
    assert set(drawn) == {"hit_rates"}, "a table is no picture"
    told = capsys.readouterr()
    assert told.out.index("average") < told.out.index("speedup.md"), "a table is printed too"
    assert {path.name for path in (outputs / "figures" / "latest").glob("speedup*")} == {
        "speedup.md", "speedup.csv", "speedup.json"
    }  # fmt: skip
    assert told.err.startswith("goodput: It needs other trials than sweep 1 has; run `python runners/run.py")
