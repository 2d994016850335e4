"""`gpumap serve` as it runs: over a real socket, a driver's library, files, and processes in cgroups of their own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumap.agent.metrics import GROUPS, native
from gpumap.agent.sources import processes
from gpumap.agent.sources.procfs import ProcfsSource
from gpumap.model import cgroups
from gpumap.model.observations import PodCgroup
from tests.agent import serve
from tests.command import run_command_in_loop
from tests.demo_process import GPUMAP
from tests.exposed import Page
from tests.machine import GIB, MIB, Node, Pod, gpu_uuid, new_container_id, new_uid
from tests.processes import HostProcesses, NoCgroupsError, PlainProcesses, Processes, RealProcesses
from tests.standin import Code

SHARED, WHOLE, OTHER = (gpu_uuid(index) for index in range(3))
USED = "gpumap_container_gpu_memory_used_bytes"
OWNED = "gpumap_device_memory_used_by_owner_bytes"
HOST = "/system.slice/sshd.service"


@pytest.fixture(name="real")
def make_real_processes() -> Iterator[RealProcesses]:
    try:
        processes = RealProcesses()
    except NoCgroupsError as error:
        pytest.skip(str(error))
    try:
        yield processes
    finally:
        processes.close()


@pytest.fixture(name="node", params=["files", "cgroups"])
async def make_any_node(request: pytest.FixtureRequest, directory: Path, library: Path) -> AsyncIterator[Node]:
    """A node with processes that are files of a plain tree, and once more with real ones in real cgroups."""
    processes: Processes = (
        PlainProcesses(directory / "proc") if request.param == "files" else request.getfixturevalue("real")
    )
    node = Node(directory, library, processes)
    async with node.kubelet:
        yield node


@pytest.fixture(name="plain")
async def make_plain_node(directory: Path, library: Path) -> AsyncIterator[Node]:
    """A node with processes that are files."""
    node = Node(directory, library, PlainProcesses(directory / "proc"))
    async with node.kubelet:
        yield node


def own_cgroup() -> str:
    """What gpumap's own /proc/self/cgroup will have, as it is started from here."""
    return Path("/proc/self/cgroup").read_text()


def share(node: Node) -> tuple[Pod, Pod, Pod]:
    """One card of four slots: an idle pod, one with two containers, and one that uses more than its quarter."""
    idle = node.admit("idle", main=[f"{SHARED}::0"])
    pair = node.admit("pair", left=[f"{SHARED}::1"], right=[f"{SHARED}::2"])
    greedy = node.admit("greedy", main=[f"{SHARED}::3"])
    node.run(pair.cgroup("left"), 0, 2 * GIB)
    node.run(pair.cgroup("right"), 0, 3 * GIB)
    node.run(pair.cgroup("right"), 0, 5 * MIB)
    node.run(greedy.cgroup("main"), 0, 50 * GIB, sm_percent=30)
    node.run(HOST, 0, 7 * MIB)
    return idle, pair, greedy


def on_shared_card(page: Page, name: str) -> dict[tuple[str, str], float]:
    """A container family's values on GPU 0, by pod and container."""
    rows = page.samples.get(name, {})
    labels = {row: dict(row) for row in rows}
    return {(labels[row]["pod"], labels[row]["container"]): rows[row] for row in rows if labels[row]["uuid"] == SHARED}


THEIR_BYTES = {
    ("idle", "main"): 0,
    ("pair", "left"): 2 * GIB,
    ("pair", "right"): 3 * GIB + 5 * MIB,
    ("greedy", "main"): 50 * GIB,
}


async def test_a_shared_card_is_reported_by_container(node: Node) -> None:
    """Three pods share a card: each container has its own bytes, the idle one 0, and owners add up to the device."""
    share(node)
    async with serve(node) as agent:
        page = await agent.until(lambda page: len(on_shared_card(page, USED)) == 4, "not all four are measured")
        assert on_shared_card(page, USED) == THEIR_BYTES
        assert on_shared_card(page, "gpumap_container_gpu_processes")["pair", "right"] == 2
        assert set(on_shared_card(page, "gpumap_container_allocated_gpus").values()) == {0.25}
        assert on_shared_card(page, "gpumap_container_allocated_gpu_memory_bytes") == {}
        assert not on_shared_card(page, "gpumap_container_unassigned_use")
        owners = page.by(OWNED, "owner", uuid=SHARED)
        assert (owners["assigned"], owners["host"], owners["unaccounted"]) == (
            sum(THEIR_BYTES.values()),
            7 * MIB,
            64 * MIB,
        )
        assert sum(owners.values()) == page.value("gpumap_device_memory_used_bytes", uuid=SHARED)
        assert page.capable("pid_visibility")
        page = await agent.until(
            lambda page: on_shared_card(page, "gpumap_container_sm_utilization_ratio").get(("greedy", "main")) == 0.3,
            "its time on the SMs is not reported",
        )
        assert on_shared_card(page, "gpumap_container_sm_utilization_ratio")["idle", "main"] == 0


