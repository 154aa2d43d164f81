"""``fairshard plan --compare``: wrappings and placements side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairshard.cli.option_error import OptionError
from fairshard.cli.wrapping import check_policy
from fairshard.utils.size_text import size_text
from fairshard.utils.table import table

if TYPE_CHECKING:
    from fairshard.extras.planning.wrap_plan import WrapPlan

VARIANTS = ("none", "blocks", "blocks@row-blocks", "blocks@owned")
"""The wrappings that are compared if none is named."""

_MOST = 20


@dataclass(frozen=True)
class Variant:
    """A wrapping: values of ``--policy`` and ``--placement``."""

    policy: str
    placement: str

    def __str__(self) -> str:
        return self.policy if self.placement == "flat" else f"{self.policy}@{self.placement}"


def variants_of(names: Sequence[str], policy: str, placement: str) -> list[Variant]:
    """The variants ``names``, each ``POLICY`` or ``POLICY@PLACEMENT``; without names `VARIANTS` and ``policy``.

    Raises:
        OptionError: a policy has an unknown form, or there are too many.
    """
    if len(names) > _MOST:
        raise OptionError(f"--compare must have at most {_MOST} wrappings, but has {len(names)}.")
    found = []
    for name in names or VARIANTS:
        chosen, at, where = name.partition("@")
        check_policy("--compare", chosen)
        found.append(Variant(chosen, where if at else placement))
    if not names:
        found.append(Variant(policy, placement))
    return list(dict.fromkeys(found))


def variant_lines(variants: Sequence[Variant], plans: Sequence[WrapPlan], device_nbytes: int | None) -> list[str]:
    """A table of the variants, with a column that says which fit ``device_nbytes``; the last row is the smallest."""
    head = ["wrapping", "units", "largest unit", "buckets", "peak", "at the worst moment"]
    if device_nbytes is not None:
        head.append(f"fits in {size_text(device_nbytes)}")
    rows: list[Sequence[str]] = [head]
    least = min(range(len(plans)), key=lambda index: plans[index].peak_nbytes)
    named = [*zip(map(str, variants), plans, strict=True), (f"least: {variants[least]}", plans[least])]
    for name, plan in named:
        largest = size_text(max(unit.full_nbytes for unit in plan.units))
        peak = size_text(plan.peak_nbytes)
        row = [name, str(len(plan.units)), largest, str(len(plan.buckets)), peak, plan.peak_at]
        if device_nbytes is not None:
            row.append("yes" if plan.peak_nbytes <= device_nbytes else "no")
        rows.append(row)
    align = "<>>>><" + ("<" if device_nbytes is not None else "")
    device = plans[0].device
    return [*table(rows, align), f"memory of a rank ({device}), without activations"]
