"""Guards colours and styles: a form looks the same in every figure, and no two lines of one look alike."""

import itertools

from lingpt.plots.palette import COLOURS, DASHES, LOOKS, MARKERS, SHADES, line_styles, shade


def test_lines_of_one_attention_share_its_colour_and_differ():
    """Guards: three rows of one attention of which two looked the same; a fifth drawn as the first."""
    styles = line_styles(["ours", "softmax", *["ours"] * 5])
    ours = [style for i, style in enumerate(styles) if i != 1]
    assert len({style["color"] for style in styles}) == 7, "colours repeat"
    assert ours[0]["color"] == COLOURS["ours"] and len({tuple(style.values()) for style in styles}) == 7
    assert len({style["color"] for style in line_styles(["softmax"] * 3)}) == 3, "black"
    assert styles[1] == {"color": COLOURS["softmax"], "linestyle": "-", "marker": "o"}
    assert len({style["marker"] for style in ours[:5]}) == 5


def test_a_form_looks_the_same_whatever_else_is_drawn():
    """Guards: `ours-gated` solid in one figure and dashed in another, by the order of rows; options that are
    in another order, or written with spaces."""
    gated, conv, mine = "ours-gated", "ours-gated + output_gate + short_conv", "ours-gated + learnable_b"
    looks = [
        dict(zip(forms, line_styles(forms), strict=True))
        for forms in itertools.permutations([gated, conv, "softmax", mine])
    ]
    assert all(look == looks[0] for look in looks)
    assert line_styles([conv])[0] == line_styles(["ours-gated+short_conv+output_gate"])[0] == looks[0][conv]
    wide = (["gla+short_conv+gla_expand_k=1"], ["gla+gla_expand_k=1+short_conv"])
    assert line_styles(wide[0]) == line_styles(wide[1])
    assert line_styles([mine])[0]["linestyle"] != "-", "that of no option"
    assert len({tuple(look.values()) for look in looks[0].values()}) == 4
    assert looks[0][gated]["linestyle"] == "-" and looks[0][conv]["linestyle"] == "--"


def test_a_second_line_of_a_form_does_not_take_the_look_of_another():
    """Guards: the second row of `gated-conv`, with wider heads, as dotted as the output gate alone."""
    forms = ["ours-gated+output_gate+short_conv"] * 2 + ["ours-gated+output_gate"]
    assert len({tuple(style.values()) for style in line_styles(forms)}) == 3
    assert line_styles(forms)[2] == line_styles(forms[2:])[0]


def test_two_names_of_one_colour_differ():
    """Guards: softmax and its kernel as one line, and the tenth name without a colour drawn as the first."""
    for names in (["softmax-flash", "softmax"], [f"mine-{i}" for i in range(10)]):
        assert len({tuple(style.values()) for style in line_styles(names)}) == len(names)
    assert line_styles(["softmax-flash", "softmax"])[1] == line_styles(["softmax"])[0]


def test_some_softmax_layers_make_a_hybrid():
    """Crimson: the aliases, an option, a list of layers."""
    forms = ["hybrid", "hybrid-best + value_residual", "ours-gated+softmax_every=3", "gla + softmax"]
    crimson = [shade(COLOURS["hybrid"], part) for part in SHADES]
    assert {style["color"] for style in line_styles(forms)} <= set(crimson)


def test_names_that_have_no_colour_differ():
    assert len({style["color"] for style in line_styles(["theirs", "mine", "softmax"])}) == 3
    assert line_styles(["theirs", "mine"]) == line_styles(["mine", "theirs"])[::-1]


def test_every_look_is_written_as_it_is_looked_up():
    """Guards: a form whose options are not sorted, or a name that is no alias, which no line has."""
    for form in LOOKS:
        assert form == "+".join([form.split("+")[0], *sorted(form.split("+")[1:])])
        assert form.split("+")[0] in COLOURS.keys() - {"hybrid"}
    assert len(set(zip(itertools.cycle(DASHES), MARKERS * len(DASHES), strict=False))) == 30
