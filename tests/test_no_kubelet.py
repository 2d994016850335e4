"""Machines without a kubelet (--no-kubelet): nothing is assigned there, and all is well without a kubelet."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings

from gpumap.agent.dialects import DIALECTS
from gpumap.agent.exposition import Exposition
from gpumap.agent.judgement.unjudged import NOTHING_ASSIGNED
from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.agent.published import published
from gpumap.cli.commands.doctor import doctor_checks, works
from gpumap.cli.commands.inspect import inspect_report
from gpumap.cli.commands.map import map_table
from gpumap.cli.commands.top import top_table
from gpumap.cli.commands.waste import waste_table
from gpumap.cli.rows import NodeMaps
from gpumap.cli.table import Shape
from gpumap.model.node import Node as SeenNode
from tests import standin
from tests.agent import PLAIN, Agent, run_agent, until
from tests.command import one_line, run_command, run_command_in_loop
from tests.examples import examples
from tests.generated import nodes as made_nodes
from tests.machine import GIB, Node, gpu_uuid
from tests.nodes import Gpu, Process, TestNode
from tests.nodes import gpu_uuid as made_uuid
from tests.processes import PlainProcesses
from tests.test_fleet import agree, target

LOCAL = ("serve", "map", "top", "waste", "inspect", "doctor")
OF_KUBELET = (
    ("--kubelet-root", "/k"),
    ("--kubelet-socket", "/k.sock"),
    ("--device-checkpoint", "/c"),
    ("--pods-api-socket", "/p.sock"),
    ("--pod-log-root", "/l"),
    ("--resource", "a"),
)
OWNERS = {"host", "unknown", "unaccounted", "sibling", "mps_server"}
ALLOCATION = ("gpumap_allocation_", "gpumap_container_", "gpumap_pod_info", "gpumap_unmatched_slots", "pod_and_gpu_map")
ALLOCATION_OF_DEVICES = ("gpumap_device_holders", "gpumap_device_slots_allocatable")


def workstation() -> TestNode:
    """Two GPUs, one used by a process of a user."""
    return TestNode([Gpu(0), Gpu(1)], [], [Process(10, made_uuid(0), None, sm=0.5)], has_kubelet=False)


def mapped(node: TestNode) -> SeenNode:
    node.collect()
    return published(node.collect(), collect=tuple(GROUPS))


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", OF_KUBELET, ids=lambda given: given[0])
def test_flags_about_the_kubelet_contradict_it(given: tuple[str, str]) -> None:
    flag, value = given
    line = one_line(run_command("doctor", "--no-kubelet", flag, value), 2)
    assert f"{flag} {value}: contradicts --no-kubelet" in line
    variable = "GPUMAP_" + flag.removeprefix("--").upper().replace("-", "_")
    line = one_line(run_command("map", GPUMAP_NO_KUBELET="1", **{variable: value}), 2)
    assert f"(from ${variable}={value}): contradicts --no-kubelet (from $GPUMAP_NO_KUBELET=1)" in line


def test_push_contradicts_it() -> None:
    """No kubelet allocates anything. To turn --push off changes nothing."""
    assert "--push: contradicts --no-kubelet" in one_line(run_command("serve", "--no-kubelet", "--push"), 2)
    contradicting = run_command("serve", "--no-kubelet", "--no-push", "--interval", "0s")
    assert "--interval" in one_line(contradicting, 2), "the next flag is read"


# --- what one collection gives ----------------------------------------------------------------------------------------


@given(made_nodes())
@settings(max_examples=examples(60))
def test_nothing_is_assigned(node: TestNode) -> None:
    """Whatever runs there: no allocation, no holder, no finding; the memory of a device is still divided."""
    node.has_kubelet = False
    node.collect()
    snapshot = node.collect()
    families = (*native(GROUPS, process_metrics=False), *(one for name in DIALECTS for one in DIALECTS[name].families))
    page = Exposition((*families, *self_families("0", "0"))).render(snapshot).decode()
    names = {line.split("{")[0].split(" ")[0] for line in page.splitlines() if not line.startswith("#")}
    assert not [name for name in names if name.startswith(ALLOCATION) or name in ALLOCATION_OF_DEVICES]
    assert {one.source for one in snapshot.node.sources} == {"nvml", "procfs"}
    assert not {"push", "pod_logs", "device_checkpoint"} & snapshot.node.capabilities.keys()
    for leaf in snapshot.node.devices:
        assert {use.owner.value for use in leaf.owners} <= OWNERS
        if leaf.memory is not None:
            assert sum(use.memory_bytes or 0 for use in leaf.owners) == leaf.memory.used_bytes
    made = published(snapshot)
    assert {one.finding for one in made.findings or ()} <= {"fault"}
    known = {"faults", "unexplained_bytes", "unexplained_gpus"}
    assert {value for name, value in made.finding_sums.items() if name not in known} <= {None}


@given(made_nodes())
@settings(max_examples=examples(20))
def test_a_server_shows_the_same(node: TestNode) -> None:
    """Its series have the same findings, and nothing is missing."""
    node.has_kubelet = False
    node.collect()
    snapshot = node.collect()
    agree(snapshot, target("a:1", node="n"), honour=True)


def test_doctor_finds_nothing() -> None:
    """Only NVML is required. There is nothing of the kubelet and its files."""
    checks = doctor_checks(mapped(workstation()))
    names = [one.check for one in checks]
    assert names == ["nvml", "procfs", "gpm", "pid_visibility", "process_utilization", "xid_events", "pci"]
    assert [one.check for one in checks if one.required] == ["nvml"]
    assert {one.state for one in checks if one.check not in ("gpm", "xid_events", "pci")} == {"ok"}
    assert works(checks)
    broken = workstation()
    broken.down = {"nvml"}
    assert not works(doctor_checks(mapped(broken)))


def test_tables_have_nothing_that_is_assigned() -> None:
    """Devices and their use; no columns of grants, no sentence that something is unknown or does not answer."""
    maps = NodeMaps((mapped(workstation()),))
    text = map_table(maps, Shape(wide=True))
    assert not {"SLOTS", "GPUS", "GRANTED", "RESOURCES"} & set(text.splitlines()[0].split())
    assert "not known" not in text
    assert "1.0GiB" in text
    assert "host" in top_table(maps, Shape())
    assert waste_table(maps, Shape()) == f"{NOTHING_ASSIGNED}\n"
    inspected = inspect_report(details=False, used=True)
    assert "this machine has no kubelet (--no-kubelet): nothing is assigned" in inspected.table(maps, Shape())


# --- a running agent --------------------------------------------------------------------------------------------------


@pytest.fixture(name="node")
def make_node(directory: Path, library: Path) -> Node:
    """A machine without a kubelet and without its files."""
    node = Node(directory, library, PlainProcesses(directory / "proc"))
    for folder in ("kubelet", "log"):
        shutil.rmtree(directory / folder)
    node.processes.start("/../../../system.slice/sshd.service")  # PID visibility: outside any container of gpumap
    return node


def flags(node: Node) -> list[str]:
    return ["--no-kubelet", "--proc", str(node.processes.root), "--nvml-library", str(node.library)]


@contextlib.asynccontextmanager
async def running(node: Node, *given: str) -> AsyncIterator[Agent]:
    variables = standin.environment(node.library, node.state)
    options = ("--interval", "200ms", "--stale-after", "1s", *given)
    async with run_agent("serve", *options, client=PLAIN, **variables) as agent:
        yield agent


async def test_an_agent_is_ready_by_nvml(node: Node) -> None:
    """It serves the devices and the host's use; ready while NVML answers, and its log never names a kubelet."""
    node.run("/user.slice/user-1000.slice/session-3.scope", 0, 3 * GIB)
    async with running(node, *flags(node)) as agent:
        page = await agent.until(lambda page: page.up("nvml"), "NVML is down")
        assert page.by("gpumap_source_up", "source") == {"nvml": 1, "procfs": 1}
        assert page.by("gpumap_device_processes", "owner", uuid=gpu_uuid(0)) == {"host": 1, "unknown": 0}
        assert page.capable("pid_visibility")
        assert page.samples.get("gpumap_device_holders") is None
        assert (await agent.get("/readyz")).status == 200
        node.driver.fail["*", "*"] = standin.Code.UNKNOWN
        node.driver.init_code = standin.Code.UNKNOWN
        node.update_driver()

        async def status() -> int:
            return (await agent.get("/readyz")).status

        assert await until(status, lambda status: status == 503, "it is ready without NVML") == 503
        assert "kubelet" not in (await agent.get("/readyz")).text
        log = agent.log
    assert "kubelet" not in log
    assert "push" not in log


