"""`gpumap doctor`: what a node reports about itself, why, and what to do; on documents, and as installed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpumap.agent.published import published
from gpumap.agent.settings import resolve
from gpumap.cli.commands.doctor import Check, doctor_checks, doctor_table, works
from gpumap.cli.parser import parse
from gpumap.cli.rows import NodeMaps
from gpumap.cli.sources import this_node
from gpumap.cli.table import Shape
from gpumap.cli.terminal import Screen, cells
from gpumap.dispatch import command_parser
from gpumap.model import remedies
from gpumap.model.node import GpuXids, Workload, decode
from gpumap.model.node import Node as SeenNode
from gpumap.model.observations import ClaimDevice, PreparedDevice
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Source
from tests import standin
from tests.agent import serve, until
from tests.command import run_command_in_loop
from tests.machine import GIB, Node, gpu_uuid
from tests.nodes import Gpu, Pod, Process, TestNode
from tests.nodes import gpu_uuid as made_uuid
from tests.privileges import as_ordinary_user, open_folder
from tests.processes import PlainProcesses
from tests.shown import changed, changed_in
from tests.snapshots import busy_node, empty_node, gpu, with_node

SOURCES = ["kubelet", "nvml", "procfs", "pod_identity"]
CAPABILITIES = [
    "device_checkpoint",
    "gpm",
    "pid_visibility",
    "pod_logs",
    "process_utilization",
    "push",
    "xid_events",
]
LADDER = [*SOURCES, *CAPABILITIES]


def by_name(checks: list[Check]) -> dict[str, Check]:
    """Each check once, by its name."""
    assert len({check.check for check in checks}) == len(checks)
    return {check.check: check for check in checks}


def well() -> TestNode:
    """A node on which all works, collected once."""
    pod = Pod("ml", "job", {"main": {"nvidia.com/gpu": [str(made_uuid(0))]}})
    node = TestNode([Gpu(0), Gpu(1)], [pod], [Process(10, made_uuid(0), pod)])
    node.allocatable = {"nvidia.com/gpu": [str(made_uuid(0)), str(made_uuid(1))]}
    node.pci = []
    node.collect()
    return node


def capable(snapshot: Snapshot) -> Snapshot:
    """The node with all capabilities."""
    return with_node(snapshot, capabilities=dict.fromkeys(CAPABILITIES, True), remedies={})


def checked(node: TestNode) -> dict[str, Check]:
    return by_name(doctor_checks(published(node.collect())))


# --- on documents -----------------------------------------------------------------------------------------------------


def test_a_healthy_node_has_no_failed_check() -> None:
    """Everything is ok, sources first, and the sources have what they report."""
    checks = by_name(doctor_checks(published(capable(well().collect()))))
    assert list(checks) == LADDER
    assert {check.state for check in checks.values()} == {"ok"}
    assert [check.check for check in checks.values() if check.required] == ["kubelet", "nvml"]
    assert not [check for check in checks.values() if check.why or check.remedy]
    assert checks["kubelet"].seen == "1 pod with GPUs, 2 slots offered on devices"
    assert checks["nvml"].seen == "driver 550.54, CUDA 12.4, 2 GPUs, 2 devices readable"
    assert checks["pid_visibility"].seen == "in this test"
    assert works(list(checks.values()))


@pytest.mark.parametrize("snapshot", [empty_node(), busy_node(3)])
def test_every_document_has_a_table(snapshot: Snapshot) -> None:
    """Whatever is up or down; the table is complete either way."""
    node = published(snapshot)
    checks = by_name(doctor_checks(node))
    assert {"kubelet", "nvml"} <= checks.keys()
    for screen in (Screen(), Screen(60, colours=True)):
        text = doctor_table(node, Shape(screen=screen))
        assert all(name in text for name in checks)


@pytest.mark.parametrize(
    ("reason", "state"), [("socket_missing", "missing"), ("connection_refused", "failed"), ("rate_limited", "failed")]
)
def test_kubelet_away(reason: str, state: str) -> None:
    """The kubelet is required: what it failed with, and the one remedy that gpumap has for that."""
    node = well()
    node.down, node.kubelet_reason = {"kubelet"}, reason
    checks = checked(node)
    kubelet = checks["kubelet"]
    assert (kubelet.state, kubelet.required) == (state, True)
    assert kubelet.why == f"{reason}: {reason} of the test"
    assert kubelet.remedy == remedies.SOURCES[Source.KUBELET][reason]
    assert not works(list(checks.values()))
    assert checks["nvml"].state == "ok"
    text = doctor_table(published(node.collect()), Shape())
    assert "kubelet does not work, but is required." in text
    assert "The kubelet does not answer." in text, "what it cannot judge without it"


def test_gpu_that_is_down() -> None:
    """It has a line of its own; one of several is no reason to fail, all of them are."""
    node = well()
    node.gpus[1].fault = "lost"
    checks = checked(node)
    assert checks["nvml"].state == "degraded"
    assert (checks["gpu/1"].state, checks["gpu/1"].required) == ("failed", False)
    assert checks["nvml"].why == "1 of 2 GPUs down (lost)"
    assert checks["gpu/1"].why == "lost: fell off the bus"
    assert checks["gpu/1"].remedy == remedies.FAULTS["lost"]
    assert made_uuid(1) in checks["gpu/1"].seen
    assert works(list(checks.values()))
    summary = doctor_table(published(node.collect()), Shape()).splitlines()[-1]
    assert summary.startswith("GPU 1 fails: lost")
    assert "gpumap has all that it requires. Check also: nvml" in summary
    node.gpus[0].fault = "hung"
    checks = checked(node)
    assert checks["nvml"].state == "failed"
    assert not works(list(checks.values()))


def test_gpu_that_needs_something() -> None:
    """What the driver asks for is a line with its words; of a GPU that is down it is in the line of the GPU."""
    snapshot = well().collect()
    up, down = snapshot.node.gpus
    ill = (changed(up, recovery_action="drain_and_reset"), changed(down, fault="lost", recovery_action="node_reboot"))
    checks = by_name(doctor_checks(published(with_node(snapshot, gpus=ill))))
    check = checks["gpu/0/recovery_action"]
    assert (check.state, check.required) == ("degraded", False)
    assert check.why == "recovery_drain_and_reset: has reduced capacity"
    assert check.remedy == remedies.RECOVERY["drain_and_reset"].replace("<index>", "0")
    assert (checks["gpu/1"].state, checks["gpu/1"].remedy) == ("failed", remedies.FAULTS["lost"])
    assert checks["gpu/1"].why == "lost: fell off the bus; also recovery node reboot"
    assert "gpu/1/recovery_action" not in checks
    fine = with_node(snapshot, gpus=(changed(up, recovery_action="none"), changed(down, recovery_action=None)))
    assert not [check for check in doctor_checks(published(fine)) if check.check.startswith("gpu/")]


MEMORY_ILLS = {"row_remap_pending": "degraded", "row_remap_failure": "failed"}


@pytest.mark.parametrize("ill", MEMORY_ILLS)
def test_rows_of_memory(ill: str) -> None:
    """Rows that wait for a reset are a line, one that could not be replaced is a worse one, each with what to do."""
    card = changed_in(gpu(0), "reading", **{"row_remap_pending": True, ill: True})
    checks = by_name(doctor_checks(published(with_node(busy_node(3), gpus=(card,)))))
    (check,) = (check for name, check in checks.items() if name.startswith("gpu/0/"))
    assert (check.check, check.state) == (f"gpu/0/{ill}", MEMORY_ILLS[ill])
    assert check.remedy == remedies.HEALTH[ill].replace("<index>", "0")


def test_faults_of_the_last_hour() -> None:
    """Uncorrectable memory errors and fatal XID errors are a warning."""
    snapshot = busy_node(3)
    card, timestamp = snapshot.node.gpus[0], snapshot.node.timestamp
    for age, names in ((60.0, {"gpu/0/ecc_uncorrected"}), (7200.0, set())):
        errors = GpuXids(card.uuid, {13: 1, 79: 1}, 0.0, last_at={13: timestamp, 79: timestamp - age})
        grown = changed(card, ecc_uncorrected_at=timestamp - age)
        checks = doctor_checks(published(with_node(snapshot, gpus=(grown,), xids=(errors,))))
        states = {check.check: check.state for check in checks if check.check.startswith("gpu/0/")}
        assert states.keys() == names
        assert set(states.values()) <= {"warning"}
        assert works(checks)


def test_missing_capabilities() -> None:
    """Each has its remedy, such as the chart's value. Without a GPU that answers, those of GPUs are unknown."""
    snapshot = well().collect()
    without = with_node(snapshot, capabilities=dict.fromkeys(CAPABILITIES, False), pid_visibility_reason="in a pod")
    checks = by_name(doctor_checks(published(without)))
    assert {name: checks[name].state for name in CAPABILITIES} == dict.fromkeys(CAPABILITIES, "missing")
    assert {name: checks[name].remedy for name in CAPABILITIES} == remedies.CAPABILITIES
    assert "hostPID" in (checks["pid_visibility"].remedy or "")
    assert checks["pid_visibility"].why == "in a pod"
    assert works(list(checks.values()))
    nothing = by_name(doctor_checks(published(empty_node())))
    assert {nothing[name].state for name in remedies.OF_GPUS} == {"unknown"}


