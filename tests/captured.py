"""Captures for tests: made of generated nodes; and what must not be found in one that was anonymized."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from gpumap.agent._proto.podresources import v1_pb2
from gpumap.lab.capture import answers, contents
from gpumap.lab.capture.contents import Down, LogEntry
from gpumap.lab.capture.format import About, Capture, Frame
from gpumap.lab.demo import texts
from gpumap.model.names import FINDINGS
from gpumap.model.observations import CheckpointEntry, DeviceId, NvmlReading, PluginAnswer, ResourceDevices
from tests.nodes import Pod, Process, TestNode, resources, uuid_of

OWN = b"0::/system.slice/gpumap.service\n"


class Claim(NamedTuple):
    """A device that a pod's containers have by a claim."""

    pod: Pod
    name: str
    driver: str
    device: str


def capture_of(node: TestNode, claims: Iterable[Claim] = (), detail: str = "in this test") -> Capture:
    """What the sources of a generated node say, once; `detail` is what those that are down say of it."""
    observed = replace(node, memory=node.memory).observe()
    claims = list(claims)
    files: dict[str, bytes] = {}
    down = {name: Down(f"{name}_missing", detail) for name in ("checkpoint", "pod_logs")}
    if "kubelet" in node.down:
        down["kubelet"] = Down(node.kubelet_reason, detail)
    else:
        files |= _kubelet(node, claims)
    if node.checkpoint_readable:
        files[contents.CHECKPOINT] = _checkpoint(node)
        del down["checkpoint"]
    if claims:
        files |= {contents.DRA_STATE: _dra_state(claims), contents.DRA_CHECKPOINT: _dra_checkpoint(node, claims)}
    if node.logs_readable:
        files[contents.LOG_TREE] = contents.log_text(_log_entries(node.pods))
        del down["pod_logs"]
    if "procfs" in node.down:
        down["procfs"] = Down("unreadable", detail)
    else:
        files |= _processes(node)
    reading = getattr(observed.nvml, "value", None)
    nvml = reading if isinstance(reading, NvmlReading) else Down("driver_not_loaded", detail)
    files |= {contents.NVML: contents.reading_text(nvml), contents.DOWN: contents.down_text(down)}
    contents.check(files)
    return Capture(About("worker-seventeen", origin="a test"), (Frame(0.0, files),))


def _kubelet(node: TestNode, claims: Sequence[Claim]) -> dict[str, bytes]:
    pods = [
        v1_pb2.PodResources(
            namespace=pod.namespace,
            name=pod.name,
            containers=[
                v1_pb2.ContainerResources(
                    name=name,
                    devices=list(_devices(resources(ids))),
                    dynamic_resources=[_claim(claim) for claim in claims if claim.pod is pod],
                )
                for name, ids in pod.ids.items()
            ],
        )
        for pod in node.pods
        if pod.listed
    ]
    offered = list(_devices(resources(node.allocatable or {})))
    return {
        "kubelet/list.pb": v1_pb2.ListPodResourcesResponse(pod_resources=pods).SerializeToString(),
        "kubelet/allocatable.pb": v1_pb2.AllocatableResourcesResponse(devices=offered).SerializeToString(),
    }


def _dra_state(claims: Sequence[Claim]) -> bytes:
    """As kubelets since 1.32 write it."""
    entries = [
        {
            "ClaimUID": uuid_of("claim", claim.name),
            "ClaimName": claim.name,
            "Namespace": claim.pod.namespace,
            "PodUIDs": {claim.pod.uid: {}},
            "DriverState": {claim.driver: {"Devices": [{"PoolName": "worker-seventeen", "DeviceName": claim.device}]}},
        }
        for claim in claims
    ]
    return json.dumps({"Data": json.dumps({"kind": "DRACheckpoint", "Entries": entries}), "Checksum": 17}).encode()


