"""The same figure on a dark ground: greys change places, and colours that would drown in it are lifted."""

from __future__ import annotations

import colorsys
from typing import Any

from matplotlib.artist import Artist
from matplotlib.collections import Collection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

GROUND, INK = (0x1D, 0x21, 0x25), (0xE7, 0xE9, 0xEB)  # what white and black become: the page's card and ink
LEAST = 0.5  # lightness of a colour
LIFTED = 0.65  # the share of its saturation that a colour keeps when it is lifted to LEAST
GREYISH = 0.12  # saturation below which a colour is a grey

RGBA = tuple[float, float, float, float]


def in_the_dark(colour: Any) -> RGBA:
    """Its counterpart; opacity stays."""
    red, green, blue, alpha = to_rgba(colour)
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    if saturation < GREYISH or lightness in (0.0, 1.0):
        red, green, blue = ((ink + (ground - ink) * lightness) / 255 for ground, ink in zip(GROUND, INK, strict=True))
        return red, green, blue, alpha
    lifted = lightness < LEAST
    return *colorsys.hls_to_rgb(hue, max(lightness, LEAST), saturation * (LIFTED if lifted else 1.0)), alpha


def darken(figure: Figure) -> None:
    """Change every mark of a drawn figure. What a colour map fills (a heat map) stays as it is."""
    figure.draw_without_rendering()  # ticks and legends are there only then
    for artist in figure.findobj():
        _darken(artist)


def _darken(artist: Artist) -> None:
    if isinstance(artist, Text):
        artist.set_color(in_the_dark(artist.get_color()))
    elif isinstance(artist, Line2D):
        face, edge = artist.get_markerfacecolor(), artist.get_markeredgecolor()
        artist.set_color(in_the_dark(artist.get_color()))
        artist.set_markerfacecolor(face if _is_none(face) else in_the_dark(face))
        artist.set_markeredgecolor(edge if _is_none(edge) else in_the_dark(edge))
    elif isinstance(artist, Patch):
        face, edge = artist.get_facecolor(), artist.get_edgecolor()
        artist.set_facecolor(in_the_dark(face))
        artist.set_edgecolor(in_the_dark(edge))
    elif isinstance(artist, Collection) and artist.get_array() is None:
        artist.set_facecolor([in_the_dark(one) for one in artist.get_facecolor()])
        artist.set_edgecolor([in_the_dark(one) for one in artist.get_edgecolor()])


def _is_none(colour: Any) -> bool:
    return isinstance(colour, str) and colour == "none"
