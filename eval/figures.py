"""The figures of the loss by position, in a long text and within documents."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lingpt.common.format import join_distinct
from lingpt.common.run_folder import without_seed
from lingpt.eval.comparison import mean_scores
from lingpt.eval.scores import About, Result, Score
from lingpt.plots.figures import add_caption, legend_beside, new_figure, save_formats, style_axes
from lingpt.plots.palette import line_styles

FIGURES = {  # measure → its figure, and what the horizontal axis is
    "loss_by_position": ("positions", "position (tokens)"),
    "loss_within_documents": ("within-documents", "tokens of the document before it"),
}


def draw_positions(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draws the `FIGURES`, .png and .pdf, of what was measured: the loss by position of every run, one panel
    per text.

    Runs that differ only in their seed (`…-seed0`, `…-seed1`) are one line, their mean. A group of positions
    is drawn at its end. The dashed line is the training length.
    """
    means = mean_scores(results)
    return [path for task in FIGURES for path in _draw(task, means, folder)]


def _draw(task: str, results: Sequence[Result], folder: Path) -> list[Path]:
    """Draws the figure of one measure, if any of the results has it."""
    found = [(result.checkpoint, scores) for result in results if (scores := result.of_task(task))]
    names = list(dict.fromkeys(str(score.texts) for _, scores in found for score in scores))
    if not names:
        return []
    rows, legend = [without_seed(about.run) for about, _ in found], dict[int, Any]()
    # The run's own name where several lines are of one row.
    labels = [row if rows.count(row) == 1 else about.run for row, (about, _) in zip(rows, found, strict=True)]
    width = 1.2 + 3.9 * len(names) + 0.7 + 0.07 * max(map(len, labels))  # inches: the panels and the legend
    file, axis = FIGURES[task]
    figure = new_figure(width, 3.6)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    styles = line_styles([about.form for about, _ in found])
    for panel, name in zip(panels, names, strict=True):
        drawn = {i: score for i, (_, scores) in enumerate(found) for score in scores if score.texts == name}
        for i, score in drawn.items():
            legend[i] = _draw_line(panel, score, labels[i], styles[i])
        _style_panel(panel, name, axis, list(drawn.values()))
    panels[0].set_ylabel("loss (nats per token)")
    lines = [legend[i] for i in sorted(legend)]
    legend_beside(figure, lines, [line.get_label() for line in lines])
    add_caption(figure, caption([(about, score) for about, scores in found for score in scores]))
    return save_formats(figure, folder, file)


def _draw_line(panel: Any, score: Score, label: str, style: dict[str, Any]) -> Any:
    """One run's loss by position, with the band of its seeds; returns the line."""
    groups = score.positions
    ends, losses = [group.to for group in groups], [group.loss for group in groups]
    (line,) = panel.plot(ends, losses, markersize=4, linewidth=1.5, label=label, **style)
    if score.runs:
        bounds = [group.lowest for group in groups], [group.highest for group in groups]
        panel.fill_between(ends, *bounds, color=style["color"], alpha=0.2, linewidth=0)
    return line


def _style_panel(panel: Any, name: str, axis: str, scores: Sequence[Score]) -> None:
    """A text's panel: its title, axes and training lengths."""
    for length in sorted({score.train_length for score in scores if score.train_length}):
        panel.axvline(length, color="0.5", linestyle=(0, (4, 3)), linewidth=0.9)
    panel.set_xscale("log", base=2)
    panel.set_xticks(sorted({group.to for score in scores for group in score.positions}))
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.minorticks_off()
    panel.tick_params(axis="x", labelrotation=45)
    panel.set_title(name, loc="left", fontsize=10, parse_math=False)
    panel.set_xlabel(axis)
    style_axes(panel)


def caption(scores: Sequence[tuple[About, Score]]) -> str:
    """The caption: models, training length, number of documents, devices."""
    texts = {
        name: join_distinct(score.documents for _, score in scores if score.texts == name)
        for name in dict.fromkeys(score.texts for _, score in scores)
    }
    parts = [
        join_distinct(about.model for about, _ in scores),
        f"dashed: the training length, {join_distinct(score.train_length for _, score in scores)} tokens",
        "documents: " + ", ".join(f"{count} of {name}" for name, count in texts.items()),
        join_distinct(score.device for _, score in scores),
    ]
    if any(score.runs for _, score in scores):
        parts.append("mean over seeds, band from the lowest to the highest")
    return "; ".join(filter(None, parts)) + "."
