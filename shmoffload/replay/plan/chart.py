"""Draws hit rate against capacity.

Covers: one kind of picture: curves over a logarithmic axis of GiB.
Does not cover: figures (``grid``), files (``sweep``).
Who calls it: ``sweep``; pure; Pillow is imported when it is called.

Pillow, not matplotlib: one wheel without dependencies instead of nine, no font cache
written to the home directory at the first import, and this one picture needs no more
than lines and text. It is drawn twice as large and scaled down, which smooths it.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shmoffload.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL import ImageDraw, ImageFont

WIDTH: Final = 900
HEIGHT: Final = 560
_LEFT, _TOP, _RIGHT, _BOTTOM = 80, 50, 170, 70
_SCALE: Final = 2
_FONT_PX: Final = 14
_COLORS: Final = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
)
_MARKS_PER_DECADE: Final = (1, 2, 5)
_NUM_RATES: Final = 5


class PlotUnavailableError(BadInputError):
    """There is no library to draw with."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy: (capacity in GiB, hit rate), by capacity."""

    name: str
    points: Sequence[tuple[float, float]]


def draw(curves: Sequence[Curve], *, title: str) -> bytes:
    """Return a PNG.

    Raises:
        PlotUnavailableError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise PlotUnavailableError(
            "no PNG was drawn, Pillow is missing: pip install 'shmoffload[plot]'"
        ) from error
    size = (WIDTH * _SCALE, HEIGHT * _SCALE)
    image = Image.new("RGB", size, "white")
    font = ImageFont.load_default(_FONT_PX * _SCALE)
    picture = _Picture(ImageDraw.Draw(image), font, curves)
    picture.draw_axes(title)
    for i, curve in enumerate(curves):
        picture.draw_curve(curve, _COLORS[i % len(_COLORS)], row=i)
    png = io.BytesIO()
    image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS).save(png, "PNG")
    return png.getvalue()


class _Picture:
    """One picture; points are (GiB, rate), pixels are of the enlarged image."""

    def __init__(
        self,
        pen: ImageDraw.ImageDraw,
        font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
        curves: Sequence[Curve],
    ) -> None:
        self._pen = pen
        self._font = font
        points = [point for curve in curves for point in curve.points]
        self._low, self._high = _span([gib for gib, _ in points])
        self._top_rate = max([0.01, *(rate for _, rate in points)]) * 1.05

    def _at(self, gib: float, rate: float) -> tuple[float, float]:
        across = math.log(gib / self._low) / math.log(self._high / self._low)
        x = _LEFT + across * (WIDTH - _LEFT - _RIGHT)
        y = HEIGHT - _BOTTOM - rate / self._top_rate * (HEIGHT - _TOP - _BOTTOM)
        return x * _SCALE, y * _SCALE

    def _line(self, points: Sequence[tuple[float, float]], color: str, w: int) -> None:
        self._pen.line([self._at(*p) for p in points], color, w * _SCALE, "curve")

    def _text(self, xy: tuple[float, float], text: str, anchor: str) -> None:
        self._pen.text(xy, text, "black", font=self._font, anchor=anchor)

    def draw_axes(self, title: str) -> None:
        """Draw grid lines with their numbers, and the words."""
        for i in range(_NUM_RATES + 1):
            rate = self._top_rate * i / _NUM_RATES
            self._line([(self._low, rate), (self._high, rate)], "#dddddd", 1)
            x, y = self._at(self._low, rate)
            self._text((x - 8 * _SCALE, y), f"{rate:.3f}", "rm")
        for gib in _marks(self._low, self._high):
            self._line([(gib, 0.0), (gib, self._top_rate)], "#dddddd", 1)
            x, y = self._at(gib, 0.0)
            self._text((x, y + 8 * _SCALE), f"{gib:g}", "mt")
        middle = (_LEFT + WIDTH - _RIGHT) / 2 * _SCALE
        self._text((middle, (HEIGHT - 20) * _SCALE), "primary, GiB", "mm")
        self._text((_LEFT * _SCALE, _TOP / 2 * _SCALE), title, "lm")

    def draw_curve(self, curve: Curve, color: str, *, row: int) -> None:
        """Draw a curve, its points, and its name in the legend."""
        if len(curve.points) > 1:
            self._line(curve.points, color, 2)
        radius = 4 * _SCALE
        for point in curve.points:
            x, y = self._at(*point)
            self._pen.ellipse([x - radius, y - radius, x + radius, y + radius], color)
        x = (WIDTH - _RIGHT + 20) * _SCALE
        y = (_TOP + 24 * row + 12) * _SCALE
        self._pen.line([(x, y), (x + 24 * _SCALE, y)], color, 3 * _SCALE)
        self._text((x + 32 * _SCALE, y), curve.name, "lm")


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return low / 1.2, high * 1.2


def _marks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten inside a span."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [mark * 10.0**decade for decade in decades for mark in _MARKS_PER_DECADE]
    return [mark for mark in marks if low <= mark <= high]
