"""Every word of a picture is inside it, and covers no other."""

from dataclasses import asdict
from itertools import combinations

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from fairshard.cli.log import StepMetrics, draw_run, summarize
from fairshard.extras.observe.timeline import draw_timeline
from fairshard.extras.observe.unit_event import Phase, UnitEvent


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    figures = []
    save = Figure.savefig

    def saved(figure, path):
        save(figure, path)
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", saved)
    return figures


def faults(figure):
    """Words that are cut off, and pairs of words that cover each other."""
    renderer = figure.canvas.get_renderer()
    axes = [axis for one in figure.axes for axis in (one.xaxis, one.yaxis)]
    outside = [
        tick.label1
        for axis in axes
        for low, high in [sorted(axis.get_view_interval())]
        for tick in axis.get_major_ticks()
        if not low <= tick.get_loc() <= high  # not drawn
    ]
    words = [text for text in figure.findobj(Text) if text.get_text().strip() and text not in outside]
    places = [(text.get_text(), text.get_window_extent(renderer).padded(-1)) for text in words if text.get_visible()]
    cut = [text for text, box in places if not (figure.bbox.contains(*box.min) and figure.bbox.contains(*box.max))]
    return cut, [(a, b) for (a, one), (b, other) in combinations(places, 2) if one.overlaps(other)]


@pytest.mark.parametrize(
    ("num_steps", "num_ranks", "nbytes", "rate"),
    [(1, 2, 457e6, 3649.0), (3, 1, 1.02e9, 36.5), (400_000, 8, 62.5e9, 1_234_567.0), (300, 5, 999e6, 12_345_678.0)],
)
def test_words_of_a_run(num_steps, num_ranks, nbytes, rate, drawn, tmp_path):
    """Short and long runs, small and large numbers, and a title of many words."""
    sizes = (int(nbytes),) * num_ranks
    stride = max(1, num_steps // 10)
    lines = [{"step": 0, "val_loss": 11.5}, {"step": num_steps, "val_loss": 5.0}]
    for step in range(stride, num_steps + 1, stride):
        speed = rate * (1 + step % 3)
        lines.append(asdict(StepMetrics(step, 11 / step, 1e-5 * step, 1.0, 100, speed, 100 / rate, sizes, 3, 4)))
    summary, _ = summarize(lines, sizes, 4.1, False)
    title = "a model of transformers, " * 8 + "\n" + "some settings, " * 12
    draw_run(tmp_path / "run.png", title, lines, summary)
    assert faults(drawn[0]) == ([], [])


@pytest.mark.parametrize("num_ranks", [1, 6, 9])
def test_words_of_a_timeline(num_ranks, drawn, tmp_path):
    """A step of two seconds, in which 20 units are gathered, on few ranks and on more than there are colors."""
    events = []
    for index in range(20):
        for name, after in (("unshard", 0), ("unshard_wait", 1), ("unshard_wait_end", 2), ("forward", 2),
                            ("forward_end", 9), ("reshard", 9)):  # fmt: skip
            events.append(UnitEvent(f"layers.{index}", name, Phase.FORWARD, 0.1 * index + 0.01 * after))
    draw_timeline(tmp_path / "trace.png", [events] * num_ranks, "fairshard train, run, step 20")
    assert faults(drawn[0]) == ([], [])
    words = [text.get_text() for text in drawn[0].findobj(Text)]
    assert any("rank 0 waited 200 ms of the 400 ms with" in text for text in words)
    assert {text for text in words if text.endswith("compute")} == {
        f"rank {rank}  compute" for rank in range(num_ranks)
    }