@pytest.mark.parametrize("capability", ["device_checkpoint", "pod_logs"])
def test_files_that_cannot_be_read(capability: str) -> None:
    """The reason and the remedy are those of pod_identity: to mount the files again would not help."""
    node = well()
    node.checkpoint_readable, node.logs_readable = capability != "device_checkpoint", capability != "pod_logs"
    reason = {"device_checkpoint": "checkpoint_unreadable", "pod_logs": "pod_logs_unreadable"}[capability]
    seen = published(node.collect())
    remedy = remedies.SOURCES[Source.POD_IDENTITY][reason]
    sources = tuple(
        changed(source, reason=reason, detail="Permission denied", remedy=remedy)
        if source.source == Source.POD_IDENTITY
        else source
        for source in seen.sources
    )
    check = by_name(doctor_checks(changed(seen, sources=sources)))[capability]
    assert (check.state, check.why, check.remedy) == ("missing", f"{reason}: Permission denied", remedy)
    assert checked(node)[capability].remedy == remedies.CAPABILITIES[capability], "a directory that is not mounted"


def test_document_that_is_stale() -> None:
    """What is required fails with the reason; nothing else is known, and nothing is blamed for it."""
    why = "no collection for more than 5 s: the driver was let go of"
    checks = doctor_checks(published(empty_node(), stale=why))
    assert {check.why for check in checks} == {why}
    assert [(check.check, check.state) for check in checks if check.required] == [
        ("kubelet", "failed"),
        ("nvml", "failed"),
    ]
    assert {(check.state, check.remedy) for check in checks if not check.required} == {("unknown", None)}
    assert not works(checks)