def _dra_checkpoint(node: TestNode, claims: Sequence[Claim]) -> bytes:
    """As NVIDIA's DRA driver writes it, with what gpumap must not record: a claim's UID, a configuration."""
    uuids = [str(uuid) for gpu in node.gpus for uuid in gpu.leaves] or [f"GPU-{uuid_of('of no node')}"]
    prepared = {}
    for number, claim in enumerate(claims):
        uuid = uuids[number % len(uuids)]
        part = {"concrete": {"migUUID": uuid}} if uuid.startswith("MIG-") else {"info": {"uuid": uuid}}
        device = {**part, "device": {"Requests": ["secret-request"], "DeviceName": claim.device}}
        amount = {"memory": f"{number}Gi"} if number % 2 else {}
        result = {"driver": "gpu.nvidia.com", "device": claim.device, "consumedCapacity": amount}
        kind = "mig" if uuid.startswith("MIG-") else "gpu"
        prepared[uuid_of("claim", number)] = {
            "checkpointState": "PrepareCompleted",
            "name": claim.name,
            "namespace": claim.pod.namespace,
            "status": {"allocation": {"devices": {"results": [result], "config": [{"opaque": "secret-config"}]}}},
            "preparedDevices": [{"devices": [{kind: device}], "configState": {"mpsControlDaemonID": "secret-mps"}}],
        }
    return json.dumps({"checksum": 1, "v2": {"checksum": 2, "preparedClaims": prepared}}).encode()


def _claim(claim: Claim) -> v1_pb2.DynamicResource:
    device = v1_pb2.ClaimResource(driver_name=claim.driver, pool_name="worker-seventeen", device_name=claim.device)
    return v1_pb2.DynamicResource(claim_name=claim.name, claim_namespace=claim.pod.namespace, claim_resources=[device])


def _devices(found: Iterable[ResourceDevices]) -> Iterator[v1_pb2.ContainerDevices]:
    for one in found:
        for id_ in one.ids:
            yield v1_pb2.ContainerDevices(resource_name=one.resource, device_ids=[id_])


def _checkpoint(node: TestNode) -> bytes:
    rows = [
        CheckpointEntry(
            pod.uid,
            container,
            resource,
            frozenset(map(DeviceId, ids)),
            PluginAnswer(envs=(("NVIDIA_VISIBLE_DEVICES", ",".join(ids)),)),
        )
        for pod in node.pods
        if pod.in_checkpoint
        for container, of_container in {**pod.ids, **pod.init}.items()
        for resource, ids in of_container.items()
    ]
    return texts.checkpoint_text(rows, list(resources(node.registered)), {}).encode()


def _log_entries(pods: Iterable[Pod]) -> list[LogEntry]:
    entries = {LogEntry("d", "755", "var/log/pods"), LogEntry("d", "755", "var/log/containers")}
    for pod in pods:
        tree = f"{pod.namespace}_{pod.name}_{pod.uid}"
        for container in {**pod.ids, **pod.init} if pod.has_tree else ():
            entries.add(LogEntry("d", "755", f"var/log/pods/{tree}/{container}"))
            name = f"{pod.name}_{pod.namespace}_{container}-{pod.container_id(container)}"[:251]
            target = f"/var/log/pods/{tree}/{container}/0.log"
            entries |= {LogEntry("l", "777", f"var/log/containers/{name}.log", target)} if pod.has_links else set()
    return sorted(entries)


def _processes(node: TestNode) -> dict[str, bytes]:
    files: dict[str, bytes] = {contents.OWN_CGROUP: OWN if node.visible else b"0::/\n"}
    if not node.visible:
        return files
    files[contents.OWN_PID_IN_TREE] = b""
    for process in node.processes:
        if not process.left:
            stat = texts.stat_text(process.pid, process.comm, process.start).encode() if process.readable else b""
            files |= {f"proc/{process.pid}/stat": stat, f"proc/{process.pid}/cgroup": _cgroup(process)}
    return files


def _cgroup(process: Process) -> bytes:
    path = "/user.slice/user-31415.slice/session-7.scope"
    if process.pod is not None:
        id_ = process.pod.container_id(process.container)
        path = texts.pod_cgroup("v2-systemd", "burstable", process.pod.uid, id_)
    return texts.cgroup_text("v2-systemd", path).encode()


# --- what must not be found -------------------------------------------------------------------------------------------

