"""Guards colours and styles: lines of one attention look alike and can be told apart."""

from lingpt.common.palette import COLOURS, line_styles


def test_lines_of_one_attention_share_its_colour_and_differ():
    """Guards: three rows of one attention of which two looked the same; a fifth drawn as the first."""
    styles = line_styles(["ours", "softmax", *["ours"] * 5])
    ours = [style for style in styles if style["color"] == COLOURS["ours"]]
    assert len(ours) == 6 and len({tuple(style.values()) for style in styles}) == 7
    assert styles[1] == {"color": COLOURS["softmax"], "linestyle": "-", "marker": "o"}
    assert len({style["marker"] for style in ours[:5]}) == 5
