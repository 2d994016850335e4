"""Reads a scenario: YAML → a checked `Scenario`, or a `ScenarioError` of one line that names the place of the mistake.

Two scenarios come with gpumap: default.yaml is the play that `gpumap demo` shows, sharing.yaml a tour of every way to
share a GPU. What is not written is derived from the node's name, and two readers of one text agree on it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from gpumap.agent.files import open_at_once
from gpumap.lab.demo import scenario_file
from gpumap.lab.demo.allocation import assign, check_memory
from gpumap.lab.demo.names import derived_uuid
from gpumap.lab.demo.scenario_file import GIB, MIB, NOT_OFFERED, PROFILE
from gpumap.lab.demo.scenario_model import GpuSpec, MigDevice, PodSpec, Scenario
from gpumap.lab.demo.scenario_pods import PodReader
from gpumap.lab.demo.yaml_reading import ScenarioError
from gpumap.model.readings import Uuid

__all__ = ["Scenario", "ScenarioError", "default_scenario", "load_scenario", "parse_scenario"]

FILE_NAME_BYTES_MAX = 255
UID, STATIC_UID = "0" * 36, "0" * 32
"""As long as those that are derived."""
MAX_SLICES = 7
PROFILE_IDS = {1: 19, 2: 14, 3: 9, 4: 5, 7: 0}
"""By slices, as `nvidia-smi mig -lgip` has them of an A100 and an H100; of the plain profiles."""
MEMORY_SLICES = {1: 1, 2: 2, 3: 4, 4: 4}
"""By slices, of 8; the larger ones have all."""


FILE_BYTES_MAX = 1 << 20
"""No node that a person writes down is as large."""


def load_scenario(path: Path) -> Scenario:
    """The scenario in a file, or one of those that ship, by its name. A mistake is reported with the file's name."""
    try:
        if len(path.parts) > 1 or path.suffix or (path.exists() and not path.is_dir()):
            return parse_scenario(_text_of(path))
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ScenarioError(f"{path}: {error}") from error
    return _shipped(str(path))


def _text_of(path: Path) -> str:
    """Read a file of at most `FILE_BYTES_MAX`. It does not wait for a pipe that no process writes into."""
    with open_at_once(path) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ScenarioError("is not a regular file")
        text = file.read(FILE_BYTES_MAX + 1)
    if len(text) > FILE_BYTES_MAX:
        raise ScenarioError(f"is larger than {FILE_BYTES_MAX >> 20} MiB")
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ScenarioError("is not UTF-8 text") from error


def default_scenario() -> Scenario:
    """The embedded play."""
    return _shipped("default")


def _shipped(bare: str) -> Scenario:
    files = {file.name: file for file in resources.files("gpumap.lab.demo").iterdir() if file.name.endswith(".yaml")}
    if f"{bare}.yaml" not in files:
        known = ", ".join(sorted(file.removesuffix(".yaml") for file in files))
        raise ScenarioError(f"{bare}: no such file, nor a scenario that comes with gpumap ({known})")
    return parse_scenario(files[f"{bare}.yaml"].read_text(encoding="utf-8"))


def parse_scenario(text: str) -> Scenario:
    """The scenario that a YAML text describes."""
    file = scenario_file.read_scenario_file(text)
    gpus = _gpus(file)
    reader = PodReader(file.node, file.repeat, gpus)
    offers = reader.ids(file.kubelet.offers, "kubelet.offers")
    pods = tuple(reader.pod(pod, f"pods[{number}]") for number, pod in enumerate(file.pods))
    hosts = tuple(reader.host_process(one, f"host_processes[{n}]") for n, one in enumerate(file.host_processes))
    _check_times(file, gpus, pods)
    _check_names(pods)
    assigned = assign(gpus, pods)
    check_memory(gpus, assigned, hosts)
    return Scenario(file.node, file.repeat, file.cgroups, gpus, file.kubelet.away, offers, assigned, hosts, text)


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _gpus(file: scenario_file.ScenarioFile) -> tuple[GpuSpec, ...]:
    """The GPUs in the order of their NVML index."""
    gpus = tuple(_gpu(entry, index, file) for index, entry in enumerate(file.gpus))
    seen: dict[object, str] = {}
    for gpu in gpus:
        for what, key in [("minor", gpu.minor), ("uuid", gpu.uuid), *(("uuid", device.uuid) for device in gpu.mig)]:
            if key in seen:
                raise ScenarioError(f"gpus[{gpu.index}]: {what} {key} is also that of {seen[key]}")
            seen[key] = f"gpus[{gpu.index}]"
    return gpus


