"""Pictures that can be read: no legend over a curve, colours that everybody tells apart, peers by name and version."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("tools.places", reason="the source tree is not beside the tests")

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from tools import article, peers, plots, report, roofline
from tools.places import ROOT


@pytest.fixture(scope="module")
def drawn() -> list[plots.Figure]:
    return report.pages(ROOT, report.sections(ROOT))[1]


def check_legend(made: Any) -> None:
    """Every legend lies inside the picture, and no curve, mark or axis behind it."""
    canvas = FigureCanvasAgg(made)
    canvas.draw()
    renderer = canvas.get_renderer()
    legends = [*made.legends, *(axes.get_legend() for axes in made.axes if axes.get_legend())]
    assert legends
    for legend in legends:
        box = legend.get_window_extent(renderer)
        page = made.bbox
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, "cut off"
        for axes in made.axes:
            if not axes.axison:
                continue
            for line in axes.lines:
                path = line.get_transform().transform_path(line.get_path())
                assert not path.intersects_bbox(box, filled=False), f"over {line.get_label()}"
            for marks in axes.collections:
                points = marks.get_offset_transform().transform(marks.get_offsets())
                assert not box.count_contains(points), f"over {marks.get_label()}"
            assert not axes.get_tightbbox(renderer).padded(-1).overlaps(box), "over the axes or their labels"


@pytest.mark.parametrize("kind", ["hero", "widest", "train"])
def test_no_legend_covers_a_curve(kind: str, drawn: list[plots.Figure]) -> None:
    of = {
        "hero": lambda figure: figure.name == plots.HERO,
        "widest": lambda figure: len(figure.labels) == max(len(other.labels) for other in drawn),
        "train": lambda figure: figure.lines_only,
    }[kind]
    with pyplot.rc_context({"font.size": 8}):
        made = plots.canvas(next(filter(of, drawn)))
        check_legend(made)
        pyplot.close(made)


@pytest.mark.parametrize("draw", [roofline.canvas, roofline.canvas_t4, lambda root: article.canvas(root, pyplot)])
def test_no_legend_covers_a_mark_of_a_picture(draw: Any) -> None:
    with pyplot.rc_context():
        made = draw(ROOT)
        check_legend(made)
        pyplot.close(made)


def test_a_legend_over_a_curve_is_found() -> None:
    made, axes = pyplot.subplots()
    axes.plot([0, 1], [0, 1], label="a")
    axes.legend(loc="center")
    with pytest.raises(AssertionError, match="over a"):
        check_legend(made)
    pyplot.close(made)


# What a colour looks like to people without the long, and without the medium cones (linear RGB): Machado, Oliveira and
# Fernandes (2009).
SIGHT = {
    "full": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}


def seen(colour: str, sight: str) -> np.ndarray:
    """CIE L*a*b* (D65)."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    rgb = np.clip(SIGHT[sight] @ np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92), 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
    x, y, z = np.cbrt(np.maximum(xyz / [0.9505, 1.0, 1.089], 0.008856))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_lines_of_a_picture_are_told_apart(drawn: list[plots.Figure]) -> None:
    """Lines differ in colour, or in dashes and marks."""
    for figure in drawn:
        for lines in figure.panels.values():
            for one, other in itertools.combinations(lines, 2):
                a, b = peers.style(one), peers.style(other)
                if figure.lines_only and a.width != b.width:
                    continue
                apart = min(float(np.linalg.norm(seen(a.colour, sight) - seen(b.colour, sight))) for sight in SIGHT)
                assert apart >= 15 or a.line != b.line, f"{figure.name}: {one} and {other} are {apart:.0f} apart"
                assert a.marker != b.marker or figure.lines_only, f"{figure.name}: {one} and {other}"


def test_everybody_has_a_name_and_a_line_of_their_own(drawn: list[plots.Figure]) -> None:
    for figure in drawn:
        names = {name for lines in figure.panels.values() for name in lines}
        assert names <= set(peers.STYLES) and names <= set(figure.labels), figure.name
        assert len(set(figure.labels.values())) == len(figure.labels)
        for name in names:
            label = figure.labels[name]
            if peers.has_version(name):  # with its version, or said to be without
                assert re.search(r"\d+\.\d", label) or label in figure.note, f"{figure.name}: {label}"


def test_labels() -> None:
    machine = {"torch": "2.11.0+cu130", "cudnn": 91900, "flashkernel": "0.1.0", "peers": {"flash_attn_4": "4.0.0"}}
    assert peers.label("sdpa_cudnn", machine) == "cuDNN 9.19.0"
    assert peers.label("sdpa_flash", machine) == "FlashAttention-2 (torch 2.11.0)"
    assert peers.label("fa4", machine) == "FlashAttention-4 4.0.0" and peers.label("fa3", machine) == "FlashAttention-3"
    assert peers.label("flashkernel", machine) == "FlashKernel 0.1.0"
    assert peers.same_line("attention_fwd/cuda/sm80/f16/d64") == "sm80"


def test_readme_has_one_picture() -> None:
    shown = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert [path for path in shown if path.endswith(".svg") and "lab/" in path] == [f"lab/plots/{plots.HERO}.svg"]
