import itertools
import subprocess
import sys
from pathlib import Path

from matplotlib import pyplot as plt

from analysis import style
from pensieve.lab.compose.conf import options

ROOT = Path(__file__).resolve().parents[2]


def test_every_baseline_of_the_configuration_has_a_colour_of_its_own():
    names = options("baseline")
    assert set(names) <= set(style.COLOURS)
    assert len(set(style.COLOURS.values())) == len(style.COLOURS)


def test_the_texts_and_the_legend_stand_above_the_axes_and_the_small_print_below():
    figure, [[axes]] = style.new_grid(1.5)
    for place, name in enumerate(style.COLOURS):
        axes.plot([0, 1], [place, place], label=name)
    style.legend(figure)
    style.compose(figure, "A title\ncache=small", "A long small print. " * 20, warning=False)
    figure.draw_without_rendering()
    [legend], [small] = figure.legends, figure.texts
    boxes = [legend.get_window_extent(), axes.get_tightbbox(), small.get_window_extent()]
    assert small.get_window_extent().height > 2 * style.MARGIN_IN * figure.dpi, "several lines"
    for above, below in itertools.pairwise(boxes):
        assert above.y0 >= below.y1 - 1
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0 for box in boxes)
    plt.close(figure)


def test_drawing_loads_no_engine_and_no_torch():
    code = (
        "import pkgutil, sys; import analysis; "
        "[pkgutil.resolve_name(one.name) for one in pkgutil.walk_packages(analysis.__path__, 'analysis.')]; "
        "print([n for n in sys.modules if n == 'torch' or n.startswith(('pensieve.core.engine', 'pensieve.core.cache', "
        "'pensieve.core.scheduler', 'pensieve.device', 'pensieve.lab.replay'))])"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
