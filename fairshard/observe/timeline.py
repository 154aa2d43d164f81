"""Pictures of a training step: `fairshard.extras.observe.timeline` under its public name."""

from fairshard.extras.observe.timeline import (
    Bar,
    Overlap,
    bars,
    draw_timeline,
    overlap,
    timeline,
    write_trace,
)

__all__ = ["Bar", "Overlap", "bars", "draw_timeline", "overlap", "timeline", "write_trace"]
