"""`gpumap doctor`: each source and privilege judged, why, and what to do; on documents, and as installed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpumap.agent._proto.pods import v1alpha1_pb2
from gpumap.agent.published import published
from gpumap.agent.self_check import CAPABILITIES, look, privileges
from gpumap.agent.settings import resolve
from gpumap.cli import this_node
from gpumap.cli.command_line import parse
from gpumap.cli.doctor.checks import examine, works
from gpumap.cli.doctor.gpu_checks import Result
from gpumap.cli.doctor.table import doctor_table
from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.tables import Shape
from gpumap.cli.terminal import Screen, cells
from gpumap.dispatch import command_parser
from gpumap.lab.demo.pods_api import FakePodsApi
from gpumap.model import remedies
from gpumap.model.names import Source
from gpumap.model.node import GpuXids, decode
from gpumap.model.node import Node as SeenNode
from gpumap.model.node_facts import Answer, Facts, Privileges
from gpumap.model.observations import ClaimDevice, PreparedDevice
from gpumap.model.readings import SAMPLES_NEW
from gpumap.model.snapshot import Snapshot
from tests import standin
from tests.agent import serve, until
from tests.command import run_command_in_loop
from tests.node import GIB, Node, gpu_uuid
from tests.nodes import Gpu, Pod, Process, TestNode
from tests.nodes import gpu_uuid as made_uuid
from tests.privileges import as_ordinary_user, open_folder
from tests.processes import PlainProcesses
from tests.shown import changed, changed_in
from tests.snapshots import busy_node, empty_node, gpu, with_node

LADDER = [
    "kubelet",
    "nvml",
    "device_checkpoint",
    "pod_logs",
    "push",
    "proc",
    "pid_visibility",
    "pci",
    "process_utilization",
    "gpm",
    "xid_events",
]
ALL_WELL = Facts(
    kubelet=Answer("23 pods listed, offered: 8 nvidia.com/gpu"),
    checkpoint=Answer("9 entries of 7 pods, 1 resource registered"),
    pod_logs=Answer("directories of 23 pods, links of 31 containers"),
    push=Answer("4 directories watched"),
    privileges=Privileges(uid=0, capabilities=(), api_token=None, runtime_sockets=(), bare_host=False),
)


def by_name(checks: tuple[Result, ...]) -> dict[str, Result]:
    """Each check once, by its name."""
    assert len({one.check for one in checks}) == len(checks)
    return {one.check: one for one in checks}


def well() -> TestNode:
    """A node on which all works, collected once."""
    pod = Pod("ml", "job", {"main": {"nvidia.com/gpu": [str(made_uuid(0))]}})
    node = TestNode([Gpu(0), Gpu(1)], [pod], [Process(10, made_uuid(0), pod)])
    node.allocatable = {"nvidia.com/gpu": [str(made_uuid(0)), str(made_uuid(1))]}
    node.pci = []
    node.collect()
    return node


def telling(snapshot: Snapshot) -> Snapshot:
    """The node with a driver that reports GPM and XID events too."""
    return with_node(snapshot, capabilities={**snapshot.node.capabilities, "gpm": True, "xid_events": True})


def failing(node: TestNode, source: Source, reason: str, detail: str) -> SeenNode:
    """The node in an agent's map, in which a source reports this error."""
    found = published(node.collect())
    sources = (changed(one, reason=reason, detail=detail) if one.source == source else one for one in found.sources)
    return changed(found, sources=tuple(sources))


def examined(node: TestNode, facts: Facts | None = ALL_WELL) -> dict[str, Result]:
    return by_name(examine(published(node.collect()), facts))


# --- on documents -----------------------------------------------------------------------------------------------------


