"""GPUs that are on PCI and that NVML does not list: found for certain, or not at all."""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gpumap.agent.flags import add_flags
from gpumap.agent.service import join_settings_of
from gpumap.agent.settings import resolve
from gpumap.agent.sources.pci import RELIST_SECONDS, PciSource
from gpumap.cli.commands.doctor import doctor_checks
from gpumap.lab.capture import replay
from gpumap.lab.capture.format import About, Capture
from gpumap.lab.demo.scenario import load_scenario
from gpumap.lab.demo.texts import cgroup_text, stat_text
from gpumap.lab.demo.world import frame
from gpumap.model.check import check
from gpumap.model.device_ids import pci_address
from gpumap.model.node import Finding
from gpumap.model.observations import PciFunction, SourceError
from gpumap.model.snapshot import Snapshot
from tests.agent import PATIENCE_SECONDS, Agent, serve, until
from tests.machine import Node
from tests.nodes import GIB, Gpu, TestNode, gpu_uuid
from tests.pci import H100, add_function

GRACE = 120.0


def function(index: int, **values: str) -> PciFunction:
    plain = PciFunction(f"0000:{index:02x}:00.0", H100, "0x0302", "nvidia")
    return plain._replace(**values)


def machine() -> TestNode:
    """Three of four GPUs answer."""
    return TestNode([Gpu(0), Gpu(1), Gpu(2)], pci=[function(index) for index in range(4)])


def missing(snapshot: Snapshot) -> list[Finding]:
    return [finding for finding in snapshot.node.findings or () if finding.reason == "not_in_nvml"]


def watch(node: TestNode) -> Snapshot:
    for _ in range(int(GRACE / 30) + 1):
        snapshot = node.collect(30.0)
    return snapshot


def test_a_gpu_that_nvml_never_listed() -> None:
    """After --grace it is a fault with its address, since NVML did not list it. It is in no count of judged."""
    node = machine()
    first = node.collect(30.0)
    while node.clock < 1030.0 + GRACE - 1:
        assert not missing(node.collect(29.75))
    snapshot = node.collect(1.0)
    assert snapshot.node.timestamp - first.node.timestamp == GRACE, "at the limit it counts"
    (fault,) = missing(snapshot)
    assert (fault.finding, fault.uuid, fault.gpus) == ("fault", None, 1.0)
    assert fault.why == "1 GPU: on PCI, not in NVML (0000:03:00.0)"
    assert "RmInitAdapter" in (fault.remedy or "")
    assert fault.since == first.node.timestamp
    assert snapshot.node.judged["fault"] == 3
    assert check(snapshot.node) == check(snapshot.node, ["down"]) == (1, f"{fault.why}: see NVRM in dmesg")
    rows = {result.check: result for result in doctor_checks(snapshot.node)}
    assert rows["gpu/?"].why == f"not_in_nvml: {fault.why}"
    assert "pci" not in rows
    assert not missing(replace_gpus(node, Gpu(3)).collect()), "NVML lists it"


def replace_gpus(node: TestNode, *gpus: Gpu) -> TestNode:
    node.gpus = [*node.gpus, *gpus]
    return node


def with_function(**values: str) -> Callable[[TestNode], None]:
    def change(node: TestNode) -> None:
        node.pci = [*(node.pci or ())[:3], function(3, **values)]

    return change


def with_node(**values: object) -> Callable[[TestNode], None]:
    return lambda node: node.__dict__.update(values)


FOUND: dict[str, Callable[[TestNode], None]] = {
    "no driver bound": with_function(driver=""),
    "another kind that the driver has": with_function(device_id="0x20b5"),
    "a display controller of the same kind": with_function(class_code="0x0300"),
    "after the GPU was listed": lambda node: None,
}
NEVER: dict[str, Callable[[TestNode], None]] = {
    "passed through": with_function(driver="vfio-pci"),
    "to be passed through": with_function(driver="", driver_override="vfio-pci"),
    "bound, and to be passed through": with_function(driver_override="vfio-pci"),
    "nouveau": with_function(driver="nouveau"),
    "too old for the driver": with_function(driver="", device_id="0x1024"),
    "a display card of another kind": with_function(class_code="0x0300", device_id="0x1eb8"),
    "no other GPU in NVML and no driver": lambda node: node.__dict__.update(gpus=[], pci=[function(3, driver="")]),
    "kind": with_node(is_machine=False),
    "no PID visibility": with_node(visible=False),
    "no /proc": with_node(down={"procfs"}),
    "NVML is down": with_node(down={"nvml"}),
    "/sys is unreadable": with_node(down={"pci"}),
    "PCI was not read": with_node(pci=None),
    "only some GPUs, or --nvml-release": lambda node: node.__dict__.update(
        rules=replace(node.rules, why_not_on_pci="by the user's choice")
    ),
    "lost before the start": lambda node: node.gpus.append(Gpu(3, fault="lost")),
    "lost before the start, with its address": lambda node: node.gpus.append(
        Gpu(3, fault="lost", values={"pci_bus_id": "00000000:03:00.0"})
    ),
    "answers without an address": lambda node: node.gpus.append(Gpu(3, values={"pci_bus_id": ""})),
    "answers with an address that is not on PCI": lambda node: node.gpus.append(
        Gpu(3, values={"pci_bus_id": "00000001:03:00.0"})
    ),
}
UNJUDGED = {
    *("kind", "no PID visibility", "no /proc", "NVML is down", "/sys is unreadable", "PCI was not read"),
    "only some GPUs, or --nvml-release",
}


