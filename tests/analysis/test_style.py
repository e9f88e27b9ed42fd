import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.drawing import style

ROOT = Path(__file__).resolve().parents[2]


def test_every_baseline_of_the_configuration_has_a_colour_of_its_own():
    names = [file.stem for file in (ROOT / "conf" / "baseline").glob("*.yaml")]
    assert set(names) <= set(style.COLOURS)
    assert len(set(style.COLOURS.values())) == len(style.COLOURS)


def test_the_default_baselines_differ_in_lightness_and_marker():
    def luminance(name):
        red, green, blue = (int(style.colour(name)[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2

    names = ("pensieve", "gpu_only", "stateless")
    assert all(abs(luminance(a) - luminance(b)) > 0.05 for a, b in itertools.combinations(names, 2))
    assert len({style.marker(name) for name in names}) == 3


def test_a_baseline_of_ones_own_keeps_its_colour():
    assert style.colour("mine") == style.colour("mine")
    assert style.colour("mine") not in style.COLOURS.values()


@pytest.mark.parametrize(
    ("wanted", "placed"),
    [
        ([0, 10, 30], [0, 10, 30]),
        ([10, 10], [7, 13]),
        ([0, 1, 2], [-5, 1, 7]),
        ([0, 4, 9, 40], [-1.667, 4.333, 10.333, 40]),
    ],
)
def test_labels_that_touch_settle_around_their_middle(wanted, placed):
    assert style.spread(wanted, 6) == pytest.approx(placed, abs=1e-3)


def test_no_label_lies_below_the_axis():
    assert style.spread([0, 1, 30], 6, lowest=2) == [2, 8, 30]


def test_drawing_loads_no_engine_and_no_torch():
    code = (
        "import sys; import analysis.figures; "
        "print([n for n in sys.modules if n == 'torch' or n.startswith(('pensieve.engine', 'pensieve.cache', "
        "'pensieve.scheduler', 'pensieve.worker', 'pensieve.replay'))])"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