def test_gpus_without_sm_time() -> None:
    """They are named. One of them is no reason to exit with 1. MIG devices need none."""
    node = well()
    partitioned = Gpu(8, mig=[(1, 0, 3)])
    for gpus, state, names in (
        ([Gpu(0), partitioned], "ok", None),
        ([Gpu(0), Gpu(1, has_samples=False)], "degraded", "GPU 1"),
        ([Gpu(0, has_samples=False), partitioned], "missing", "GPU 0"),
        ([Gpu(0, fault="lost")], "unknown", None),
    ):
        node.gpus = list(gpus)
        check = checked(node)["process_utilization"]
        assert check.state == state
        if names:
            assert check.why == f"the driver does not report SM time on {names}"
            assert check.remedy == remedies.CAPABILITIES["process_utilization"]


def test_driver_without_gpus() -> None:
    """The node has none, or the container has no access: the driver works all the same."""
    nvml = by_name(doctor_checks(changed(published(well().collect()), gpus=(), devices=())))["nvml"]
    assert nvml.state == "degraded"
    assert "the container has no access" in (nvml.why or "")


def test_unmatched_slots() -> None:
    node = well()
    node.pods.append(Pod("ml", "odd", {"main": {"aliyun.com/gpu-mem": ["x"], "nvidia.com/gpu": ["GPU-none"]}}))
    checks = [check for check in checked(node).values() if check.check.startswith("unmatched_slots/")]
    assert checks
    for check in checks:
        reason = check.check.partition("/")[2]
        assert check.state == "degraded"
        assert check.why == f"{reason}: ml/odd"
        assert check.remedy == remedies.UNMATCHED[reason]


