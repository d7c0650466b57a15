"""The look of each attention, the same in every figure: Okabe and Ito's colours, for any colour vision.

A line is looked up by its form as `models.attention_form` writes it, an attention with its options such as
`ours-gated+output_gate`. The colour is that of the attention; its shade, dashes and marker are those of the
options.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

COLOURS = {
    "ours": "#D55E00",  # vermilion
    "ours-decay": "#0072B2",  # blue
    "ours-gated": "#CC79A7",  # reddish purple
    "hybrid": "#B2182B",  # crimson; every form with softmax in some of its layers
    "hybrid-best": "#B2182B",
    "linear-best": "#009E73",
    "softmax": "#000000",
    "softmax-best": "#000000",
    "softmax-flash": "#000000",
    "softmax-cudnn": "#999999",
    "gla": "#009E73",  # bluish green
    "identity": "#56B4E9",  # sky blue
    "identity-dense": "#2A6F97",
    "spec-dec-la": "#B2DF8A",  # light green
}
SPARE_COLOURS = (
    "#882255", "#E69F00", "#8C510A", "#5E4FA2", "#1B7837", "#F0E442", "#666666", "#3690C0", "#F781BF",
)  # fmt: skip
# The n-th look of a colour has its n-th shade, dashes and marker (after the last comes the first): 30 looks.
# A shade is the part of white, or of black where it is negative, that is mixed in.
SHADES = (0.0, 0.3, -0.35, 0.5, -0.6, 0.65)
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1.5, 1, 1.5, 1, 1.5)), (0, (1, 4)))
MARKERS = ("o", "s", "^", "D", "p")
# The look of a form with options, which are sorted; without options it is 0.
LOOKS = {
    "ours+short_conv": 1,
    "ours-decay+short_conv": 1,
    "ours-gated+output_gate+short_conv": 1,
    "ours-gated+output_gate": 2,
    "ours-gated+short_conv": 3,
    "ours-gated+output_gate+short_conv+softmax_every=4": 1,
    "ours-gated+output_gate+short_conv+softmax_every=3": 2,
    "ours-gated+output_gate+short_conv+softmax": 3,  # other layers are softmax: a list of them
    "softmax+softmax_conv+softmax_gate": 1,
    "softmax+softmax_conv": 2,
    "softmax-best": 3,
    "hybrid-best": 4,
    "linear-best": 3,
    "gla+short_conv": 1,
    "gla+gla_expand_k=1+short_conv": 2,
}


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: its own, or, in alphabetical order, a spare one."""
    names = sorted(set(names))
    spare = [name for name in names if name not in COLOURS]
    return {
        name: COLOURS.get(name) or SPARE_COLOURS[spare.index(name) % len(SPARE_COLOURS)] for name in names
    }


def line_styles(forms: Sequence[str]) -> list[dict[str, Any]]:
    """Colour, dashes and marker of a line for each of `forms`, whatever their order; no two are equal.

    A form that is not in `LOOKS`, and the second line of a form, take the first look of their colour that no
    other line of the figure has, in alphabetical order.
    """
    words = ([word.strip() for word in form.split("+")] for form in forms)
    names = ["+".join([attention, *sorted(options)]) for attention, *options in words]
    colour = colours(map(_attention, names))
    found: dict[int, tuple[str, int]] = {}  # index of the line → its colour and look
    in_order = sorted(range(len(names)), key=lambda i: (names[i], i))
    for i in in_order:
        own, look = colour[_attention(names[i])], LOOKS.get(names[i], None if "+" in names[i] else 0)
        if look is not None and (own, look) not in found.values():
            found[i] = own, look
    for i in [i for i in in_order if i not in found]:
        own = colour[_attention(names[i])]
        found[i] = own, next(look for look in itertools.count(1) if (own, look) not in found.values())
    return [
        {
            "color": shade(own, SHADES[look % len(SHADES)]),
            "linestyle": DASHES[look % len(DASHES)],
            "marker": MARKERS[look % len(MARKERS)],
        }
        for own, look in map(found.__getitem__, range(len(names)))
    ]


def shade(colour: str, part: float) -> str:
    """`colour` mixed with this part of white, or of black if it is negative; black becomes grey."""
    target = 255 if part > 0 or colour == COLOURS["softmax"] else 0
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(x + abs(part) * (target - x)):02X}" for x in channels)


def _attention(form: str) -> str:
    """The attention that the form has its colour from."""
    attention, *options = form.split("+")
    mixed = any(option == "softmax" or option.startswith("softmax_every=") for option in options)
    return "hybrid" if mixed else attention