def test_a_healthy_node_has_no_failed_check() -> None:
    """Everything is ok, in the ladder's order, and says what was seen."""
    found = by_name(examine(published(telling(well().collect())), ALL_WELL))
    assert list(found) == [*LADDER, "unmatched_slots", "capabilities", "api_token", "runtime_socket"]
    assert {one.state for one in found.values()} == {"ok"}
    assert [one.check for one in found.values() if one.required] == ["kubelet", "nvml"]
    assert not [one for one in found.values() if one.why or one.remedy]
    assert (
        found["kubelet"].seen
        == "23 pods listed, offered: 8 nvidia.com/gpu, 1 pod with GPUs, 2 slots offered on devices"
    )
    assert found["nvml"].seen == "driver 550.54, CUDA 12.4, 2 GPUs, 2 devices readable"
    assert found["device_checkpoint"].seen == ALL_WELL.checkpoint.seen
    assert found["pid_visibility"].seen == "in this test"
    assert works(tuple(found.values()))


def test_an_agents_document_alone() -> None:
    """With --url nothing of this machine is judged: neither its files nor its privileges."""
    found = by_name(examine(published(telling(well().collect())), None))
    assert list(found) == [*LADDER, "unmatched_slots"]
    assert {one.state for name, one in found.items() if name != "push"} == {"ok"}
    assert found["push"].state == "missing", "this one polls, and its own log says why"
    assert "--no-push" in (found["push"].why or "")
    assert (found["push"].remedy or "").partition("device-plugins")[0].count(
        "gpumap sees new pods only at intervals"
    ) == 1


@pytest.mark.parametrize("snapshot", [empty_node(), busy_node(3)])
def test_every_document_can_be_examined(snapshot: object) -> None:
    """Whatever is up or down; the table is complete either way."""
    checks = examine(published(snapshot), None)  # type: ignore[arg-type] # a snapshot
    assert [one.check for one in checks if "/" not in one.check][: len(LADDER)] == LADDER
    for screen in (Screen(), Screen(60, colours=True)):
        text = doctor_table(checks, Shape(screen=screen))
        assert all(one.check in text for one in checks)


@pytest.mark.parametrize(
    ("reason", "state"), [("socket_missing", "missing"), ("connection_refused", "failed"), ("rate_limited", "failed")]
)
def test_kubelet_away(reason: str, state: str) -> None:
    """The kubelet is required: what it failed with, and the one remedy that gpumap has for that."""
    node = well()
    node.down, node.kubelet_reason = {"kubelet"}, reason
    found = examined(node)
    kubelet = found["kubelet"]
    assert (kubelet.state, kubelet.required) == (state, True)
    assert kubelet.why == f"{reason}: {reason} of the test"
    assert kubelet.remedy == remedies.SOURCES[Source.KUBELET][reason]
    assert not works(tuple(found.values()))
    assert found["nvml"].state == "ok"
    assert found["unmatched_slots"].state == "unknown"
    assert "kubelet does not work, but is required." in doctor_table(tuple(found.values()), Shape())


def test_second_list_has_a_row_of_its_own() -> None:
    """With the flag, here or in an agent's map while it fails; the kubelet's row is not affected."""
    node = well()
    assert "second_list" not in examined(node)
    node.second = {}
    ok = examined(node, replace(ALL_WELL, second_list=Answer("7 pods listed")))["second_list"]
    assert (ok.state, ok.seen, ok.required) == ("ok", "7 pods listed", False)
    reason = "pod_resources_connection_refused"
    failed = replace(ALL_WELL, second_list=Answer(reason=reason, detail="no process"))
    remote = by_name(examine(failing(node, Source.KUBELET, reason, "no process"), None))
    for found in (examined(node, failed), remote):
        assert found["kubelet"].state == "ok"
        assert (found["second_list"].state, found["second_list"].why) == ("failed", f"{reason}: no process")
        assert found["second_list"].remedy == remedies.SOURCES[Source.KUBELET][reason]
        assert works(tuple(found.values()))