def test_processes_of_slurm_in_no_cgroup_of_a_job() -> None:
    """Without task/cgroup or proctrack/cgroup they are in the cgroup of slurmd or slurmstepd: gpumap knows no job."""
    units = ("slurmd.service", "slurmd@n1.service", "slurmstepd.scope", "n1_slurmstepd.scope", "my-slurmd.service")
    works = [*(Workload("systemd_unit", unit) for unit in units), Workload("slurm_job", "42")]
    processes = [Process(100 + number, made_uuid(0), None, work=work) for number, work in enumerate(works)]
    check = checked(TestNode([Gpu(0)], processes=processes))["slurm"]
    assert (check.state, check.seen, check.remedy) == ("degraded", "4 processes", remedies.NO_JOB_CGROUP)
    names = "n1_slurmstepd.scope, slurmd.service, slurmd@n1.service and 1 more"
    assert check.why == f"{names}: PID 100, 101, 102 and 1 more in no job's cgroup"
    assert "slurm" not in checked(TestNode([Gpu(0)], processes=processes[4:]))


def test_claims_that_may_have_admin_access() -> None:
    """Where only that keeps a holder from being idle, the value that shows it is named. With it there is nothing."""
    claims = {"main": [ClaimDevice("gpu.nvidia.com", "node-a", "gpu-0", "", "ml", "one")]}
    node = TestNode([Gpu(0), Gpu(1)], [Pod("ml", "train", claims=claims)])
    check = by_name(doctor_checks(published(node.watch())))["dra_claims"]
    assert (check.state, check.why) == ("degraded", "admin_access_unknown: ml/train")
    assert "`privileges.dra=true`" in (check.remedy or "")
    node.prepared = (PreparedDevice("ml", "one", "gpu-0", "", made_uuid(0), admin_access=False, memory_bytes=None),)
    assert "dra_claims" not in checked(node)


def test_the_table_is_a_line_a_check_in_a_pipe_and_wrapped_on_a_terminal() -> None:
    """Nothing is lost or too wide; odd details neither steer the terminal nor make lines of their own."""
    node = published(empty_node())
    odd = changed(node.sources[0], reason="odd", detail="\x1b[2J\n\u202e" + "学" * 200)
    node = changed(node, sources=(odd, *node.sources[1:]), unjudged_sentences=())
    checks = doctor_checks(node)
    piped = doctor_table(node, Shape()).splitlines()
    assert len(piped) == len(checks) + 3
    assert [line.split()[0] for line in piped[1:-2]] == [check.check for check in checks]
    for columns in (60, 100, 300):
        lines = doctor_table(node, Shape(screen=Screen(columns))).splitlines()
        assert max(map(cells, lines[:-1])) <= columns
        assert all(character.isprintable() for line in lines for character in line)
        assert "".join("".join(lines).split()).count("学") == 200


# --- this machine -----------------------------------------------------------------------------------------------------


async def test_files_that_may_not_be_read() -> None:
    """An ordinary user reads which file, and to run as user 0; nothing is claimed to be missing."""
    with open_folder() as folder:
        node = Node(folder, Path("/none"), PlainProcesses(folder / "proc"))
        node.admit("job", main=[gpu_uuid(1)])
        closed = [node.kubelet_root / "device-plugins", folder / "log" / "pods", node.kubelet_root / "pod-resources"]
        async with node.kubelet:
            for path in closed:
                path.chmod(0)
            with as_ordinary_user():
                seen = await collect_here(node)
            for path in closed:
                path.chmod(0o755)
    checks = by_name(doctor_checks(seen))
    for name in ("kubelet", "pod_identity"):
        assert checks[name].state == "failed"
        assert "user 0" in (checks[name].remedy or "")
    assert checks["push"].state == "missing"
    assert "Permission denied" in (checks["pod_identity"].why or "")


async def collect_here(node: Node) -> SeenNode:
    """What doctor learns when it runs in this process."""
    args = parse(command_parser(), ["doctor", *node.flags, "--nvml-library", "/none"])
    stream = this_node.maps_of_node(resolve(args, {}), 1.0, watch_allocations=True)
    async with contextlib.aclosing(stream):
        maps = await anext(stream)
    assert isinstance(maps, NodeMaps)
    return maps.maps[0]