KEPT = frozenset(
    {
        "default",
        "kube-system",
        "kai-resource-reservation",
        "resource-reservation",  # a part of it, and the name of the container
        "python3",
        "nvidia-cuda-mps",
        "nvidia-mps",
        "nvidia-smi",
        "Xorg",
        "slurmd",
        "slurmstepd",
        "compute",
        "gpumap",
        "mig",
        "mps",
        "vcuda",
        "core",
        "vgpu",
        "cri",
        "dra",
        "free",
        "index",
        "model",
        "worker",
        *FINDINGS,  # words of the page
    }
)
"""Kept on purpose, or words of ids, cgroups and families that a name happens to be too."""
SHORTEST_NAME = 3
"""A shorter name is in any text by chance."""
_ID = re.compile(r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{12,64}")


def secrets_of(capture: Capture) -> set[str]:
    """Names, and ids without dashes, that identify the node. Taken from the files by hand, not by what renames."""
    names, ids = {capture.about.node}, set[str]()
    for frame in capture.frames:
        names |= _names(frame.files)
        for path, content in _readable(frame.files):
            # What looks like an id in the rest of these is none.
            if not path.endswith(("stat", "socket")):
                ids |= {re.sub("[-_]", "", found) for found in _ID.findall(content) if not found.isdigit()}
    # A short name without vowels may be what another has become.
    telling = {name for name in names if len(name) >= SHORTEST_NAME and (len(name) > 6 or re.search("[aeiou]", name))}
    return telling - KEPT | ids


def _names(files: Mapping[str, bytes]) -> set[str]:
    listed = v1_pb2.ListPodResourcesResponse.FromString(answers.answer(files, contents.LIST) or b"")
    names = {name for pod in listed.pod_resources for name in (pod.namespace, pod.name)}
    containers = [container for pod in listed.pod_resources for container in pod.containers]
    names |= {container.name for container in containers}
    names |= {claim.claim_name for container in containers for claim in container.dynamic_resources}
    for entry in contents.log_entries(files) or ():
        steps = entry.path.split("/")
        if len(steps) > 3 and entry.kind == "d":
            names |= {*steps[3].split("_"), *steps[4:5]}
    rows = json.loads(files.get(contents.CHECKPOINT, b'{"Data": {}}'))["Data"].get("PodDeviceEntries") or ()
    names |= {row["ContainerName"] for row in rows}
    names |= _names_in_claims(files)
    for path, content in files.items():
        if path.endswith("/stat") and content:
            names.add(content.decode().partition("(")[2].rpartition(")")[0])
        if path.endswith("/cgroup"):
            names |= {*re.findall(r"user-\d+", content.decode()), *re.findall(r"([a-z-]+)\.service", content.decode())}
    return names


def _names_in_claims(files: Mapping[str, bytes]) -> set[str]:
    state = json.loads(files.get(contents.DRA_STATE, b'{"entries": []}'))
    state = json.loads(state["Data"]) if "Data" in state else state
    names = {entry[key] for entry in state.get("Entries") or state.get("entries") for key in ("ClaimName", "Namespace")}
    driver = json.loads(files.get(contents.DRA_CHECKPOINT, b'{"v2": {"preparedClaims": {}}}'))
    prepared = driver["v2"]["preparedClaims"].values()
    names |= {claim[key] for claim in prepared for key in ("name", "namespace")}
    return names | ({"secret-request", "secret-config", "secret-mps"} if prepared else set())


def _readable(files: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """Every text of a capture, with what is written in base64 in it."""
    for path, content in files.items():
        text = content.decode(errors="replace")
        yield path, text
        for word in re.findall(r"[A-Za-z0-9+/]{8,}={0,2}", text):
            try:
                yield path, base64.b64decode(word, validate=True).decode(errors="replace")
            except ValueError:
                continue


def found_in(folder: Path, secrets: set[str]) -> set[str]:
    """Those that are anywhere below a folder: in a file's name or bytes, in base64, or with other dashes."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    content = "\n".join(content for _, content in _readable(files))
    text = "\n".join((*files, *(line for line in content.splitlines() if not line.startswith("# HELP"))))
    dashless = re.sub(r"(?<=[0-9a-f])[-_](?=[0-9a-f])", "", text)
    words = {*re.findall(r"[A-Za-z0-9]+(?:[-.][A-Za-z0-9]+)*", text)}
    words |= {part for word in words for part in _parts(word)}
    return {secret for secret in secrets if secret in words or (_ID.fullmatch(secret) and secret in dashless)}


def _parts(word: str) -> Iterator[str]:
    """Each run of a word's parts: a name may be before or after others."""
    parts = re.split(r"([-.])", word)
    for first in range(0, len(parts), 2):
        for last in range(first + 1, len(parts) + 1, 2):
            yield "".join(parts[first:last])