async def test_docker_in_a_pod_is_use_of_the_pod(plain: Node) -> None:
    """Its containers are at the host's root, but their parents are in the pod, which has their use."""
    runner = plain.admit("runner", dind=[WHOLE], build=[])
    plain.admit("resting", main=[OTHER])
    pid = plain.processes.start_child(f"/docker/{'d' * 64}", runner.cgroup("dind"))
    plain.use(pid, 1, 2 * GIB, sm_percent=40)
    labels = {"pod": "runner", "container": "dind", "uuid": WHOLE}

    def pods_with_findings(page: Page) -> set[str]:
        return set(page.by("gpumap_finding_since_timestamp_seconds", "pod"))

    async with serve(plain, "--idle-after", "600ms") as agent:
        page = await agent.until(
            lambda page: (
                "resting" in pods_with_findings(page)
                and page.value("gpumap_container_sm_utilization_ratio", **labels) == 0.4
            ),
            "no pod is idle, or the other one has no SM time",
        )
        assert pods_with_findings(page) == {"resting"}
        assert page.value(USED, **labels) == 2 * GIB
        assert page.value("gpumap_container_gpu_processes", **labels) == 1
        assert page.by(OWNED, "owner", uuid=WHOLE)["host"] == 0
        assert page.rows("gpumap_host_gpu_memory_used_bytes") == []