@pytest.mark.parametrize("life", FOUND)
def test_is_missing(life: str) -> None:
    node = machine()
    if life == "after the GPU was listed":
        node.gpus.append(Gpu(3))
        node.collect()
        node.gpus.pop()
    FOUND[life](node)
    assert [fault.gpus for fault in missing(watch(node))] == [1.0]


@pytest.mark.parametrize("life", NEVER)
def test_is_not_missing(life: str) -> None:
    """Whatever may have another cause is not found. `doctor` and the map have why nothing can be judged."""
    node = machine()
    NEVER[life](node)
    snapshot = watch(node)
    assert not missing(snapshot)
    rows = {result.check: result for result in doctor_checks(snapshot.node)}
    assert (snapshot.node.missing_gpus is None) == bool(snapshot.node.missing_gpus_reason) == (life in UNJUDGED)
    assert ("pci" in rows) == (life in UNJUDGED)
    if life in UNJUDGED:
        assert (rows["pci"].state, rows["pci"].why) == ("unknown", snapshot.node.missing_gpus_reason)


def test_gpus_that_nvml_counts_without_an_address() -> None:
    """One of three functions that NVML does not list may be the GPU without an address: two are missing."""
    node = machine()
    node.pci = [function(index) for index in range(6)]
    node.gpus.append(Gpu(3, fault="lost"))
    fault = missing(watch(node))[0]
    assert fault.gpus == 2.0
    assert fault.why.endswith("(of 0000:03:00.0, 0000:04:00.0, 0000:05:00.0)")
    assert check(watch(node).node).line.endswith("(+2 GPUs)"), "and the lost one"
    node.gpus.append(Gpu(4, fault="lost"))
    assert [fault.gpus for fault in missing(node.collect())] == [1.0]
    node.gpus.pop()
    assert [fault.gpus for fault in missing(node.collect())] == [1.0], "the other one waits for --grace again"


@pytest.mark.parametrize(
    "pause",
    [
        lambda node: node.down.add("nvml"),
        lambda node: node.down.add("pci"),
        lambda node: node.gpus.append(Gpu(3)),
        lambda node: with_function(driver="vfio-pci")(node),
        lambda node: setattr(node, "clock", node.clock + 600.0),
    ],
    ids=["nvml", "sys", "listed", "vfio", "suspended"],
)
def test_it_must_hold_in_each_collection(pause: Callable[[TestNode], None]) -> None:
    node = machine()
    for _ in range(4):
        node.collect(29.0)
    pause(node)
    node.collect(1.0)
    node.down, node.gpus[3:], node.pci = set(), [], machine().pci
    for _ in range(4):
        assert not missing(node.collect(29.0))
    assert "for less than 2m" in node.collect(1.0).node.missing_gpus_reason
    assert missing(watch(node))


def test_a_gpu_that_was_known_and_is_lost_is_one_fault() -> None:
    """NVML goes on counting it, without its address: gpumap remembers that."""
    node = machine()
    node.gpus.append(Gpu(3))
    node.collect()
    node.gpus[3] = Gpu(3, fault="lost")
    faults = [finding for finding in watch(node).node.findings or () if finding.finding == "fault"]
    assert [(fault.reason, fault.uuid) for fault in faults] == [("lost", gpu_uuid(3))]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("", ""),
        ("3b:00.0", ""),
        ("0000:3b:00.0\n", ""),
    ],
)
def test_addresses(text: str, address: str) -> None:
    """NVML and the kernel write them differently."""
    assert pci_address(text) == address


async def test_the_agent_finds_it(node: Node) -> None:
    """On the stand-in driver: NVML has three of four GPUs."""
    for index in range(4):
        add_function(node.sys, f"0000:{0x3B + index:02x}:00.0")
    pod = node.admit("trainer", main=[f"GPU-00000000-0000-0000-0000-{1:012d}"])
    node.run(pod.cgroup("main"), 1, GIB)
    kernel = node.processes.root / "2"
    kernel.mkdir()
    (kernel / "stat").write_text(stat_text(2, "kthreadd", 1))
    (kernel / "cgroup").write_text(cgroup_text("v1-cgroupfs", "/"))

    async def line(agent: Agent) -> str:
        return (await agent.get("/api/v1/check")).text

    async with serve(node, "--grace", "1s", library=node.library) as agent:
        await until(lambda: line(agent), lambda text: "(0000:3e:00.0)" in text, "the GPU was not found")