async def test_facts_of_each_flag(tmp_path: Path) -> None:
    """What this node's own sockets and files show: None without a flag, a reason while they are missing."""
    here = resolve(command_parser().parse_args(["doctor"]), {})
    facts = await look(here)
    assert (facts.second_list, facts.gpu_fractioning, facts.pods_api) == (None, None, None)
    none = tmp_path / "none"
    facts = await look(replace(here, pod_resources_socket=none, gpu_fractioning_map=tmp_path, pods_api_socket=none))
    assert facts.second_list is not None
    assert facts.second_list.reason == "pod_resources_socket_missing"
    assert facts.gpu_fractioning == Answer("files of 0 containers")
    assert facts.pods_api is not None
    assert facts.pods_api.reason == "pods_api_socket_missing"
    async with FakePodsApi(none) as api:
        api.set_pods([v1alpha1_pb2.Pod(metadata=v1alpha1_pb2.ObjectMeta(uid="u")).SerializeToString()])
        assert (await look(replace(here, pods_api_socket=none))).pods_api == Answer("1 pod reported")


def test_gpu_that_is_down() -> None:
    """It has a line of its own; one of several is no reason to fail, all of them are."""
    node = well()
    node.gpus[1].fault = "lost"
    found = examined(node)
    assert found["nvml"].state == "degraded"
    assert (found["gpu/1"].state, found["gpu/1"].required) == ("failed", False)
    assert found["gpu/1"].why == "lost: fell off the bus: drain the node, then reboot it"
    assert found["gpu/1"].remedy == remedies.FAULTS["lost"]
    assert made_uuid(1) in found["gpu/1"].seen
    assert works(tuple(found.values()))
    last = doctor_table(tuple(found.values()), Shape()).splitlines()[-1]
    assert last.startswith("GPU 1 fails: lost")
    assert "gpumap has all that it requires. Check also: nvml" in last
    node.gpus[0].fault = "hung"
    found = examined(node)
    assert found["nvml"].state == "failed"
    assert not works(tuple(found.values()))


def test_gpu_that_needs_something() -> None:
    """What the driver asks for is a line with its words; of a GPU that is down it is in the line of the GPU."""
    snapshot = well().collect()
    up, down = snapshot.node.gpus
    ill = (changed(up, recovery_action="drain_and_reset"), changed(down, fault="lost", recovery_action="node_reboot"))
    found = by_name(examine(published(with_node(snapshot, gpus=ill)), None))
    check = found["gpu/0/recovery_action"]
    assert (check.state, check.required) == ("degraded", False)
    assert check.why == f"recovery_drain_and_reset: {remedies.IN_SHORT['drain_and_reset']}"
    assert check.remedy == remedies.RECOVERY["drain_and_reset"].replace("<index>", "0")
    assert (found["gpu/1"].state, found["gpu/1"].remedy) == ("failed", remedies.FAULTS["lost"])
    assert found["gpu/1"].why == f"lost: {remedies.IN_SHORT['lost']}; also recovery_node_reboot"
    assert "gpu/1/recovery_action" not in found
    fine = with_node(snapshot, gpus=(changed(up, recovery_action="none"), changed(down, recovery_action=None)))
    assert not [one for one in examine(published(fine), None) if one.check.startswith("gpu/")]


MEMORY_ILLS = {"row_remap_pending": "degraded", "row_remap_failure": "failed"}


@pytest.mark.parametrize("ill", MEMORY_ILLS)
def test_rows_of_memory(ill: str) -> None:
    """Rows that wait for a reset are a line, one that could not be replaced is a worse one, each with what to do."""
    card = changed_in(gpu(0), "reading", **{"row_remap_pending": True, ill: True})
    found = by_name(examine(published(with_node(busy_node(3), gpus=(card,))), None))
    (check,) = (check for name, check in found.items() if name.startswith("gpu/0/"))
    assert (check.check, check.state) == (f"gpu/0/{ill}", MEMORY_ILLS[ill])
    assert check.remedy == remedies.HEALTH[ill].replace("<index>", "0")


def test_faults_of_the_last_hour() -> None:
    """Uncorrectable memory errors and fatal XID errors are a warning. Older ones, and those of applications, are no
    faults."""
    snapshot = busy_node(3)
    on, now = snapshot.node.gpus[0], snapshot.node.timestamp
    for age, names in ((60.0, {"gpu/0/ecc_uncorrected"}), (7200.0, set())):
        errors = GpuXids(on.uuid, {13: 1, 79: 1}, 0.0, last_at={13: now, 79: now - age})
        grown = changed(on, ecc_uncorrected_at=now - age)
        found = examine(published(with_node(snapshot, gpus=(grown,), xids=(errors,))), None)
        checks = {one.check: one for one in found if one.check.startswith("gpu/0/")}
        assert checks.keys() == names
        assert {one.state for one in checks.values()} <= {"warning"}
        assert works(found)