def _gpu(entry: scenario_file.GpuEntry, index: int, file: scenario_file.ScenarioFile) -> GpuSpec:
    place = f"gpus[{index}]"
    uuid = entry.uuid or f"GPU-{derived_uuid(file.node, 'gpu', index)}"
    mig = _mig_devices(entry, place, uuid)
    replicas = entry.replicas or 0
    if mig and replicas:
        raise ScenarioError(f'{place}.replicas: a GPU with "mig" cannot have replicas')
    taken = entry.reserved + sum({device.gpu_instance_id: device.memory_bytes for device in mig}.values())
    if taken >= entry.memory:
        what = "reserved memory and MIG devices take" if mig else "the reserved memory takes"
        raise ScenarioError(f"{place}: {what} {taken / GIB:.1f} GiB of {entry.memory / GIB:.1f} GiB")
    resource = entry.resource or ("nvidia.com/gpu.shared" if replicas else "nvidia.com/gpu")
    return GpuSpec(
        index=index,
        uuid=Uuid(uuid),
        minor=index if entry.minor is None else entry.minor,
        pci_bus_id=f"00000000:{0x18 + 0x11 * index & 0xFF:02X}:00.0",
        model=entry.model,
        memory_bytes=int(entry.memory),
        reserved_bytes=int(entry.reserved),
        power_limit_watts=float(entry.power_limit),
        numa=2 * index // len(file.gpus) if entry.numa is None else entry.numa,
        resource="" if resource == NOT_OFFERED else resource,
        replicas=replicas,
        mig=mig,
        faults=entry.faults,
        xids=_xids(entry, place, len(mig)),
        ecc=entry.ecc,
        remapped_rows=entry.remapped_rows,
    )


def _xids(entry: scenario_file.GpuEntry, place: str, instances: int) -> tuple[scenario_file.Xid, ...]:
    """In the order of their times."""
    for number, xid in enumerate(entry.xids):
        at = f"{place}.xids[{number}].instance"
        if xid.instance is not None and not instances:
            raise ScenarioError(f"{at}: the GPU has no MIG devices")
        if xid.instance is not None and xid.instance >= instances:
            most = instances - 1
            raise ScenarioError(f'{at}: expected a whole number from 0 to {most}, found "{xid.instance}"')
    return tuple(sorted(entry.xids, key=lambda xid: xid.at))