def test_a_real_parent_in_a_pods_cgroup_decides(real: RealProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent is read once for each process. When it ends, its child gets another one, and stays in the pod."""
    uid, container_id = new_uid(), new_container_id()
    docker = f"/gpumap-{container_id[:8]}"
    child = real.start_child(f"{docker}/{container_id}", f"/kubepods/besteffort/pod{uid}/{container_id}")
    source = ProcfsSource(real.root)
    if not source.read([], None).value.pid_visibility:
        pytest.skip("processes of others are not visible here")
    monkeypatch.setattr(processes, "REREAD_SECONDS", 1e-9)
    pods = [PodCgroup(uid, container_id)]
    assert [list(entry.cgroup.pods) for entry in source.read([child], 1 << 60).value.entries] == [pods]
    (parent,) = source.ancestors.pids(child)
    real.end(parent)
    real.move(child, docker)
    assert [list(entry.cgroup.pods) for entry in source.read([child], 1 << 60).value.entries] == [pods]
    source.close()


async def test_a_blackwell_gpu_has_sm_time(plain: Node) -> None:
    """Its driver refuses the old call for process samples."""
    pods = {gpu: plain.admit(f"on-{gpu}", main=[gpu_uuid(gpu)]) for gpu in (1, 2)}
    for gpu, pod in pods.items():
        plain.run(pod.cgroup("main"), gpu, 5 * GIB, sm_percent=40)
    plain.driver.fail["nvmlDeviceGetProcessUtilization", 2] = Code.NOT_SUPPORTED
    plain.update_driver()
    names = "gpumap_container_sm_utilization_ratio", "gpumap_container_sm_seconds_total"

    def measured(page: Page) -> bool:
        found = [[page.value(name, pod=f"on-{gpu}", uuid=gpu_uuid(gpu)) for name in names] for gpu in pods]
        return all(sm == 0.4 and seconds for sm, seconds in found)

    async with serve(plain) as agent:
        await agent.until(measured, "the two pods have no SM time")
        document = json.loads(await printed("map", "-o", "json", "--url", agent.url))
        assert [gpu["samples_from"] for gpu in document["gpus"][1:]] == [
            "nvmlDeviceGetProcessUtilization",
            "nvmlDeviceGetProcessesUtilizationInfo",
        ]


async def test_map_shows_what_a_running_agent_knows(plain: Node) -> None:
    """`gpumap map --url` shows the same bytes as /metrics, as JSON and as a table."""
    share(plain)
    async with serve(plain) as agent:
        await agent.until(lambda page: len(on_shared_card(page, USED)) == 4, "not all four are measured")
        document = json.loads(await printed("map", "-o", "json", "--url", agent.url))
        device = next(device for device in document["devices"] if device["uuid"] == SHARED)
        uses = {(one["pod"], one["container"]): one["use"]["memory_bytes"] for one in device["containers"]}
        assert uses == THEIR_BYTES
        assert sum(owner["memory_bytes"] for owner in device["owners"]) == device["memory"]["used_bytes"]
        table = await printed("map", "--url", agent.url)
        row = next(line.split() for line in table.splitlines() if " greedy " in line)
        assert row == ["ml", "greedy", "main", "1", "0.25", "-", "50.0GiB", row[7], "assigned"]


async def printed(*arguments: str) -> str:
    """What the command prints, which succeeds and warns of nothing."""
    done = await run_command_in_loop(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


async def test_a_new_pid_namespace_sees_no_containers(directory: Path, library: Path, real: RealProcesses) -> None:
    """gpumap in a pod without hostPID: with a /proc of its own, and with the host's /proc mounted."""
    node = Node(directory, library, real)
    pod = node.admit("whole", main=[WHOLE])
    node.run(pod.cgroup("main"), 1, 11 * GIB)
    exporter = node.admit("gpumap", "monitoring", main=[])
    unshare = [*real.entering(exporter.cgroup("main")), "unshare", "--pid", "--fork", "--kill-child"]
    async with node.kubelet:
        for parent, reason in (([*unshare, "--mount-proc"], "set hostPID: true"), (unshare, "PID namespace")):
            async with serve(node, parent=parent) as agent:
                page = await agent.later()
                blind(page)
                assert page.value("gpumap_allocation_info", pod="whole") == 1
                assert reason in agent.log


def blind(page: Page, uuid: str = WHOLE, used: int = 11 * GIB) -> None:
    """No PID visibility: owners `unknown` and `unaccounted`, and nothing measured of a container."""
    assert page.value("gpumap_capability", capability="pid_visibility") == 0
    assert page.by(OWNED, "owner", uuid=uuid) == {"unknown": used, "unaccounted": 64 * MIB}
    assert page.by("gpumap_device_processes", "owner", uuid=uuid).keys() == {"unknown"}
    measured = {name for name in page.samples if name.startswith("gpumap_container_") and "allocated" not in name}
    assert measured == set()


async def test_it_starts_with_nothing_and_recovers(plain: Node, directory: Path) -> None:
    """No kubelet socket and no driver: it runs, says so, is not ready, and is whole when both appear."""
    share(plain)
    await plain.kubelet.stop()
    library = directory / "late" / "libnvidia-ml.so.1"
    async with serve(plain, library=library) as agent:
        page = await agent.later(1)
        assert (page.up("kubelet"), page.up("nvml")) == (False, False)
        errors = page.samples["gpumap_source_errors_total"]
        reasons = {(dict(row)["source"], dict(row)["reason"]) for row in errors}
        assert {("kubelet", "socket_missing"), ("nvml", "library_not_found")} <= reasons
        assert "gpumap_build_info" in page.samples
        assert not [name for name in page.samples if name.startswith(("gpumap_gpu_", "gpumap_device_"))]
        ready = await agent.get("/readyz")
        assert ready.status == 503
        assert "socket_missing" in ready.text
        assert "library_not_found" in ready.text
        assert (await agent.get("/healthz")).status == 200
        library.parent.mkdir()
        shutil.copy(plain.library, library)
        page = await agent.until(lambda page: page.up("nvml"), "the driver is not found")
        assert page.value("gpumap_device_memory_total_bytes", uuid=SHARED) == 80 * GIB
        assert (await agent.get("/readyz")).status == 200
        await plain.kubelet.start()
        page = await agent.until(lambda page: page.up("kubelet"), "the kubelet is not found")
        assert on_shared_card(page, USED) == THEIR_BYTES


async def test_the_host_sees_its_own_processes(directory: Path, library: Path) -> None:
    """On the bare host, outside every pod, processes are visible without any pod being there."""
    if not cgroups.is_bare_host(cgroups.own(own_cgroup())):
        pytest.skip("these tests run in a container")
    node = Node(directory, library, HostProcesses())
    node.use(os.getpid(), 1, GIB)
    async with node.kubelet, serve(node) as agent:
        page = await agent.later(1)
        assert page.capable("pid_visibility")
        assert page.by(OWNED, "owner", uuid=WHOLE) == {
            "assigned": 0,
            "gone": 0,
            "host": GIB,
            "unaccounted": 64 * MIB,
            "unassigned": 0,
            "unknown": 0,
        }
        assert "pid_visibility=1 reason='gpumap runs on the bare host'" in agent.log


async def test_the_interval_limits_the_wait_for_each_source(plain: Node) -> None:
    """At 500 ms, gpumap waits a second for a GPU that hangs, and for the kubelet. Other GPUs keep their series."""
    async with serve(plain, "--interval", "500ms", program=[str(GPUMAP)]) as agent:
        await agent.until(lambda page: page.value("gpumap_gpu_up", gpu_uuid=WHOLE) == 1, "it is not read")
        plain.driver.delay["nvmlDeviceGetMemoryInfo_v2", 1] = float("inf")
        plain.update_driver()
        page = await agent.until(lambda page: page.value("gpumap_gpu_up", gpu_uuid=WHOLE) == 0, "it does not hang")
        assert page.value("gpumap_device_memory_used_bytes", uuid=SHARED) == 64 * MIB
        assert 0.0 < plain.kubelet.longest_deadline_seconds < 1.5


async def test_the_driver_is_found_by_the_loader(plain: Node) -> None:
    """Without --nvml-library the loader's search finds it, and flags may come as environment variables."""
    share(plain)
    async with serve(plain, GPUMAP_COLLECT="use,device", GPUMAP_NODE_NAME="node-7") as agent:
        page = await agent.later(1)
        assert on_shared_card(page, USED) == THEIR_BYTES
        assert "pod_and_gpu_map_info" not in page.samples
        assert "gpumap_allocation_info" not in page.samples
        assert "node=node-7" in agent.log
        assert (await agent.get("/metrics/nodes")).status == 404


async def test_a_variable_that_no_flag_has_is_a_warning(plain: Node) -> None:
    """A mistyped variable is ignored, and the log says so, with the nearest name."""
    services: dict[str, Any] = {f"{name}_SERVICE_HOST": "10.0.0.1" for name in ("GPUMAP", "GPUMAP_AGENT")}
    for name in services.copy():
        prefix = name.removesuffix("_SERVICE_HOST")
        services |= dict.fromkeys(
            (f"{prefix}_SERVICE_PORT", f"{prefix}_SERVICE_PORT_HTTP", f"{prefix}_PORT_9401_TCP_ADDR"), "1"
        )
        services |= dict.fromkeys((f"{prefix}_PORT", f"{prefix}_PORT_9401_TCP"), "tcp://10.0.0.1:9401")
    async with serve(plain, GPUMAP_USER="me", GPUMAP_INTERVALL="1s", GPUMAP_QQQ="x", **services) as agent:
        await agent.later(1)
        warned = [line.partition(" WARNING ")[2] for line in agent.log.splitlines() if "unknown variable" in line]
    ours = "unknown variable ignored variable=GPUMAP_"
    assert [one for one in warned if "STANDIN" not in one] == [
        f"{ours}INTERVALL nearest=GPUMAP_INTERVAL",
        f"{ours}QQQ nearest=",
    ]


async def test_a_dialect_is_served_with_the_native_families_or_without_them(plain: Node) -> None:
    """--dialect adds its names to the native ones. --no-native leaves the dialects, the self-metrics and the map."""
    share(plain)
    async with serve(plain, "--dialect", "dcgm") as agent:
        page = await agent.later(1)
        assert {"DCGM_FI_DEV_FB_USED", "gpumap_allocation_info", "gpumap_build_info"} <= page.samples.keys()
        assert "pod_and_gpu_map_info" not in page.samples
    async with serve(plain, "--no-native", "--dialect", "dcgm") as agent:
        page = await agent.later(1)
        assert {"DCGM_FI_DEV_FB_USED", "gpumap_build_info", "gpumap_source_up"} <= page.samples.keys()
        native_names = {family.name for family in native(GROUPS, process_metrics=True)}
        assert page.samples.keys() & native_names == set()
        assert (await agent.get("/api/v1/map")).status == 200
