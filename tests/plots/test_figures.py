"""Guards figures as they are written: what a publisher takes; a picture that has not changed is no change."""

import numpy as np
import pytest

from lingpt.common.errors import UserError
from lingpt.plots import lengths_figure
from lingpt.plots.figures import KNOWN_FORMATS, figure_paths, legend_beside, new_figure, save_figure


def figure():
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(2, 1))
    drawn.subplots().plot([1, 2], marker="o", label="softmax")
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("kind", KNOWN_FORMATS)
def test_every_known_format_is_written(tmp_path, kind):
    """Guards: `.pgf`, which matplotlib lists, and then refuses what it writes as SVG."""
    save_figure(figure(), tmp_path / f"a.{kind}")
    assert (tmp_path / f"a.{kind}").stat().st_size


def test_more_formats_stand_next_to_the_figure(tmp_path):
    """With or without a dot, never two: `curves..svg`."""
    paths = figure_paths(tmp_path / "curves.png", [".svg", "pdf", "png"])
    assert [path.name for path in paths] == ["curves.png", "curves.svg", "curves.pdf"]


@pytest.mark.parametrize("kind", ["pdf", "svg", "png"])
def test_a_picture_drawn_again_is_the_same_file(tmp_path, kind):
    """Guards: a date and random names, nine hundred lines of difference. And no Type 3 font in a PDF."""
    files = [tmp_path / f"{name}.{kind}" for name in ("a", "b")]
    for file in files:
        save_figure(figure(), file)
    first, second = (file.read_bytes() for file in files)
    assert first == second and b"/Type3" not in first


def test_a_format_that_is_none(tmp_path):
    with pytest.raises(UserError, match=r"cannot draw a \.xyz: end it in one of .*\.png"):
        save_figure(figure(), tmp_path / "a.xyz")
    assert not list(tmp_path.iterdir())


def test_long_names_beside_the_panels_leave_them_their_room():
    """Guards: panels of no width beside `gla+short_conv+…+value_residual`. Short names change no figure."""
    for name, width in (("softmax", 8), ("gla+short_conv+gla_expand_k=1+input_gate+" * 3, 13)):
        drawn = new_figure(8, 3)
        panels = drawn.subplots(1, 2)
        for panel in panels:
            panel.plot([1, 2], label=name)
        legend_beside(drawn, *panels[0].get_legend_handles_labels())
        drawn.draw_without_rendering()
        assert all(panel.get_window_extent().width > 1.5 * drawn.dpi for panel in panels)
        assert width <= drawn.get_figwidth() < width + 2


def test_lengths_of_documents_are_plain_numbers(monkeypatch, tmp_path):
    """Guards: `4 × 10²` under the histogram, and no number at all where all documents are alike."""
    drawn = []
    monkeypatch.setattr(lengths_figure, "save_figure", lambda figure, _: drawn.append(figure))
    for low, high in ((421, 1956), (600, 700)):
        borders = np.geomspace(low, high, 41)
        lengths_figure.draw_lengths(np.ones(40), borders, "books", "", tmp_path / "lengths.png")
    for figure in drawn:
        figure.draw_without_rendering()
        assert {"512", "1,024"} <= {label.get_text() for label in figure.axes[0].get_xticklabels()}