@pytest.mark.parametrize(
    ("flags", "variables", "can_judge"),
    [
        ((), {}, True),
        ((), {"NVIDIA_VISIBLE_DEVICES": "all"}, True),
        ((), {"NVIDIA_VISIBLE_DEVICES": "0,1"}, False),
        ((), {"NVIDIA_VISIBLE_DEVICES": "void"}, False),
        (("--nvml-release",), {}, False),
    ],
)
def test_what_hides_gpus_by_choice(flags: tuple[str, ...], variables: dict[str, str], can_judge: bool) -> None:
    """A container that has only some GPUs, and a driver that is released between collections."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert (join_settings_of(resolve(parser.parse_args(flags), variables)).why_not_on_pci == "") == can_judge


async def test_the_demo_shows_it(directory: Path) -> None:
    """The scenario `faults` has one, and so has a capture of it."""
    scenario = load_scenario(Path("faults"))
    frames = tuple(replace(frame(scenario, at - 5.0, at), offset_seconds=at) for at in range(0, 130, 5))
    found = (await replay.snapshots(Capture(About("faulty-node"), frames)))[-1]
    assert [fault.why.rpartition(" ")[2] for fault in missing(found)] == ["(0000:4b:00.0)"]


# --- the source -------------------------------------------------------------------------------------------------------


class Tree:
    """A /sys in plain files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seconds = 0.0
        self.source = PciSource(root, lambda: self.seconds)
        self.folder = root / "bus/pci/devices"
        self.add = partial(add_function, root)

    def read(self, *in_nvml: str) -> tuple[PciFunction, ...]:
        return asyncio.run(self.source.read(frozenset(in_nvml), 10.0)).value


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_the_source_reads_gpus_only(tree: Tree) -> None:
    """No bridges, audio functions, virtual functions and other vendors."""
    tree.add("0000:3b:00.0")
    tree.add("0000:3b:00.1", driver="snd_hda_intel", **{"class": "0x040300"})
    tree.add("0000:3b:00.4", physfn="0000:3b:00.0")
    tree.add("0000:01:00.0", driver="", **{"class": "0x068000"})
    tree.add("0000:02:00.0", driver="amdgpu", vendor="0x1002")
    tree.add("0000:5e:00.0", driver="", driver_override="vfio-pci", **{"class": "0x030000"})
    assert tree.read() == (
        PciFunction("0000:3b:00.0", H100, "0x0302", "nvidia"),
        PciFunction("0000:5e:00.0", H100, "0x0300", "", "vfio-pci"),
    )


def test_what_the_source_reads_again(tree: Tree) -> None:
    """Names once a minute; who has a function that NVML does not list, each time; of one that it lists, nothing."""
    tree.add("0000:3b:00.0")
    tree.add("0000:5e:00.0")
    assert [function.driver for function in tree.read("0000:5e:00.0")] == ["nvidia", ""]
    (tree.folder / "0000:3b:00.0/driver").unlink()
    tree.add("0000:86:00.0")
    (tree.folder / "0000:5e:00.0/driver").unlink()
    (tree.folder / "0000:5e:00.0/driver").symlink_to("../vfio-pci")
    assert [function.driver for function in tree.read()] == ["", "vfio-pci"]
    (tree.folder / "0000:5e:00.0").unlink()
    assert [function.address for function in tree.read()] == ["0000:3b:00.0"], "removed"
    tree.seconds = RELIST_SECONDS
    assert [function.address for function in tree.read()] == ["0000:3b:00.0", "0000:86:00.0"]


def test_no_sys(tree: Tree) -> None:
    with pytest.raises(SourceError) as error:
        tree.read()
    assert error.value.complaints[-1].detail == f"{tree.folder}: No such file or directory"


def test_a_read_that_hangs_delays_one_collection(tree: Tree) -> None:
    """The kernel may hold a lock of a device for long. The next collections do not wait for it."""
    tree.add("0000:3b:00.0")
    begun, ended = threading.Event(), threading.Event()

    def hang() -> float:
        begun.set()
        ended.wait()
        return 0.0

    async def ask() -> None:
        source = PciSource(tree.root, hang)
        first = asyncio.create_task(source.read(frozenset(), PATIENCE_SECONDS))
        await asyncio.to_thread(begun.wait)
        with pytest.raises(SourceError) as error:
            await source.read(frozenset(), PATIENCE_SECONDS)
        assert error.value.complaints[-1].reason == "deadline_exceeded"
        ended.set()
        assert (await first).value == (await source.read(frozenset(), PATIENCE_SECONDS)).value != ()
        source.close()

    asyncio.run(ask())