def test_values_that_a_driver_does_not_report() -> None:
    """GPM is not needed before Hopper, XID events are missing without a listener; without a GPU nothing is known."""
    snapshot = busy_node(3)
    mute = with_node(snapshot, capabilities=dict.fromkeys(snapshot.node.capabilities, False))
    found = by_name(examine(published(mute), None))
    assert (found["gpm"].state, found["xid_events"].state) == ("not needed", "missing")
    assert found["gpm"].remedy == remedies.CAPABILITIES["gpm"]
    assert "--nvml-release" in (found["xid_events"].why or "")
    assert found["xid_events"].remedy == remedies.CAPABILITIES["xid_events"]
    answer = by_name(examine(published(snapshot), None))
    assert answer["gpm"].seen == "activity of SMs, tensor cores and memory, on 8 devices"
    assert answer["xid_events"].seen == "registered on 3 GPUs"
    none = by_name(examine(published(empty_node()), None))
    assert (none["gpm"].state, none["xid_events"].state) == ("unknown", "unknown")


@pytest.mark.parametrize(("group", "check"), [("gpm", "gpm"), ("health", "xid_events")])
def test_what_is_left_out_is_not_needed(group: str, check: str) -> None:
    """What --collect leaves out says so, and blames neither the driver nor the GPU."""
    snapshot = busy_node(3)
    mute = with_node(snapshot, capabilities=dict.fromkeys(snapshot.node.capabilities, False))
    collect = [one for one in ("device", "gpm", "health") if one != group]
    found = by_name(examine(published(mute, collect=collect), None))
    left_out = Result("not needed", "", f"--collect leaves out the group {group}", check=check)
    assert found[check] == left_out
    assert by_name(examine(published(empty_node(), collect=collect), None))[check] == left_out
    assert "--collect" not in (by_name(examine(published(mute, collect=["gpm", "health"]), None))[check].why or "")


def test_a_document_that_is_stale() -> None:
    """What is required fails with the reason; nothing else is known, and nothing is blamed for it."""
    why = "no collection for more than 5 s: the driver was let go of"
    found = examine(published(empty_node(), stale=why), None)
    assert [one.check for one in found] == [*LADDER, "unmatched_slots"]
    assert [(one.state, one.why) for one in found if one.required] == [("failed", why)] * 2
    assert {(one.state, one.remedy) for one in found if not one.required} == {("unknown", None)}
    assert not works(found)


def test_no_pid_visibility() -> None:
    """What was seen instead, and the chart's value; the required sources work all the same."""
    node = well()
    node.visible = False
    found = examined(node)
    assert (found["pid_visibility"].state, found["pid_visibility"].why) == ("missing", "not in this test")
    assert "hostPID" in (found["pid_visibility"].remedy or "")
    assert works(tuple(found.values()))


@pytest.mark.parametrize("capability", ["device_checkpoint", "pod_logs"])
def test_step_of_the_ladder_that_is_not_taken(capability: str) -> None:
    """A directory that is not mounted: missing, with the chart's value; the reason is known only here."""
    node = well()
    node.checkpoint_readable, node.logs_readable = capability != "device_checkpoint", capability != "pod_logs"
    reason = "checkpoint_missing" if capability == "device_checkpoint" else "pod_logs_missing"
    field = {"device_checkpoint": "checkpoint", "pod_logs": "pod_logs"}[capability]
    answer = Answer(reason=reason, detail="no such thing")
    here = examined(node, replace(ALL_WELL, **{field: answer}))[capability]  # type: ignore[arg-type] # an Answer
    there = examined(node, None)[capability]
    assert (here.state, here.why) == ("missing", f"{reason}: no such thing")
    assert (there.state, there.why) == ("missing", "not read")
    assert here.remedy == there.remedy == remedies.CAPABILITIES[capability]


