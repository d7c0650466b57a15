"""Draws the picture in docs/kernel.md: which role reads what, when and from where (the sm_90a scan).

`python docs/kernel_picture.py` writes docs/kernel.svg in its own folder; with a path, it writes there, in the
format that the suffix names.
"""

import sys
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as Points

WIDTH, HEIGHT = 750, 640  # in points, counted from the upper left corner: 1000 pixels wide
INK, LINE, ACCENT = "#222222", "#555555", "#b03a5b"
DEVICE, SHARED, TILE = "#dbe7f3", "#e4f0dd", "#cbe2be"
TOKEN_STATS, SCORES, OUTPUTS, STATE = "#f5dfe7", "#e6e0f3", "#fdf0de", "#f8d9b0"


def box(x, y, width, height, colour, title="", *lines, left=False, edge=LINE, line=0.8):
    """Draws a box with a bold title; the text is centred, or starts at the upper left corner."""
    style = "round,pad=0,rounding_size=3"
    plt.gca().add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=colour, ec=edge, lw=line))
    if left:
        at, align, y, spacing = x + 9, "left", y + 15, 15.5
    else:
        at, align, y, spacing = x + width / 2, "center", y + height / 2 - 13.5 * len(lines) / 2, 13.5
    text(at, y, title, 9, align, weight="bold")
    for i, words in enumerate(lines, 1):
        text(at, y + spacing * i, words, 9, align)


def text(x, y, words, size=8.5, align="center", **more):
    plt.text(x, y, words, size=size, ha=align, va="center", **{"color": INK} | more)


def arrow(*points, both=False, colour=LINE):
    style = ("<|" if both else "") + "-|>,head_length=5,head_width=2.3"
    plt.gca().add_patch(FancyArrowPatch(path=Points(points), arrowstyle=style, fc=colour, ec=colour, lw=1.1))


def flow(start, end, y, words, at=466, both=False):
    arrow((start, y), (end, y), both=both)
    text(at, y - 8, words)


def draw_places():
    """Draws where data is kept and how it moves, for one chunk."""
    for x, head in ((77, "device memory"), (322, "shared memory"), (619, "registers and tensor cores")):
        text(x, 14, head, 11.5, weight="bold")

    box(12, 36, 130, 38, DEVICE, "norms, g, e", "4 bytes a token")
    rows = ("of a chunk of 64 tokens:", "strided views of the", "fused projection", "(dq, dk: also q or k)")
    box(12, 144, 130, 90, DEVICE, "rows a, b, c", *rows)
    box(12, 330, 130, 38, DEVICE, "y", "o, dq, dk or dv")
    box(12, 386, 130, 52, DEVICE, "scratch", "state before a segment,", "if there are several")

    for behind in (8, 4, 0):  # stages
        box(214 + behind, 86 + behind, 90, 214, SHARED)
    for y, words in ((99, "ring of 2 to 4"), (112.5, "stages"), (273, "16-bit,"), (286.5, "swizzled")):
        text(259, y, words, 9)
    for i, name in enumerate("ABC"):
        box(226, 124 + 46 * i, 66, 38, TILE, f"tile {name}")
    box(338, 116, 94, 58, SHARED, "σ τ ρ κ", "Σ τ c, Σ ζ b", "of each stage")
    box(338, 207, 94, 58, SHARED, "W", "of two chunks,", "16-bit")
    box(214, 330, 218, 38, SHARED, "y on its way out", "where a used tile was, or in its own place")

    x, width = 500, 238
    lines = "norms, σ τ ρ κ; for dq, also e", "RoPE of the tiles, in place", "running sums Σ τ c, Σ ζ b,"
    lines += ("in accumulators",)
    box(x, 36, width, 94, TOKEN_STATS, "token stats: what single tokens need", *lines, left=True)
    lines = "1   X = A Bᵀ  (wgmma)", "2   W = γⁱ⁻ʲ (ρ σ X + κ τ), masked, rounded"
    lines += "     to 16 bits; forward: normaliser g", "also copies tiles in and, backward, y out"
    box(x, 144, width, 94, SCORES, "scores: once for all columns", *lines, left=True)
    lines = "3   Yᵀ = state Aᵀ, scaled, + κ Σ τ c", "4   Yᵀ += Cᵀ Wᵀ"
    lines += "5   o = Y / g,  dv = Y;  dq and dk: back", "     through the norm and RoPE"
    box(x, 252, width, 186, OUTPUTS, "outputs: a warpgroup per 64 columns", *lines, left=True)
    lines = "fp32, in registers from the first chunk", "to the last"
    box(x + 8, 376, width - 16, 54, STATE, "6   state = γ⁶⁴ state + (σ C)ᵀ B", *lines)

    flow(142, 500, 55, "straight between device memory and registers", 322, both=True)
    flow(142, 214, 189, "asynchronous", 178)
    text(178, 198, "copies")
    flow(312, 500, 100, "A, B, C", both=True)
    flow(500, 432, 122, "σ τ ρ κ, sums")
    flow(432, 500, 160, "σ τ ρ κ, 1/g", both=True)
    flow(312, 500, 189, "A, B")
    flow(500, 432, 220, "W")
    flow(432, 500, 258, "W")
    arrow((338, 164), (325, 164), (325, 282), (500, 282))
    text(442, 274.5, "σ ρ κ, Σ τ c, 1/g")
    arrow((312, 297), (500, 297))
    text(466, 306, "A, B, C")
    flow(500, 432, 349, "y")
    flow(214, 142, 349, "16 bytes", 178)
    text(178, 358, "a thread")
    flow(142, 508, 412, "before the segment's first chunk", 322)