def _mig_devices(gpu: scenario_file.GpuEntry, place: str, parent: str) -> tuple[MigDevice, ...]:
    """Entries are GPU instances: a profile, or a mapping. Each has one or more compute instances."""
    devices: list[MigDevice] = []
    slices = start = 0
    used_ids: dict[int, str] = {}
    for number, entry in enumerate(gpu.mig):
        at = f"{place}.mig[{number}]"
        instance = scenario_file.GpuInstanceEntry(profile=entry) if isinstance(entry, str) else entry
        instance_id = number + 1 if instance.gpu_instance_id is None else instance.gpu_instance_id
        if instance_id in used_ids:
            raise ScenarioError(f"{at}: GPU instance id {instance_id} is also that of {used_ids[instance_id]}")
        used_ids[instance_id] = at
        profile = _profile(instance.profile)
        span = MEMORY_SLICES.get(int(profile["slices"]), 8)
        start = -(-start // span) * span  # an instance begins at a multiple of its size
        devices += _compute_instances(instance, at, instance_id, (start, span), parent, gpu.resource or "")
        slices += int(profile["slices"])
        start += span
    if slices > MAX_SLICES:
        raise ScenarioError(f"{place}.mig: the profiles take {slices} of {MAX_SLICES} slices")
    return tuple(devices)


def _compute_instances(
    entry: scenario_file.GpuInstanceEntry,
    at: str,
    instance_id: int,
    placement: tuple[int, int],
    parent: str,
    resource: str,
) -> Iterator[MigDevice]:
    profile = _profile(entry.profile)
    if profile["compute"]:
        raise ScenarioError(f'{at}.profile: a compute instance ({profile[0]}) belongs under "compute"')
    if entry.compute and entry.uuid:
        raise ScenarioError(f'{at}.uuid: with "compute" each compute instance has its own uuid')
    slices = int(profile["slices"])
    memory = int(profile["memory"]) * GIB * 97 // 100 // MIB * MIB if entry.memory is None else entry.memory
    parts = [
        _compute_instance(part, f"{at}.compute[{number}]", profile)
        for number, part in enumerate(entry.compute or (scenario_file.ComputeInstanceEntry(profile[0], entry.uuid),))
    ]
    if sum(slices for _, slices, _ in parts) > slices:
        raise ScenarioError(f"{at}.compute: takes more than the {slices} slices of {profile[0]}")
    for number, (name, compute_slices, uuid) in enumerate(parts):
        yield MigDevice(
            uuid=Uuid(uuid or f"MIG-{derived_uuid(parent, instance_id, number)}"),
            profile=name,
            resource=resource or f"nvidia.com/mig-{name.replace('+', '.')}",
            gpu_instance_id=instance_id,
            compute_instance_id=number,
            compute_slices=compute_slices,
            memory_bytes=int(memory),
            profile_id=PROFILE_IDS.get(slices),
            placement_start=placement[0],
            placement_size=placement[1],
        )


def _compute_instance(
    entry: str | scenario_file.ComputeInstanceEntry, at: str, profile: re.Match[str]
) -> tuple[str, int, str | None]:
    """Name, slices and uuid."""
    part = scenario_file.ComputeInstanceEntry(entry) if isinstance(entry, str) else entry
    own = _profile(part.profile)
    if own[0] == profile[0]:
        return own[0], int(own["slices"]), part.uuid
    if own["compute"] is None or not own[0].endswith(f"c.{profile[0]}"):
        raise ScenarioError(f"{at}: expected a compute instance of {profile[0]}, such as 1c.{profile[0]}")
    return own[0], int(own["compute"]), part.uuid


def _profile(text: str) -> re.Match[str]:
    match = PROFILE.fullmatch(text)
    if match is None:  # its type has this pattern
        raise ScenarioError(f"not a MIG profile: {text}")
    return match


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_times(file: scenario_file.ScenarioFile, gpus: Sequence[GpuSpec], pods: Sequence[PodSpec]) -> None:
    repeat, away = file.repeat, file.kubelet.away
    ends: list[tuple[str, float]] = []
    ends += [(f"gpus[{gpu.index}].faults[{n}]", fault.end) for gpu in gpus for n, fault in enumerate(gpu.faults)]
    ends += [(f"kubelet.away[{n}]", absence.complete) for n, absence in enumerate(away)]
    ends += [(pod.place, pod.end) for pod in pods if pod.end is not None]
    for place, end in ends:
        if end > repeat:
            raise ScenarioError(f"{place}: ends at {end:g}s, after the play (repeat: {repeat:g}s)")
    for gpu in gpus:
        late = next((xid.at for xid in gpu.xids if xid.at >= repeat), None)
        if late is not None:
            raise ScenarioError(f"gpus[{gpu.index}].xids: one comes at {late:g}s, after the play (repeat: {repeat:g}s)")
    for pod in pods:
        for absence in away:
            if pod.start is not None and absence.start <= pod.start < absence.end:
                raise ScenarioError(f"{pod.place}: cannot start at {pod.start:g}s, while the kubelet is away")


def _check_names(pods: Sequence[PodSpec]) -> None:
    """Two pods may have one name one after the other, but not at the same time."""
    for number, pod in enumerate(pods):
        folder = f"{pod.namespace}_{pod.name}_{pod.uid or (STATIC_UID if pod.static else UID)}"
        if len(folder) > FILE_NAME_BYTES_MAX:
            raise ScenarioError(
                f"{pod.place}: its log directory <namespace>_<name>_<uid> has {len(folder)} characters in its name, "
                f"{FILE_NAME_BYTES_MAX} are the most that Linux takes"
            )
        names = [container.name for container in pod.containers]
        for container in names:
            if names.count(container) > 1:
                raise ScenarioError(f'{pod.place}: has two containers named "{container}"')
        for other in pods[:number]:
            if pod.uid is not None and pod.uid == other.uid:
                raise ScenarioError(f"{pod.place}.uid: is also that of {other.place}")
            if (pod.namespace, pod.name) == (other.namespace, other.name) and pod.overlaps(other):
                raise ScenarioError(f"{pod.place}: {pod.namespace}/{pod.name} is there at that time, by {other.place}")
