"""One colour for each attention in all pictures: Okabe and Ito's palette, for any colour vision.

Several lines of one attention differ in their dashes and markers.
"""

from collections.abc import Iterable, Sequence

COLOURS = {
    "ours": "#D55E00",  # vermilion
    "ours-decay": "#0072B2",  # blue
    "ours-gated": "#CC79A7",  # reddish purple
    "ours-gated+softmax": "#B2182B",  # crimson
    "hybrid": "#B2182B",  # the same
    "softmax": "#000000",
    "gla": "#009E73",  # bluish green
    "sdpa-cudnn": "#999999",  # softmax by another library
}
SPARE_COLOURS = (
    "#882255",
    "#E69F00",
    "#56B4E9",
    "#8C510A",
    "#5E4FA2",
    "#1B7837",
    "#F0E442",
    "#666666",
    "#3690C0",
)


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: its own, or, in the order of the names, a spare one."""
    names = list(dict.fromkeys(names))
    spare = [name for name in names if name not in COLOURS]
    return {
        name: COLOURS.get(name) or SPARE_COLOURS[spare.index(name) % len(SPARE_COLOURS)] for name in names
    }


# The dashes and markers of an attention's first line, second line, …: 4 · 5 = 20 different combinations.
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "p")


def line_styles(attentions: Sequence[str]) -> list[dict[str, str]]:
    """Colour, dashes and marker of a line for each of `attentions`, in which one may occur repeatedly."""
    colour = colours(sorted(set(attentions)))
    styles = []
    for i, name in enumerate(attentions):
        turn = attentions[:i].count(name)
        dashes, marker = DASHES[turn % len(DASHES)], MARKERS[turn % len(MARKERS)]
        styles.append({"color": colour[name], "linestyle": dashes, "marker": marker})
    return styles
