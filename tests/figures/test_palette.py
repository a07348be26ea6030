"""Colours that stay apart for every reader: CIEDE2000 distances in normal vision and three kinds of colour blindness.

CIEDE2000: Sharma, Wu, Dalal 2005, checked on their own test data. Colour blindness: Machado, Oliveira, Fernandes 2009,
severity 1.0. Contrast: WCAG 2.2.
"""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest

from labkit.figures.palette import DARK, LIGHT, OUTLINE, PART_COLORS, get_theme, label, template, text_on
from labkit.memory.records import PARTS

VISIONS = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def linear_rgb(color: str) -> list[float]:
    values = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def lab(color: str, vision: str = "normal") -> tuple[float, float, float]:
    rgb = linear_rgb(color)
    seen = [min(1.0, max(0.0, sum(a * b for a, b in zip(row, rgb, strict=True)))) for row in VISIONS[vision]]
    to_xyz = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.072175), (0.0193339, 0.119192, 0.9503041))
    xyz = [sum(a * b for a, b in zip(row, seen, strict=True)) for row in to_xyz]
    f = []
    for value, white in zip(xyz, (0.95047, 1.0, 1.08883), strict=True):
        ratio = value / white
        f.append(ratio ** (1 / 3) if ratio > (6 / 29) ** 3 else ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def hue_angle(b: float, a: float) -> float:
    return math.degrees(math.atan2(b, a)) % 360 if a or b else 0.0


def ciede2000(first: tuple[float, float, float], second: tuple[float, float, float]) -> float:
    (l1, a1, b1), (l2, a2, b2) = first, second
    c_mean = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    g = 0.5 * (1 - math.sqrt(c_mean**7 / (c_mean**7 + 25**7)))
    a1, a2 = (1 + g) * a1, (1 + g) * a2
    c1, c2, h1, h2 = math.hypot(a1, b1), math.hypot(a2, b2), hue_angle(b1, a1), hue_angle(b2, a2)
    turn = 0.0 if not c1 * c2 else (h2 - h1 + 180) % 360 - 180
    hue = h1 + h2 if not c1 * c2 else (h1 + turn / 2) % 360
    delta_hue = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2))
    light, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    t = (
        1 - 0.17 * math.cos(math.radians(hue - 30)) + 0.24 * math.cos(math.radians(2 * hue))
        + 0.32 * math.cos(math.radians(3 * hue + 6)) - 0.2 * math.cos(math.radians(4 * hue - 63))
    )  # fmt: skip
    rotation = 60 * math.exp(-(((hue - 275) / 25) ** 2))
    r = -2 * math.sqrt(chroma**7 / (chroma**7 + 25**7)) * math.sin(math.radians(rotation))
    s_light = 1 + 0.015 * (light - 50) ** 2 / math.sqrt(20 + (light - 50) ** 2)
    s_chroma, s_hue = 1 + 0.045 * chroma, 1 + 0.015 * chroma * t
    x, y, z = (l2 - l1) / s_light, (c2 - c1) / s_chroma, delta_hue / s_hue
    return math.sqrt(x * x + y * y + z * z + r * y * z)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 2.5, 0.0), (50.0, 0.0, -2.5), 4.3065),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((22.7233, 20.0904, -46.6940), (23.0331, 14.9730, -42.5619), 2.0373),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_the_distance_itself_agrees_with_the_published_data(first, second, expected):
    assert ciede2000(first, second) == pytest.approx(expected, abs=1e-4)


def contrast(color: str, page: str) -> float:
    bright, dim = sorted((sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear_rgb(entry), strict=True))
                          for entry in (color, page)), reverse=True)  # fmt: skip
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("vision", VISIONS)
def test_neighbouring_memory_parts_are_told_apart_in_every_vision(vision):
    colors = [PART_COLORS[part] for part in PARTS if part != "free"]
    assert len(set(colors)) == len(colors)
    for first, second in pairwise(colors):
        assert ciede2000(lab(first, vision), lab(second, vision)) >= 15.5, (first, second)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_lines_are_told_apart_in_every_vision_and_stand_out_from_the_page(theme, vision):
    for first, second in combinations(theme.lines, 2):
        assert ciede2000(lab(first.color, vision), lab(second.color, vision)) >= 10.5, (first, second)
    for style in theme.lines:
        assert contrast(style.color, theme.page) >= 3


def test_plotly_s_own_first_and_fourth_colour_would_fail_this_test():
    assert ciede2000(lab("#636EFA", "protanopia"), lab("#AB63FA", "protanopia")) < 2


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_no_line_rests_on_its_colour_alone(theme):
    assert len({style.dash for style in theme.lines}) == len({style.marker for style in theme.lines}) == 4


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_reads(theme):
    assert contrast(theme.text, theme.page) >= 7
    assert contrast(theme.muted, theme.page) >= 4.5
    assert contrast(OUTLINE, theme.page) >= 3
    assert ciede2000(lab(theme.better, "deuteranopia"), lab(theme.worse, "deuteranopia")) > 25


@pytest.mark.parametrize("part", [part for part in PARTS if part != "free"])
def test_text_on_a_part_reads(part):
    assert contrast(text_on(PART_COLORS[part]), PART_COLORS[part]) >= 4.5


def test_an_unknown_theme_is_light():
    assert get_theme("sepia") is LIGHT
    assert template("dark")["layout"]["font"]["color"] == DARK.text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<b>x</b>", "&lt;b&gt;x&lt;/b&gt;"),
        ("$\\alpha$", "&#36;\\alpha&#36;"),
        ("%{x} & co", "&#37;{x} &amp; co"),
        ("a\x1b[31mb\u202ec\nd", "a[31mbc d"),
        ("", ""),
    ],
)
def test_labels_are_shown_letter_by_letter(text, shown):
    assert label(text) == shown


def test_a_long_label_is_cut_before_it_is_escaped():
    assert label("<" * 100, 10) == "&lt;" * 9 + "…"