def test_partitioned_gpus_need_no_sm_time_by_process() -> None:
    """No driver reports it on MIG devices: nothing is missing. A whole GPU without it is another matter."""
    node = well()
    node.pods, node.processes = [], []
    node.gpus = [Gpu(0, mig=[(1, 0, 3)])]
    assert examined(node)["process_utilization"].state == "not needed"
    node.gpus = [Gpu(0, has_samples=False)]
    assert examined(node)["process_utilization"].state == "missing"
    node.gpus = [Gpu(0, fault="lost")]
    assert examined(node)["process_utilization"].state == "unknown"


def test_which_call_gives_sm_time() -> None:
    """One line for all GPUs. A GPU with a driver that refuses both calls is visible, and no reason to exit with 1."""
    old, new = "SM time by nvmlDeviceGetProcessUtilization", "SM time by nvmlDeviceGetProcessesUtilizationInfo"
    lost = "SM time is not available on {}: the driver does not report it for processes"
    node = well()
    partitioned = Gpu(8, mig=[(1, 0, 3)])
    for gpus, state, seen, why in (
        ([Gpu(0), Gpu(1)], "ok", f"{old} on 2 GPUs", None),
        ([Gpu(0, samples_from=SAMPLES_NEW), partitioned], "ok", f"{new} on 1 GPU", None),
        (
            [Gpu(0), Gpu(1, samples_from=SAMPLES_NEW), Gpu(2)],
            "ok",
            f"{old} on GPU 0, 2; {new} on GPU 1",
            None,
        ),
        ([Gpu(0), Gpu(1, has_samples=False)], "degraded", f"{old} on GPU 0", lost.format("GPU 1")),
        ([Gpu(0, has_samples=False), partitioned], "missing", "", lost.format("1 GPU")),
    ):
        node.gpus = list(gpus)
        found = examined(node)
        one = found["process_utilization"]
        assert (one.state, one.seen, one.why) == (state, seen, why)
        assert (one.remedy is None) == (state == "ok")
        assert works(tuple(found.values()))


def test_unmatched_slots() -> None:
    node = well()
    node.pods.append(Pod("ml", "odd", {"main": {"aliyun.com/gpu-mem": ["x"], "nvidia.com/gpu": ["GPU-none"]}}))
    found = [one for one in examined(node).values() if one.check.startswith("unmatched_slots/")]
    assert found
    for one in found:
        reason = one.check.partition("/")[2]
        assert one.state == "degraded"
        assert one.why == f"{reason}: ml/odd"
        assert one.remedy == remedies.UNMATCHED[reason]


def test_node_with_claims_only() -> None:
    """With the DRA driver alone and the chart's defaults, the missing checkpoint is no fault. The value that shows
    which claims have admin access is named. With the driver's notes that is known."""
    claims = {"main": [ClaimDevice("gpu.nvidia.com", "node-a", "gpu-0", "", "ml", "one")]}
    node = TestNode([Gpu(0), Gpu(1)], [Pod("ml", "train", claims=claims)], checkpoint_readable=False)
    found = examined(node, replace(ALL_WELL, checkpoint=Answer(reason="checkpoint_missing")))
    assert (found["device_checkpoint"].state, found["device_checkpoint"].remedy) == ("not needed", None)
    assert found["kubelet"].seen.endswith("1 pod with GPUs, GPUs assigned by claims")
    assert (found["dra_claims"].state, found["dra_claims"].why) == (
        "missing",
        "1 of 1 holder by claims may have admin access",
    )
    assert "`privileges.dra=true`" in (found["dra_claims"].remedy or "")
    node.prepared = (PreparedDevice("ml", "one", "gpu-0", "", made_uuid(0), admin_access=False, memory_bytes=None),)
    assert examined(node)["dra_claims"].state == "ok"
    node.pods.append(Pod("ml", "slot", {"main": {"nvidia.com/gpu": [str(made_uuid(1))]}}))
    assert examined(node)["device_checkpoint"].state == "missing", "a device plugin is here too"


