"""The cost of a wrapping: units, buckets and the terms of the peak, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fairshard.planning.summary import UnitRow, unit_lines
from fairshard.utils.size_text import size_text
from fairshard.utils.table import table


@dataclass(frozen=True)
class MemoryTerm:
    """A part of the predicted peak; ``on_host`` if offload keeps it in host memory."""

    name: str
    nbytes: int
    on_host: bool = False


@dataclass(frozen=True)
class BucketRow:
    """A bucket of ``nbytes`` over all ranks, with the gradients of ``units``."""

    units: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class WrapPlan:
    """Predicted units, buckets and memory on each of ``world_size`` ranks.

    ``terms`` are the memory live at the peak, ``peak_at``, without activations and temporary memory inside an operator
    or the optimizer's step. They are within a tenth of what is measured.
    """

    world_size: int
    device: str
    units: tuple[UnitRow, ...]
    buckets: tuple[BucketRow, ...]
    terms: tuple[MemoryTerm, ...]
    peak_at: str

    @property
    def peak_nbytes(self) -> int:
        """Predicted peak on the compute device; on the CPU it includes offloaded memory."""
        return sum(term.nbytes for term in self.terms if not term.on_host or self.device == "cpu")

    @property
    def host_nbytes(self) -> int:
        """Additional bytes that offload keeps in host memory."""
        return 0 if self.device == "cpu" else sum(term.nbytes for term in self.terms if term.on_host)

    def __str__(self) -> str:
        buckets = [("bucket", "size", "units")]
        for number, bucket in enumerate(self.buckets):
            units = ", ".join(fqn or "(root)" for fqn in bucket.units)
            buckets.append((str(number), size_text(bucket.nbytes), units))
        total = size_text(sum(bucket.nbytes for bucket in self.buckets))
        buckets.append((f"{len(self.buckets)} in all", total, ""))
        terms = [(f"memory of a rank ({self.device})", "size")]
        terms += [
            (term.name + (", in host memory" if term.on_host else ""), size_text(term.nbytes)) for term in self.terms
        ]
        terms.append((f"peak, {self.peak_at}, without activations", size_text(self.peak_nbytes)))
        tables = unit_lines(self.units), table(buckets, "<><"), table(terms, "<>")
        return "\n\n".join("\n".join(lines) for lines in tables)

    def verdict(self, device_nbytes: int) -> str:
        """One line: whether a device of that much memory holds the peak."""
        fits = "yes" if self.peak_nbytes <= device_nbytes else "no"
        host = f", and {size_text(self.host_nbytes)} of host memory" if self.host_nbytes else ""
        return (
            f"fits in {size_text(device_nbytes)}: {fits}, {size_text(self.peak_nbytes)} at the worst moment, "
            f"{self.peak_at}{host}; activations are not counted"
        )

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data for JSON."""
        return {**asdict(self), "peak_nbytes": self.peak_nbytes, "host_nbytes": self.host_nbytes}
