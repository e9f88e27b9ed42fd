"""The page as HTML: well-formed, whole in one file, escaped, and a mark beside every colour."""

import base64
import re
import struct
import zlib
from html.parser import HTMLParser

import pytest

from analysis.page.document import Page, Picture, Table, Verdicted, interval, leading_first, render
from pensieve.lab.results.claims import VERDICTS, Bounds, Measured

HOSTILE = "<script src='https://evil.example/x.js'>alert(1)</script>\"'&"
VOID = {"meta", "img", "rect", "br", "link", "input", "source"}
LOADING = {"src", "href", "xlink:href", "data", "action", "poster", "srcset", "formaction", "background"}


class Reader(HTMLParser):
    """Tags that are opened and never closed, attributes that load something, texts by tag."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.style = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in LOADING]
        self.style += " ".join(value or "" for name, value in attrs if name == "style")
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            self.style += data
        else:
            self.text += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    return reader


def assert_self_contained(html: str) -> None:
    reader = read(html)
    assert reader.faults == [] and reader.open == []
    assert all(load.startswith(("#", "data:image/png;base64,")) for load in reader.loads)
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(reader.tags)
    assert "url(" not in reader.style and "@import" not in reader.style
    assert len(reader.ids) == len(set(reader.ids))
    assert {load[1:] for load in reader.loads if load.startswith("#")} <= set(reader.ids)


def png(path, width=990, height=750):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b""))
    return path


def page(tmp_path=None, text="plain", verdicts=VERDICTS, **changed):
    table = Table([{f"{text}\n{text}": text, "ms": text}], text)
    fields = {
        "title": text,
        "subtitle": text,
        "facts": [(text, text)],
        "warnings": [text],
        "answers": [text],
        "results": [table],
        "notes": [text],
        "verdicts": [
            Verdicted(text, one, (text,), text, text, text, text, interval(BOUNDS, MEASURED), text, True)
            for one in verdicts
        ],
        "pictures": [Picture(text, text, png(tmp_path / "one.png"), [text])] if tmp_path else [],
        "not_drawn": [(text, text, text)],
        "failures": table,
        "flags": table,
        "configuration": [table],
        "environment": table,
        "engines": [table],
        "trials": table,
        "commands": [(text, text)],
        "written": text,
    }
    return Page(**fields | changed)


BOUNDS = Bounds(1.0, 2.0, 1.0, "1 to 2")
MEASURED = Measured(2.5, 1.5, 3.0, 9, "conversations", 3, (1,))


def test_the_page_is_well_formed_and_loads_nothing(tmp_path):
    assert_self_contained(render(page(tmp_path)))


def test_the_page_without_anything_is_well_formed():
    empty = page(
        facts=[], warnings=[], results=[], notes=[], verdicts=[], not_drawn=[], failures=None, flags=None,
        configuration=[], engines=[], commands=[],
    )  # fmt: skip
    html = render(empty)
    assert_self_contained(html)
    for sentence in ("No trial of this sweep is completed", "No claim is about", "supports no figure"):
        assert sentence in html


def test_hostile_names_stay_text_everywhere(tmp_path):
    html = render(page(tmp_path, HOSTILE))
    assert_self_contained(html)
    assert "<script" not in html
    assert read(html).text.count("alert(1)") > 20


def test_a_reader_in_the_dark_gets_the_dark_picture(tmp_path):
    light, dark = png(tmp_path / "w.png"), png(tmp_path / "w-dark.png", 991)
    html = render(page(pictures=[Picture("TTFT", "", light, ["a.csv"], dark=dark)]))
    assert_self_contained(html)
    [loaded] = re.findall(
        r'<source media="screen and \(prefers-color-scheme: dark\)" srcset="data:image/png;base64,([^"]+)">', html
    )
    assert base64.b64decode(loaded) == dark.read_bytes()
    assert "<source" not in render(page(pictures=[Picture("TTFT", "", light, ["a.csv"])]))


@pytest.mark.parametrize(
    ("bounds", "measured", "ordered"),
    [
        (Bounds(1.0, 2.0, 1.0, ""), (2.5, 2.2, 3.0), ["band0", "band1", "line0", "point", "line1"]),
        (Bounds(2.0, None, 2.0, ""), (2.5, 1.0, 3.0), ["line0", "band0", "point", "line1", "band1"]),
        (Bounds(None, 5.0, 5.0, ""), (6.0, 5.5, 7.0), ["band0", "band1", "line0", "point", "line1"]),
        (Bounds(1e3, 1e5, 1e3, ""), (2e3, 50.0, 3e3), ["line0", "band0", "point", "line1", "band1"]),
    ],
)
def test_the_bar_orders_claim_and_measurement_as_their_numbers(bounds, measured, ordered):
    value, low, high = measured
    found = interval(bounds, Measured(value, low, high, 1, "", 1, ()))
    places = {
        "band0": found.band[0], "band1": found.band[1], "line0": found.line[0], "line1": found.line[1],
        "point": found.point,
    }  # fmt: skip
    assert sorted(places, key=places.get) == ordered
    assert all(0.0 <= place <= 100.0 for place in places.values())
    assert found.scale == ("log" if bounds.high == 1e5 else "")


def test_a_bar_without_width_has_a_middle():
    found = interval(Bounds(2.0, None, 2.0, ""), Measured(2.0, None, None, 1, "", 1, ()))
    assert (found.line, found.point) == (None, 50.0)
    assert interval(BOUNDS, Measured(float("inf"), None, None, 1, "", 1, ())) is None


def test_what_shows_all_settings_leads_and_each_figure_once():
    def named(*figures):
        return [Picture(title, group, None, []) for title, group in figures]

    swept = named(("ttft", "rate=1"), ("ttft", "rate=2"), ("speedup", "rate=1"), ("throughput", ""), ("goodput", ""))
    assert leading_first(swept) == [swept[place] for place in (3, 4, 0, 1, 2)]
    settings = named(("ttft", "a"), ("ttft", "b"), ("ttft", "c"), ("hits", "a"), ("causes", "a"))
    assert leading_first(settings) == [settings[place] for place in (0, 3, 4, 1, 2)]
    plain = named(("ttft", ""), ("hits", ""), ("causes", ""), ("holding", ""))
    assert leading_first(plain) == plain and leading_first([]) == []