def test_too_much_privilege_is_a_warning() -> None:
    """Capabilities, an API token, a runtime's socket: gpumap needs none, and says how to take them away."""
    held = Privileges(0, ("SYS_ADMIN", "SYS_PTRACE", "CHOWN"), "/token", ("/run/containerd/containerd.sock",), False)
    found = examined(well(), replace(ALL_WELL, privileges=held))
    assert [one.check for one in found.values() if one.state == "warning"] == [
        "capabilities",
        "api_token",
        "runtime_socket",
    ]
    assert found["capabilities"].seen == "uid 0 (privileged), SYS_ADMIN, SYS_PTRACE, CHOWN"
    assert "drop: [ALL]" in (found["capabilities"].remedy or "")
    assert works(tuple(found.values()))
    shell = examined(well(), replace(ALL_WELL, privileges=replace(held, bare_host=True)))
    assert shell["capabilities"].state == "ok"
    assert "api_token" not in shell


def test_the_table_is_a_line_a_check_in_a_pipe_and_wrapped_on_a_terminal() -> None:
    """Nothing is lost or too wide; odd details neither steer the terminal nor make lines of their own."""
    found = published(empty_node())
    odd = changed(found.sources[0], reason="odd", detail="\x1b[2J\n\u202e" + "学" * 200)
    found = changed(found, sources=(odd, *found.sources[1:]))
    checks = examine(found, ALL_WELL)
    piped = doctor_table(checks, Shape()).splitlines()
    assert len(piped) == len(checks) + 3
    assert [line.split()[0] for line in piped[1:-2]] == [one.check for one in checks]
    for columns in (60, 100, 300):
        lines = doctor_table(checks, Shape(screen=Screen(columns))).splitlines()
        assert max(map(cells, lines[:-1])) <= columns
        assert all(character.isprintable() for line in lines for character in line)
        assert "".join("".join(lines).split()).count("学") == 200


# --- facts of this machine --------------------------------------------------------------------------------------------


def status(capabilities: int) -> str:
    return f"Name:\tgpumap\nCapPrm:\t0000000000000000\nCapEff:\t{capabilities:016x}\nSeccomp:\t2\n"