@pytest.mark.parametrize("command", LOCAL[1:])
async def test_commands_on_the_machine(node: Node, command: str) -> None:
    """Each that collects here takes --no-kubelet, and ends with 0."""
    node.run("/user.slice/user-1000.slice/session-3.scope", 0, 3 * GIB)
    variables = standin.environment(node.library, node.state)
    done = await run_command_in_loop(command, *flags(node), **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert "does not answer" not in done.stdout
    assert "3.0GiB" in done.stdout or command in ("waste", "inspect", "doctor")


async def test_a_forgotten_flag_is_named(node: Node) -> None:
    """Without the socket and the kubelet's root, doctor and the log name --no-kubelet."""
    forgotten = ["--kubelet-root", str(node.directory / "none"), "--proc", str(node.processes.root)]
    forgotten += ["--device-checkpoint", str(node.directory / "none"), "--nvml-library", str(node.library)]
    hint = f"and no {node.directory / 'none'}: if this machine has no kubelet, set --no-kubelet"
    variables = standin.environment(node.library, node.state)
    done = await run_command_in_loop("doctor", *forgotten, **variables)
    assert done.returncode == 1
    assert hint in done.stdout
    async with running(node, *forgotten) as agent:
        await agent.until(lambda page: page.up("nvml"), "NVML is down")
        assert agent.log.count(hint) == 1
    (node.directory / "none").mkdir()
    done = await run_command_in_loop("doctor", *forgotten, **variables)
    assert "--no-kubelet" not in done.stdout


async def test_a_container_beside_gpumaps_own(node: Node) -> None:
    """With a kubelet, a sibling of gpumap's container may be of its own pod: its owner is not known. Here it is not."""
    node.run(f"/../docker-{64 * 'a'}.scope", 0, GIB)
    async with running(node, *flags(node)) as agent:
        page = await agent.until(lambda page: page.up("nvml"), "NVML is down")
        assert page.by("gpumap_device_processes", "owner", uuid=gpu_uuid(0)) == {"host": 1, "unknown": 0}