# --- the installed command --------------------------------------------------------------------------------------------


@pytest.fixture(name="node")
async def make_node(directory: Path, library: Path) -> AsyncIterator[Node]:
    """A node with one pod that uses its GPU, beside two GPUs that no pod uses."""
    node = Node(directory, library, PlainProcesses(directory / "proc"))
    pod = node.admit("whole", main=[gpu_uuid(1)])
    node.run(pod.cgroup("main"), 1, 11 * GIB, sm_percent=50)
    async with node.kubelet:
        yield node


Diagnosis = dict[str, dict[str, str | bool | None]]


async def diagnose(node: Node, **states: str) -> Diagnosis:
    """Run `gpumap doctor -o json` on a node: only valid JSON on stdout, nothing on stderr, exit code 0.

    On a busy machine a check may not be done in its time: it is run until the checks have these states.
    """
    flags = [*node.flags, "--nvml-library", str(node.library)]

    async def ask() -> tuple[int, Diagnosis]:
        variables = standin.environment(node.library, node.state)
        done = await run_command_in_loop("doctor", "-o", "json", *flags, **variables)
        values = json.loads(done.stdout)
        assert (done.stderr, values["ok"]) == ("", done.returncode == 0), done
        return done.returncode, {check["check"]: check for check in values["checks"]}

    def holds(answer: tuple[int, Diagnosis]) -> bool:
        code, checks = answer
        return code == 0 and {name: checks[name]["state"] for name in states} == states

    return (await until(ask, holds, f"not 0 with {states}"))[1]


async def test_doctor_of_a_healthy_node(node: Node) -> None:
    """Everything works but GPM, which these GPUs do not have; the same as a table."""
    checks = await diagnose(node, **{**dict.fromkeys(LADDER, "ok"), "pci": "unknown", "gpm": "missing"})
    assert checks["kubelet"]["seen"] == "1 pod with GPUs, 6 slots offered on devices"
    assert "3 GPUs" in str(checks["nvml"]["seen"])
    done = await run_command_in_loop(
        "doctor", *node.flags, "--nvml-library", str(node.library), **standin.environment(node.library, node.state)
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].split()[:2] == ["CHECK", "STATE"]
    assert done.stdout.splitlines()[-1].startswith("gpumap has all that it requires")


async def test_doctor_where_nothing_is(directory: Path) -> None:
    """No kubelet, no driver, no files: every line says so, with its remedy, and it ends with 1."""
    flags = [f"--{name}={directory / 'nothing'}" for name in ("kubelet-root", "pod-log-root", "proc", "nvml-library")]
    flags.append(f"--device-checkpoint={directory / 'nothing' / 'checkpoint'}")
    done = await run_command_in_loop("doctor", "-o", "json", *flags)
    checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert (done.returncode, done.stderr) == (1, "")
    assert {name: checks[name]["state"] for name in LADDER} == {
        "kubelet": "missing",
        "nvml": "missing",
        "procfs": "failed",
        "pod_identity": "missing",
        **{name: "unknown" if name in remedies.OF_GPUS else "missing" for name in CAPABILITIES},
    }
    assert {name for name in LADDER if not checks[name]["remedy"]} == set(remedies.OF_GPUS)


async def test_doctor_of_an_agent_that_released_the_driver(node: Node) -> None:
    """While it collects nothing, as long as somebody signals, its data gets too old: doctor, map and readyz say why."""
    async with serve(node, "--interval", "1s", "--stale-after", "1s") as agent:

        async def signal_and_ask() -> str:
            os.kill(agent.pid, signal.SIGUSR1)  # each begins the time again
            return (await agent.get("/readyz")).text

        why = "SIGUSR1 released the driver"
        message = await until(signal_and_ask, lambda text: "no collection for" in text, "it stays ready")
        assert why in message
        os.kill(agent.pid, signal.SIGUSR1)
        seen = decode((await agent.get("/api/v1/map")).text.encode())
    assert why in (seen.stale or "")
    assert "gpm" in (seen.collect or ())
    assert (seen.gpus, seen.accounts) == ((), ())
    assert [(check.check, check.state) for check in doctor_checks(seen) if check.required] == [
        ("kubelet", "failed"),
        ("nvml", "failed"),
    ]
