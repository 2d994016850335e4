"""What many tests begin with: a folder with a short path for Unix sockets, and the stand-in for NVIDIA's library."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import golden, standin
from tests.demo_process import demo, fetch
from tests.examples import FULL
from tests.machine import Node, short_directory
from tests.processes import PlainProcesses
from tests.prometheus import eventually
from tests.worker import Start, starting

# No law depends on how fast the machine is; some draw whole nodes, which takes its time.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.register_profile("full", _PATIENT, max_examples=FULL)
settings.register_profile("quick", _PATIENT, max_examples=FULL // 4)
settings.load_profile("quick")


@pytest.fixture(scope="session", autouse=True)
def share_snapshots(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let the processes of pytest-xdist share the snapshots of captures, in the folder of this run."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ[golden.SNAPSHOTS_FOLDER] = str(tmp_path_factory.getbasetemp().parent)


@pytest.fixture(name="demo_url", scope="module")
def run_demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running demo that has collected twice: it reports its squatter. Tests of a file share it and change nothing."""
    with demo(tmp_path_factory.mktemp("demo"), "--interval", "1s") as url:
        eventually(lambda: re.search('unassigned_use{.*pod="squatter"', fetch(f"{url}/metrics")[0]) is not None)
        yield url


@pytest.fixture(name="libraries", scope="session")
def make_libraries() -> Path:
    """Where stand-ins of all kinds are kept. Later runs compile only what has changed."""
    return standin.LIBRARIES


@pytest.fixture(name="library", scope="session")
def build_library(libraries: Path) -> Path:
    """The stand-in with all its functions."""
    return standin.build(libraries)


@pytest.fixture(name="directory")
def make_directory() -> Iterator[Path]:
    """Make a folder with a short path, and remove it after the test."""
    with short_directory() as directory:
        yield directory


@pytest.fixture(name="node")
async def make_node(directory: Path, library: Path) -> AsyncIterator[Node]:
    """A node with a kubelet that answers, and processes that are files, one of them of the host."""
    node = Node(directory, library, PlainProcesses(directory / "proc"))
    async with node.kubelet:
        node.processes.start("/system.slice/sshd.service")
        yield node


@pytest.fixture(name="start")
def make_start(libraries: Path, tmp_path: Path) -> Iterator[Start]:
    """Start workers over a stand-in, and end them after the test."""
    with starting(tmp_path / "state", libraries) as start:
        yield start
