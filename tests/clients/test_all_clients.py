"""`make clients`: other people's trainers on fairshard and on torch's engine, in an environment with all packages."""

import pytest

from tests.clients.case import ENGINES
from tests.clients.table import cases, outcome, run_program


@pytest.mark.full
@pytest.mark.cpu_only("the clients' programs run on the CPU")
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_client_trains_in_processes_of_its_own(case):
    """Losses and norms agree within what the case allows; what torch's engine does not run either is skipped."""
    pytest.importorskip("torchtitan", reason="`make clients` has all packages")
    runs = [run_program(case.name, engine, case.world_size) for engine in ENGINES]
    said = outcome(case, *runs)
    if said == "does not run; nor does torch's engine":
        pytest.skip(f"{said}: {runs[0].error}")
    assert said.startswith(("equal", "runs; torch's engine does not")), (said, runs)
