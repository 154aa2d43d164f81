"""Draws the pictures of the docs: ``python docs/drawings.py`` writes ``_static/NAME.svg``; the tests compare.

Colours are variables of the page (`fairshard.css`), each with the light theme's value for a viewer that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

STATIC = Path(__file__).parent / "_static"

COLORS = {
    "rank0": "#cfe3ff",
    "rank1": "#cdeed6",
    "rank2": "#f6dcf1",
    "warm": "#ffe3c2",
    "plain": "#f3f4f6",
    "stop": "#ffd3d3",
    "edge": "#475569",
    "text": "#1f2937",
    "quiet": "#64748b",
}
RANKS = ("rank0", "rank1", "rank2")


def color(name: str) -> str:
    """The CSS value of a colour."""
    return f"var(--fs-{name}, {COLORS[name]})"


class Picture:
    """An SVG of ``width`` by ``height``, to which parts are added."""

    def __init__(self, name: str, width: int, height: int) -> None:
        self.name, self.width, self.height = name, width, height
        self.parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        text: str = "",
        fill: str = "plain",
        size: int = 13,
        dash: bool = False,
    ) -> None:
        """A box with a centred text of one or more lines."""
        dashes = ' stroke-dasharray="4 3"' if dash else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{color(fill)}" '
            f'stroke="{color("edge")}"{dashes}/>'
        )
        lines = text.split("\n") if text else []
        for index, line in enumerate(lines):
            below = size * (0.35 + 1.25 * (index - (len(lines) - 1) / 2))
            self.text(x + w / 2, y + h / 2 + below, line, size=size)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "middle",
        size: int = 13,
        bold: bool = False,
        quiet: bool = False,
    ) -> None:
        """One line of text; ``y`` is its baseline."""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight} '
            f'fill="{color("quiet" if quiet else "text")}">{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float], label: str = "", dash: bool = False, above: bool = True) -> None:
        """A line through ``points`` with a head at the last one; the label is at the middle of the first stretch."""
        dashes = ' stroke-dasharray="4 3"' if dash else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color("edge")}" stroke-width="1.5"{dashes} '
            f'marker-end="url(#{self.name}-head)"/>'
        )
        if label:
            (x0, y0), (x1, y1) = points[:2]
            self.text((x0 + x1) / 2, (y0 + y1) / 2 + (-6 if above else 16), label, size=12)

    def line(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """A thin dashed line."""
        self.parts.append(
            f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{color("quiet")}" stroke-dasharray="3 3"/>'
        )

    def svg(self) -> str:
        """The file."""
        head = (
            f'<defs><marker id="{self.name}-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{color("edge")}"/></marker></defs>'
        )
        start = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            'font-family="Helvetica, Arial, sans-serif">'
        )
        return "\n".join([start, head, *self.parts, "</svg>", ""])


def step() -> Picture:
    """Three ranks while the second of four layers computes."""
    pic = Picture("step", 760, 225)
    for rank, fill in enumerate(RANKS):
        left = 20 + 250 * rank
        pic.text(left + 110, 24, f"rank {rank}", bold=True, size=15)
        for layer in range(4):
            top = 40 + 46 * layer
            whole = layer == 1
            pic.box(left, top, 220, 34, dash=not whole)
            if whole:
                for part, own in enumerate(RANKS):
                    pic.box(left + 220 / 3 * part, top, 220 / 3, 34, fill=own)
            else:
                pic.box(left + 220 / 3 * rank, top, 220 / 3, 34, fill=fill)
            middle = 110 if whole else 185 if rank < 2 else 37
            pic.text(left + middle, top + 22, f"layer {layer}", quiet=not whole)
    return pic


def schedule() -> Picture:
    """A forward and a backward of three units: what is gathered, computed and reduced when."""
    pic = Picture("schedule", 820, 245)
    lanes = {"gather": 40, "compute": 90, "reduce": 140}
    for name, y in lanes.items():
        pic.text(10, y + 22, name, anchor="start", bold=True)
        pic.line(80, y + 37, 810, y + 37)
    unit = ("rank0", "rank1", "rank2")
    wide = 62

    def put(lane: str, slot: float, index: int, text: str, width: float = 1.0) -> None:
        pic.box(85 + slot * wide, lanes[lane], width * wide - 4, 30, text, fill=unit[index])

    for index in range(3):
        put("gather", index, index, str(index))
        put("compute", 1 + index, index, f"fwd {index}")
    for place, index in enumerate((2, 1, 0)):
        put("gather", 4.2 + 1.8 * place - (0.9 if place else 0), index, str(index), 0.9)
        put("compute", 5.1 + 1.8 * place, index, f"backward {index}", 1.8)
        put("reduce", 6.9 + 1.8 * place, index, str(index), 1.2)
    pic.text(85 + 2.2 * wide, 24, "forward", size=14)
    pic.text(85 + 7.4 * wide, 24, "backward", size=14)
    pic.line(85 + 4.1 * wide, 12, 85 + 4.1 * wide, 182)
    says = "While a unit computes, the next one is gathered; a unit is freed when it has computed."
    pic.text(85, 205, says, anchor="start")
    pic.text(85, 227, "Its gradients are reduced while the next unit computes. The unit around all stays gathered.",
             anchor="start")
    return pic


def life() -> Picture:
    """A line of two parameters cut among three ranks, and the path of a step on rank 1."""
    pic = Picture("life", 760, 470)
    pic.text(10, 42, "line", anchor="start", size=14, bold=True)
    parts = ((110, 450, "weight (18)", "rank0"), (560, 75, "bias (3)", "warm"), (635, 75, "padding", "plain"))
    for x, width, text, fill in parts:
        pic.box(x, 22, width, 30, text, fill=fill)
    pic.text(10, 92, "shards", anchor="start", size=14, bold=True)
    for rank, fill in enumerate(RANKS):
        pic.box(110 + 200 * rank, 72, 200, 30, f"rank {rank}: S = 8", fill=fill)
    for x in (110, 310, 510, 710):
        pic.line(x, 14, x, 108)
    pic.text(10, 142, "On rank 1, in a step", anchor="start", size=14, bold=True)
    pic.box(10, 220, 130, 40, "shard [S] fp32", fill="rank1")
    pic.text(315, 170, "buffer [W, S] bf16")
    for rank, fill in enumerate(RANKS):
        pic.box(240, 180 + 40 * rank, 150, 40, f"row {rank}", fill=fill)
        pic.box(240, 353 + 32 * rank, 150, 32, f"to rank {rank}", fill=fill)
        pic.box(390, 353 + 32 * rank, 80, 32, "next unit", size=11)
    pic.arrow((140, 240), (238, 240), label="cast")
    for rank, y in ((0, 200), (2, 280)):
        pic.arrow((216, y), (240, y))
        pic.text(212, y + 4, f"rank {rank}", anchor="end", size=12)
    pic.arrow((390, 240), (468, 240), label="views")
    pic.text(525, 188, "leaves")
    pic.box(470, 200, 110, 30, "weight", fill="rank0")
    pic.box(470, 245, 110, 30, "bias", fill="warm")
    pic.arrow((580, 238), (640, 238))
    pic.box(642, 210, 105, 55, "compute")
    pic.text(355, 343, "bucket [W, width]")
    pic.arrow((694, 265), (694, 399))
    pic.box(642, 401, 105, 34, ".grad")
    pic.arrow((640, 418), (474, 401), label="one copy, cast")
    pic.arrow((238, 401), (142, 401), label="reduce-scatter")
    pic.text(190, 419, "divide by W", size=12)
    pic.box(10, 381, 130, 40, "shard.grad [S]", fill="rank1")
    pic.arrow((75, 379), (75, 263))
    pic.text(82, 325, "optimizer", anchor="start", size=12)
    return pic


def layouts() -> Picture:
    """A weight of 5 rows of 4 and a bias of 5 on three ranks, cut in four ways: a colour is a rank."""
    pic = Picture("layouts", 800, 270)
    ways: list[tuple[str, Callable[[int], int], Callable[[int], int], str]] = [
        ("flat", lambda i: i // 9, lambda i: (20 + i) // 9, "anywhere"),
        ("Shard(0)", lambda i: i // 4 // 2, lambda i: i // 2, "between rows"),
        ("RowBlocks(1)", lambda i: (0, 0, 0, 1, 1)[i // 4], lambda i: (1, 1, 1, 1, 2)[i], "between blocks of rows"),
        ("Owned()", lambda i: 0, lambda i: 1, "between parameters"),
    ]
    for column, (title, weight, bias, where) in enumerate(ways):
        left = 20 + 195 * column
        pic.text(left + 80, 24, title, bold=True, size=15)
        pic.text(left + 80, 44, where, quiet=True)
        pic.text(left + 52, 68, "weight", size=12)
        pic.text(left + 143, 68, "bias", size=12)
        for i in range(20):
            pic.box(left + 26 * (i % 4), 76 + 26 * (i // 4), 26, 26, f"w{i // 4}", fill=RANKS[weight(i)], size=10)
        for i in range(5):
            pic.box(left + 130, 76 + 26 * i, 26, 26, f"b{i}", fill=RANKS[bias(i)], size=10)
    for rank, fill in enumerate(RANKS):
        pic.box(250 + 110 * rank, 228, 22, 22, fill=fill)
        pic.text(280 + 110 * rank, 244, f"rank {rank}", anchor="start")
    return pic


def streams() -> Picture:
    """The streams of a backward on an accelerator, and what waits for what."""
    pic = Picture("streams", 800, 345)
    lanes = {"host": 40, "unshard": 95, "compute": 150, "reduce": 205, "copy to host": 260}
    for name, y in lanes.items():
        pic.text(10, y + 21, name, anchor="start", bold=True)
        pic.line(110, y + 37, 790, y + 37)
    for k in range(4):
        pic.box(115 + 60 * k, lanes["host"], 52, 30, "issue", size=11)
    says = "the host runs ahead, and waits for no stream"
    pic.text(370, lanes["host"] + 20, says, anchor="start", quiet=True, size=12)
    pic.box(130, lanes["unshard"], 100, 30, "gather 1", fill="rank1")
    pic.box(330, lanes["unshard"], 100, 30, "gather 0", fill="rank0")
    pic.box(130, lanes["compute"], 150, 30, "backward 2", fill="rank2")
    pic.box(290, lanes["compute"], 190, 30, "backward 1", fill="rank1")
    pic.box(490, lanes["compute"], 150, 30, "backward 0", fill="rank0")
    pic.box(330, lanes["reduce"], 120, 30, "reduce 2", fill="rank2")
    pic.box(530, lanes["reduce"], 120, 30, "reduce 1", fill="rank1")
    pic.box(480, lanes["copy to host"], 110, 30, "sum of 2", fill="rank2", dash=True)
    pic.box(670, lanes["copy to host"], 110, 30, "sum of 1", fill="rank1", dash=True)
    pic.arrow((230, 110), (300, 110), (300, 148))  # compute waits for the gather
    pic.arrow((284, 150), (284, 125), (328, 125), dash=True)  # the gather waits for memory
    pic.arrow((282, 165), (286, 165), (286, 220), (328, 220))
    pic.arrow((430, 110), (500, 110), (500, 148))
    pic.arrow((482, 180), (482, 220), (528, 220))
    pic.arrow((450, 220), (465, 220), (465, 275), (478, 275))
    pic.arrow((650, 220), (660, 220), (660, 275), (668, 275))
    pic.text(110, 316, "Arrows: waits between streams. Dashed arrow: a gather waits until memory is free.",
             anchor="start", size=12)
    pic.text(110, 333, "Dashed boxes: with offload only.", anchor="start", size=12)
    return pic


def checkpoints() -> Picture:
    """The five steps of a save, and which checkpoint `latest` names if a rank is killed between them."""
    pic = Picture("checkpoints", 860, 260)
    steps = (
        "copy to\nhost memory",
        "write files\n.tmp-step-20",
        "sync to the\ndisk, rename",
        "latest names\nstep-20",
        "remove\nstep-10",
    )
    notes = ("training waits", "in the background", "whole or absent", "atomically", "if keep_last says so")
    for index, (text, note) in enumerate(zip(steps, notes, strict=True)):
        left = 10 + 170 * index
        pic.box(left, 50, 130, 54, text, fill="rank0" if index < 3 else "rank1")
        pic.text(left + 65, 124, note, quiet=True, size=12)
        if index:
            pic.arrow((left - 40, 77), (left - 2, 77))
    pic.text(10, 28, "A save of step 20, while step 10 is the newest", anchor="start", bold=True, size=14)
    pic.text(10, 170, "Killed here, a run continues from", anchor="start", bold=True, size=14)
    pic.box(10, 184, 505, 34, "step 10", fill="warm")
    pic.box(520, 184, 300, 34, "step 20", fill="rank1")
    says = "At every moment one whole checkpoint exists, and latest names a whole one."
    pic.text(10, 244, says, anchor="start")
    return pic


PICTURES: Sequence[Callable[[], Picture]] = (step, schedule, life, layouts, streams, checkpoints)


def main() -> None:
    """Write all pictures."""
    for draw in PICTURES:
        pic = draw()
        (STATIC / f"{pic.name}.svg").write_text(pic.svg())


if __name__ == "__main__":
    main()