def draw_time():
    """Draws every role at work on its own chunk; bold: the path of one chunk, then the next in its stage."""
    text(12, 462, "All at the same time, a chunk apart", 11.5, "left", weight="bold")
    words = "red: a chunk is handed on at four mbarriers.  Four stages; with fewer, copies start later"
    text(738, 462, words, align="right")
    lanes = (
        ("copies", TILE, "full: tiles are there"),
        ("token stats", TOKEN_STATS, "ready: stats are done"),
        ("scores", SCORES, "scored: W is there"),
        ("outputs", OUTPUTS, "empty: stage is free"),
    )
    left, top, width, height, gap, step = 80, 480, 111, 22, 25.75, 37
    for lane, (role, colour, barrier) in enumerate(lanes):
        y = top + step * lane
        text(12, y + height / 2, role, 9, "left", weight="bold")
        for column in range(5):
            x, chunk = left + (width + gap) * column, column + 3 - lane
            edge = {"edge": ACCENT, "line": 1.8} if chunk in (3, 7) else {"edge": "#bbbbbb"}
            box(x, y, width, height, colour, **edge)
            text(x + width / 2, y + height / 2, f"chunk i + {chunk}" if chunk else "chunk i", 9)
        # From the box of chunk i + 3 to the next lane's, from the last lane to the first.
        right, start = left + (width + gap) * lane + width, y + height / 2
        end = top + step * ((lane + 1) % 4) + height / 2
        middle = right + gap / 2
        arrow((right, start), (middle, start), (middle, end), (right + gap, end), colour=ACCENT)
        below = top + step * min(lane, 2) + (height + step) / 2
        text(middle + 5, below, barrier, align="left", color=ACCENT)
    text(12, 627, "time", 9, "left")
    arrow((left, 627), (738, 627))


def main():
    here = Path(__file__).with_name("kernel.svg")
    path = Path(sys.argv[1]) if sys.argv[1:] else here
    plt.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "kernel", "font.family": "DejaVu Sans"})
    figure = plt.figure(figsize=(WIDTH / 72, HEIGHT / 72), facecolor="white")
    figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(HEIGHT, 0)).axis("off")
    draw_places()
    draw_time()
    figure.savefig(path, dpi=144, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