@pytest.fixture(name="root")
def make_root(tmp_path: Path) -> Path:
    """A machine's files as a container without privileges sees them: `self` and nothing else."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text(status(0))
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    return tmp_path


def test_privileges_of_the_chart(root: Path) -> None:
    held = privileges(root / "self", root)
    assert (held.capabilities, held.api_token, held.runtime_sockets, held.bare_host) == ((), None, (), False)


def test_privileges_that_are_too_many(root: Path) -> None:
    """Each is found where Kubernetes and the runtimes put it; the capabilities that matter most come first."""
    (root / "self" / "status").write_text(status((1 << 41) - 1))
    token = root / "var/run/secrets/kubernetes.io/serviceaccount/token"
    for path in (token, root / "run/containerd/containerd.sock", root / "run/docker.sock"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (root / "var/run/docker.sock").symlink_to(root / "run/docker.sock")
    held = privileges(root / "self", root)
    assert set(held.capabilities) == set(CAPABILITIES)
    assert held.capabilities[0] == "SYS_ADMIN"
    assert held.api_token == "/var/run/secrets/kubernetes.io/serviceaccount/token"
    assert held.runtime_sockets == ("/run/containerd/containerd.sock", "/run/docker.sock")


def test_privileges_that_cannot_be_read_are_not_claimed(root: Path) -> None:
    """Without /proc/self nothing is said to be held."""
    held = privileges(root / "missing", root)
    assert (held.capabilities, held.bare_host) == ((), False)
    (root / "self" / "cgroup").write_text("0::/system.slice/sshd.service\n")
    assert privileges(root / "self", root).bare_host


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
                found, facts = await here(node)
            for path in closed:
                path.chmod(0o755)
    checks = by_name(examine(found, facts))
    for name in ("kubelet", "device_checkpoint", "pod_logs", "push"):
        assert checks[name].state == "failed"
        assert "user 0" in (checks[name].remedy or "")
    assert "Permission denied" in (checks["device_checkpoint"].why or "")


async def here(node: Node) -> tuple[SeenNode, Facts]:
    """What doctor learns when it runs in this process."""
    given = parse(command_parser(), ["doctor", *node.flags, "--nvml-library", "/none"])
    settings = resolve(given, {})
    async with contextlib.aclosing(this_node.from_node(settings, 1.0)) as answers:
        found = await anext(answers)
    assert isinstance(found, NodeMaps)
    return found.maps[0], await look(settings)


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


async def diagnose(node: Node, *, code: int, library: str | None = None, **states: str) -> Diagnosis:
    """Run `gpumap doctor -o json` on a node: only valid JSON on stdout, nothing on stderr.

    On a busy machine a check may not be done in its time: it is run until the checks have these states.
    """
    flags = [*node.flags, "--nvml-library", library or str(node.library)]

    async def ask() -> tuple[int, Diagnosis]:
        variables = standin.environment(node.library, node.state)
        done = await run_command_in_loop("doctor", "-o", "json", *flags, **variables)
        values = json.loads(done.stdout)
        assert (done.stderr, values["ok"]) == ("", done.returncode == 0), done
        return done.returncode, {one["check"]: one for one in values["checks"]}

    def holds(answer: tuple[int, Diagnosis]) -> bool:
        return answer[0] == code and {name: answer[1][name]["state"] for name in states} == states

    return (await until(ask, holds, f"not {code} with {states}"))[1]


async def test_doctor_of_a_healthy_node(node: Node) -> None:
    """Everything works, with what each source was seen to say; the same as a table. GPM is not on every GPU."""
    well = {**dict.fromkeys(LADDER, "ok"), "pci": "unknown", "gpm": "not needed"}
    found = await diagnose(node, code=0, **well)
    assert found["xid_events"]["seen"] == "registered on 3 GPUs"
    assert found["kubelet"]["seen"] == (
        "1 pod listed, offered: 2 nvidia.com/gpu, 4 nvidia.com/gpu.shared, 1 pod with GPUs, 6 slots offered on devices"
    )
    assert "3 GPUs" in str(found["nvml"]["seen"])
    assert found["device_checkpoint"]["seen"] == "1 entry of 1 pod, 2 resources registered"
    assert found["pod_logs"]["seen"] == "directories of 1 pod, links of 1 container"
    assert found["push"]["seen"] == "4 directories watched"
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
    found = {one["check"]: one for one in json.loads(done.stdout)["checks"]}
    assert (done.returncode, done.stderr) == (1, "")
    states = {name: found[name]["state"] for name in LADDER}
    assert states == {
        "kubelet": "missing",
        "nvml": "missing",
        "device_checkpoint": "missing",
        "pod_logs": "missing",
        "push": "missing",
        "proc": "failed",
        "pid_visibility": "missing",
        "pci": "unknown",
        "process_utilization": "unknown",
        "gpm": "unknown",
        "xid_events": "unknown",
    }
    of_gpus = {"pci", "process_utilization", "gpm", "xid_events"}
    assert {name for name in LADDER if not found[name]["remedy"]} == of_gpus


async def test_doctor_of_an_agent_that_released_the_driver(node: Node) -> None:
    """While it collects nothing, as long as somebody signals, its data gets too old: doctor, map and readyz say why."""
    async with serve(node, "--interval", "1s", "--stale-after", "1s") as agent:

        async def asked() -> str:
            os.kill(agent.pid, signal.SIGUSR1)  # each begins the time again
            return (await agent.get("/readyz")).text

        why = "SIGUSR1 released the driver"
        message = await until(asked, lambda text: "no collection for" in text, "it stays ready")
        assert why in message
        os.kill(agent.pid, signal.SIGUSR1)
        shown = decode((await agent.get("/api/v1/map")).text.encode())
    assert why in (shown.stale or "")
    assert "gpm" in (shown.collect or ())
    assert (shown.gpus, shown.accounts) == ((), ())
    assert [(one.check, one.state) for one in examine(shown, None) if one.required] == [
        ("kubelet", "failed"),
        ("nvml", "failed"),
    ]
