"""Options and markers of the test run, its skipped tests, and the shutdown of the rank pool."""

import functools
import os
from collections import Counter

import hypothesis
import pytest
import torch

from tests import sim
from tests.covering import leave_cells_to_full
from tests.kit import default_pool
from tests.sim import ranks
from tests.test_features import refuse_skip_of_a_row
from tests.torch_gaps import PREFIX, gap_of


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        default="cpu",
        help="device of the test ranks' models: cpu (gloo, default), cuda (NCCL, one GPU a rank), or another type of "
        "accelerator; sim is the simulated one of tests/sim, its order of work drawn from FAIRSHARD_SIM_SEED",
    )
    parser.addoption(
        "--ranks-per-device", type=int, default=1, help="ranks that share one accelerator; NCCL then uses sockets"
    )
    parser.addoption(
        "--strict-features", action="store_true", help="fail while a row of the page of compatibility says: not yet"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "full: every cell of a big matrix; runs with -m 'full or not full' only")
    config.addinivalue_line("markers", "pairs: without `full`, only cells that together hold every pair of parameters")
    config.addinivalue_line("markers", "behaviour(name): what the file is the one home of; see behaviours.md")
    config.addinivalue_line("markers", "gpu: what only a device can show; runs with --device only")
    config.addinivalue_line("markers", "cpu_only(reason): tests behaviour of gloo or of CPU memory only")
    # torch's store looks up the name of each rank that connects, and a DNS server may drop the question: 1 s, not 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
    hypothesis.settings.register_profile("fairshard", derandomize=True, deadline=None, max_examples=50)
    hypothesis.settings.load_profile("fairshard")
    config.option.markexpr = config.option.markexpr or "not full"
    pool = default_pool(config.getoption("--device"))
    if pool.device == "sim":
        if sim.why_missing():
            raise pytest.UsageError(f"--device sim {sim.why_missing()}")
        sim.build()
        pool.around = ranks.around()
    elif pool.device != "cpu":
        pool.run = functools.partial(_run_or_skip, pool.run, _max_ranks(config))


def _max_ranks(config):
    """The number of ranks that the devices have room for."""
    device = config.getoption("--device")
    if device == "sim":
        return float("inf")
    return torch.get_device_module(device).device_count() * config.getoption("--ranks-per-device")


def _run_or_skip(run, max_ranks, world_size, *args, **kwargs):
    """`RankPool.run`, for tests that ask for more ranks than there are devices without saying so in a parameter."""
    __tracebackhide__ = True
    if world_size > max_ranks:
        pytest.skip(f"needs {world_size} ranks, but the devices have room for {max_ranks}")
    return run(world_size, *args, **kwargs)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Skip a test that failed because of a gap of this torch; fail skipped ones of the page of compatibility."""
    report = yield
    gap = gap_of(str(report.longrepr)) if report.failed else ""
    if gap:
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] + 1, f"Skipped: {gap}")
    if report.skipped and item.config.getoption("--device") == "cpu" and PREFIX not in str(report.longrepr):
        refuse_skip_of_a_row(report)
    return report


def pytest_terminal_summary(terminalreporter, config):
    """With ``--device``, list the tests left out, by reason, and their share of those that take a device."""
    if config.getoption("--device") == "cpu" or config.option.collectonly:
        return
    skipped = terminalreporter.stats.get("skipped", [])
    total = sum(len(terminalreporter.stats.get(outcome, [])) for outcome in ("passed", "failed", "error", "skipped"))
    names = [(report.longrepr[2].removeprefix("Skipped: "), report.nodeid.split("[")[0]) for report in skipped]
    terminalreporter.section(f"{len(skipped)} of {total} tests left out ({len(skipped) / max(total, 1):.1%})")
    for (reason, name), num in sorted(Counter(names).items()):
        terminalreporter.line(f"{num:4} {name}: {reason}")


def pytest_unconfigure():
    default_pool().close()
    ranks.close()


@pytest.fixture
def shared_folder(tmp_path):
    """Path, as a string, of a folder that all ranks of a test see."""
    return str(tmp_path)


@pytest.hookimpl(tryfirst=True)  # before tests marked `full` are deselected
def pytest_collection_modifyitems(config, items):
    """Mark what only ``make test-all`` runs; on another device, skip what needs more of them or is about the CPU."""
    leave_cells_to_full(items)
    if config.getoption("--device") == "cpu":
        _deselect(config, items, [item for item in items if item.get_closest_marker("gpu")])
        return
    max_ranks = _max_ranks(config)
    if config.getoption("--device") == "sim":
        _deselect(config, items, [item for item in items if not _takes_device(item)])
    for item in items:
        world_size = getattr(item, "callspec", None) and item.callspec.params.get("world_size", 1)
        on_cpu = item.get_closest_marker("cpu_only")
        if on_cpu:
            (reason,) = on_cpu.args
            item.add_marker(pytest.mark.skip(reason=f"on the CPU only: {reason}"))
        elif (world_size or 1) > max_ranks:
            reason = f"needs {world_size} ranks, but the devices have room for {max_ranks}"
            item.add_marker(pytest.mark.skip(reason=reason))


def _deselect(config, items, left_out):
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _takes_device(item):
    """Whether a test runs on ranks, whose models are on the device; those of the simulator run anyway."""
    return "world_size" in getattr(getattr(item, "callspec", None), "params", {}) and "tests/sim/" not in item.nodeid


def pytest_collection_finish(session):
    """Start the ranks now, so that they import torch while the first tests run."""
    sizes = [item.callspec.params.get("world_size", 0) for item in session.items if hasattr(item, "callspec")]
    if not session.config.option.collectonly:
        default_pool().start(min(max(sizes, default=0), 3))
