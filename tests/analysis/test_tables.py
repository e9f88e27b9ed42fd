from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from analysis.drawing import tables
from analysis.drawing.bars import Bar, Group, draw_groups, place_values, signed, text_in
from analysis.drawing.style import new_figure
from analysis.drawing.tables import Cell, Table
from pensieve.statistics import Estimate, PairedRatio
from tests.analysis.prefixes import FAST, marks, prefix_sweep


@pytest.fixture
def table(store):
    [panel] = prefix_sweep(store, {"pensieve": FAST}, blocks=("512/256",)).panels()
    lines = [
        {"engine": tables.named("pensieve"), "hit\n(ms)": Cell("10.7", "[10.1, 11.3]")},
        {"engine": tables.named("stateless"), "hit\n(ms)": Cell("–")},
    ]
    return Table(panel, "a_table", "A table", "Medians", lines, [{"engine": "pensieve", "hit_ms": 10.7}])


@pytest.mark.parametrize(
    ("value", "low", "high", "text", "under"),
    [
        (10.72, 10.1, 11.3, "10.7", "[10.1, 11.3]"),
        (1234.5, 1000.0, 2000.0, "1,234", "[1,000, 2,000]"),
        (0.456, None, None, "0.46", ""),
        (-64.31, -70.0, -60.0, "−64.3", "[−70.0, −60.0]"),
        (-1e-13, -1e-12, 1e-12, "0.00", "[0.00, 0.00]"),
    ],
)
def test_numbers_have_three_digits_and_no_negative_zero(value, low, high, text, under):
    assert tables.estimated(Estimate(value, low, high, 5, 1)) == Cell(text, under)


def test_nothing_is_a_dash():
    assert tables.estimated(None) == tables.ratio(None) == Cell("–")
    assert tables.ratio(PairedRatio(2.5, 2.0, 3.0, 4, 1)) == Cell("2.50", "[2.00, 3.00]")


def test_a_table_is_drawn_and_printed_with_the_same_texts(table, drawn, tmp_path):
    tables.draw(table, tmp_path)
    found = marks(drawn["a_table"].figure)
    assert (found["0:0/engine"], found["0:0/hit\n(ms)"], found["0:1/hit\n(ms)"]) == ("pensieve", "10.7", "–")
    page = StringIO()
    tables.show(table, Console(file=page, width=100))
    for text in ("pensieve", "10.7", "[10.1, 11.3]", "–", "n = 24 conversations"):
        assert text in page.getvalue()


def test_columns_do_not_touch(table, drawn, tmp_path):
    tables.draw(table, tmp_path)
    [axes] = drawn["a_table"].figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place])


def test_values_stay_inside_the_axes_and_beside_their_bars():
    figure, axes = new_figure(2.0)
    bars = [
        Bar(Estimate(value, value - 1, value + 1, 3, 1), "#000000", f"a long text {value}", str(value))
        for value in (5.0, 90.0)
    ]
    groups = [
        Group("one", "#000000", bars),
        Group("two", "#000000", [Bar(Estimate(-20.0, None, None, 3, 1), "#000000", "below", "x")]),
    ]
    draw_groups(axes, groups)
    place_values(figure, axes, groups)
    figure.canvas.draw()
    right = axes.get_window_extent().x1
    texts = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert all(box.x1 <= right + 1 for box in texts.values())
    ends = axes.transData.transform([(91.0, 0)])[0][0]
    assert texts["a long text 90.0"].x0 > ends
    assert axes.get_xlim()[0] < -20.0


def test_a_text_is_measured_by_its_font():
    assert text_in("", 7) == 0.0
    assert 1.9 < text_in("mmmm", 7) / text_in("mm", 7) < 2.1
    assert text_in("pensieve", 7, bold=True) > text_in("pensieve", 7)
    assert (signed(12.4), signed(-0.6)) == ("+12", "−1")
