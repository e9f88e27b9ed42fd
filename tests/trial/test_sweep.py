from pathlib import Path

from pensieve.trial.sweep import figure_lines

FOLDER = Path("/outputs/figures/sweep-3")


def test_pictures_and_tables_are_named_and_those_of_many_settings_counted() -> None:
    few = [FOLDER / "speedup.md", *(FOLDER / f"holding-eviction-{name}.png" for name in ("lru", "fifo"))]
    assert figure_lines(few) == [
        "Table:    /outputs/figures/sweep-3/speedup.md",
        "Figure:   /outputs/figures/sweep-3/holding-eviction-lru.png",
        "Figure:   /outputs/figures/sweep-3/holding-eviction-fifo.png",
    ]
    single = [FOLDER / f"holding-eviction-p{n}.png" for n in range(30)]
    assert figure_lines([FOLDER / "ablation_eviction.png", *single]) == [
        "Figure:   /outputs/figures/sweep-3/ablation_eviction.png",
        "Figures:  30 more, of single settings, in /outputs/figures/sweep-3",
    ]
    assert figure_lines([]) == []
