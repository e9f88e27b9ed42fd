from __future__ import annotations

from io import StringIO

import pytest
from matplotlib import pyplot as plt
from rich.console import Console

from analysis import marks, style, tables
from analysis.marks import Bar, Group
from analysis.prefix import signed
from analysis.registry import columns
from pensieve.lab.statistics import Estimate, PairedRatio

TABLE = [
    {"engine": "pensieve", "hit\n(ms)": "10.7\n[10.1, 11.3]", "miss\n(ms)": "1,234\n[1,000, 2,000]"},
    {"engine": "stateless", "hit\n(ms)": "–", "miss\n(ms)": "55.1"},
]


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (10.72, 10.1, 11.3, "10.7\n[10.1, 11.3]"),
        (1234.5, 1000.0, 2000.0, "1,234\n[1,000, 2,000]"),
        (0.456, None, None, "0.46"),
        (-64.31, -70.0, -60.0, "−64.3\n[−70.0, −60.0]"),
        (-1e-13, -1e-12, 1e-12, "0.00\n[0.00, 0.00]"),
    ],
)
def test_numbers_have_three_digits_and_no_negative_zero(value, low, high, text):
    assert tables.estimated(Estimate(value, low, high, 5, 1)) == text


def test_nothing_is_a_dash():
    assert tables.estimated(None) == "–"
    assert tables.estimated(PairedRatio(2.5, 2.0, 3.0, 4, 1)) == "2.50\n[2.00, 3.00]"


def test_a_table_is_written_and_printed_with_the_same_texts():
    assert tables.markdown(
        [*TABLE, {"engine": "a|b", "hit\n(ms)": "1", "miss\n(ms)": "2"}], "A table", "Small print."
    ) == (
        "# A table\n\n"
        "| engine | hit (ms) | miss (ms) |\n"
        "| --- | ---: | ---: |\n"
        "| pensieve | 10.7 [10.1, 11.3] | 1,234 [1,000, 2,000] |\n"
        "| stateless | – | 55.1 |\n"
        "| a\\|b | 1 | 2 |\n"
        "\n"
        "Small print.\n"
    )
    page = StringIO()
    tables.show(TABLE, "A table", "n = 24 conversations", Console(file=page, width=100))
    for text in ("pensieve", "10.7", "[10.1, 11.3]", "–", "A table", "n = 24 conversations"):
        assert text in page.getvalue()


def test_values_stand_beside_their_bars_on_the_page_and_clear_of_the_names():
    bars = [
        Bar(Estimate(value, value - 1, value + 1, 3, 1), "#000000", f"a long text {value}", str(value))
        for value in (5.0, 90.0)
    ]
    groups = [
        Group("one", "#000000", bars),
        Group("two", "#000000", [Bar(Estimate(-20.0, None, None, 3, 1), "#000000", "below", "x")]),
    ]
    figure, [[axes]] = marks.bar_grid([groups])
    marks.bars(axes, groups)
    style.compose(figure, "Bars", "", "", "Small print.")
    figure.draw_without_rendering()
    texts = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert all(box.x1 <= figure.bbox.width for box in texts.values())
    assert texts["a long text 90.0"].x0 > axes.transData.transform([(91.0, 0)])[0][0]
    names = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert not any(name.overlaps(box) for name in names for box in texts.values())


def test_an_estimate_without_an_interval_has_a_bar_and_a_line_without_one():
    """Of fewer than five groups no interval is known."""
    bare = Estimate(5.0, None, None, 3, 1)
    figure, axes = style.new_axes(2.0)
    marks.draw_bar(axes, Bar(bare, "#000000", "5", "x"), 0.0)
    marks.line(axes, "pensieve", [(0, bare), (1, Estimate(6.0, 5.0, 7.0, 9, 5)), (2, bare)], band=True)
    marks.line(axes, "gpu_only", [(0, bare)])
    assert not any(line.get_clip_on() for line in axes.get_lines()), "markers at the edge are whole"
    assert [len(one.get_paths()) for one in axes.collections] == [1]
    assert tables.estimated(bare) == "5.00"
    plt.close(figure)


def test_a_change_has_a_sign_as_long_as_a_digit():
    assert (signed(12.4), signed(-0.6)) == ("+12", "−1")


def test_the_columns_of_a_missing_estimate_are_those_of_one_and_empty():
    known = columns("hit_pct", Estimate(40.0, 30.0, 50.0, 12, 5), prefix="hit_")
    assert known == {"hit_pct": 40.0, "hit_ci_low": 30.0, "hit_ci_high": 50.0, "hit_n": 12, "hit_n_seeds": 5}
    assert columns("hit_pct", None, prefix="hit_") == dict.fromkeys(known)
