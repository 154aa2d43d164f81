"""Two hosts, simulated by connected network namespaces of this one, train together under torchrun."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

pytestmark = pytest.mark.behaviour("two hosts")

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("two_hosts_run.py")


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)


@pytest.fixture
def hosts():
    """Names of two connected network namespaces and of their interfaces, with addresses 10.213.0.1 and 10.213.0.2."""
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("network namespaces need root and the command `ip`")
    names = [f"fs{os.getpid()}{side}" for side in "ab"]
    with ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
            for number, name in enumerate(names, 1):
                ip("-n", name, "address", "add", f"10.213.0.{number}/24", "dev", name)
                ip("-n", name, "link", "set", name, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"this machine makes no network namespaces: {getattr(error, 'stderr', None) or error}")
        yield names


# Six processes import torch: about 20 s on two cores.
@pytest.mark.full
@pytest.mark.cpu_only("starts processes of its own, on gloo")
def test_hybrid_sharding_follows_the_hosts(hosts, tmp_path):
    """Shards within a host and replicas across them, then shards across both: each trains as a plain replica does."""
    launched = []
    for number, name in enumerate(hosts):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        torchrun += ["--node-rank", str(number), "--master-addr", "10.213.0.1", "--master-port", "29500"]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        launched.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *torchrun, str(SCRIPT), str(tmp_path)],
                env={**os.environ, "GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=240)[0] for process in launched]
    finally:
        for process in launched:
            process.kill()
    assert [process.returncode for process in launched] == [0, 0], "\n".join(said)
    told = [list(map(int, (tmp_path / str(rank)).read_text().split())) for rank in range(4)]
    assert [host for _, host, _, _ in told] == [0, 0, 1, 1]
    networks = [network for network, _, _, _ in told]
    assert networks[0] == networks[1] != networks[2] == networks[3]
    within, across = told[0][2:]
    assert 1.8 * across < within <= 2 * across
