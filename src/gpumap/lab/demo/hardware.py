"""Reads the `gpus` of a scenario: cards and their MIG devices.

What is not written is derived from the node's name, so that two readers of one scenario agree on it.
"""

from __future__ import annotations

import re
from functools import partial

from gpumap.lab.demo.faults import read_faults, read_wear, read_xids
from gpumap.lab.demo.names import derived_uuid
from gpumap.lab.demo.scenario_model import GIB, MIB, GpuSpec, MigDevice
from gpumap.lab.demo.yaml_fields import Fields, ScenarioError, integer, list_of, matching, size, text, watts
from gpumap.model.readings import Uuid

UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
PROFILE = re.compile(r"(?:(?P<compute>[1-7])c\.)?(?P<slices>[1-7])g\.(?P<memory>\d{1,4})gb(\+[a-z.]+)?", re.ASCII)
MAX_SLICES = 7
PROFILE_IDS = {1: 19, 2: 14, 3: 9, 4: 5, 7: 0}
"""By slices, as `nvidia-smi mig -lgip` has them of an A100 and an H100; of the plain profiles."""
MEMORY_SLICES = {1: 1, 2: 2, 3: 4, 4: 4}
"""By slices, of 8; the larger ones have all."""
NOT_OFFERED = "none"
GPU_KEYS = (
    "model",
    "memory",
    "uuid",
    "minor",
    "reserved",
    "power_limit",
    "numa",
    "resource",
    "replicas",
    "mig",
    "faults",
    "xids",
    "ecc",
    "remapped_rows",
)

_resource = matching(r"[a-z0-9.-]+/[A-Za-z0-9._-]+|none", "none, or a resource name such as nvidia.com/gpu")
_gpu_uuid = matching(f"GPU-{UUID}", "a GPU uuid such as GPU-b1028956-cfa2-4990-bf4a-5da9abb51763")
_mig_uuid = matching(f"MIG-{UUID}", "a MIG uuid such as MIG-7b2f9c84-0e5d-5a1b-b3c4-d5e6f7a8b9c0")


def read_gpus(fields: Fields, node: str) -> tuple[GpuSpec, ...]:
    """The cards in the order of their NVML index."""
    entries = fields.need("gpus", list_of(lambda value, place: Fields(value, place, GPU_KEYS)))
    gpus = tuple(_gpu(entry, index, len(entries), node) for index, entry in enumerate(entries))
    seen: dict[object, str] = {}
    for gpu in gpus:
        for what, key in [("minor", gpu.minor), ("uuid", gpu.uuid), *(("uuid", device.uuid) for device in gpu.mig)]:
            if key in seen:
                raise ScenarioError(f"gpus[{gpu.index}]: {what} {key} is also that of {seen[key]}")
            seen[key] = f"gpus[{gpu.index}]"
    return gpus


def _gpu(fields: Fields, index: int, count: int, node: str) -> GpuSpec:
    uuid = fields.maybe("uuid", _gpu_uuid, f"GPU-{derived_uuid(node, 'gpu', index)}")
    memory = fields.need("memory", size)
    reserved = fields.maybe("reserved", size, 512 * MIB)
    resource = fields.maybe("resource", _resource, "")
    mig = _mig(fields, uuid, resource)
    replicas = fields.maybe("replicas", integer(2, 1000), 0)
    if mig and replicas:
        raise ScenarioError(f'{fields.at("replicas")}: a GPU with "mig" cannot have replicas')
    taken = reserved + sum({device.gpu_instance_id: device.memory_bytes for device in mig}.values())
    if taken >= memory:
        what = "reserved memory and MIG devices take" if mig else "the reserved memory takes"
        raise ScenarioError(f"{fields.place}: {what} {taken / GIB:.1f} GiB of {memory / GIB:.1f} GiB")
    return GpuSpec(
        index=index,
        uuid=Uuid(uuid),
        minor=fields.maybe("minor", integer(0, 255), index),
        pci_bus_id=f"00000000:{0x18 + 0x11 * index & 0xFF:02X}:00.0",
        model=fields.need("model", text),
        memory_bytes=memory,
        reserved_bytes=reserved,
        power_limit_watts=fields.maybe("power_limit", watts, 700.0),
        numa=fields.maybe("numa", integer(0, 63), 2 * index // count),
        resource="" if resource == NOT_OFFERED else resource or _default_resource(replicas),
        replicas=replicas,
        mig=mig,
        faults=read_faults(fields),
        xids=read_xids(fields, len(mig)),
        wear=read_wear(fields),
    )


def _default_resource(replicas: int) -> str:
    return "nvidia.com/gpu.shared" if replicas else "nvidia.com/gpu"


def _mig(fields: Fields, parent: str, resource: str) -> tuple[MigDevice, ...]:
    """Entries are GPU instances: a profile alone, or a mapping. Each has one or more compute instances."""
    devices: list[MigDevice] = []
    slices = 0
    used_ids: dict[int, str] = {}
    start = 0
    for number, (value, place) in enumerate(fields.each("mig", lambda value, place: (value, place))):
        entry = Fields(
            {"profile": value} if isinstance(value, str) else value,
            place,
            ("profile", "uuid", "gpu_instance_id", "memory", "compute"),
        )
        profile = entry.need("profile", _profile)
        slices += int(profile["slices"])
        instance_id = entry.maybe("gpu_instance_id", integer(0, 15), number + 1)
        if instance_id in used_ids:
            raise ScenarioError(f"{place}: GPU instance id {instance_id} is also that of {used_ids[instance_id]}")
        used_ids[instance_id] = place
        span = MEMORY_SLICES.get(int(profile["slices"]), 8)
        start = -(-start // span) * span  # an instance begins at a multiple of its size
        devices += _compute_instances(entry, profile, instance_id, (start, span), parent, resource)
        start += span
    if slices > MAX_SLICES:
        raise ScenarioError(f"{fields.at('mig')}: the profiles take {slices} of {MAX_SLICES} slices")
    return tuple(devices)


def _compute_instances(
    entry: Fields, profile: re.Match[str], instance_id: int, place: tuple[int, int], parent: str, resource: str
) -> list[MigDevice]:
    memory = entry.maybe("memory", size, int(profile["memory"]) * GIB * 97 // 100 // MIB * MIB)
    if profile["compute"]:
        raise ScenarioError(f'{entry.at("profile")}: a compute instance ({profile[0]}) belongs under "compute"')
    if "compute" in entry and "uuid" in entry:
        raise ScenarioError(f'{entry.at("uuid")}: with "compute" each compute instance has its own uuid')
    parts = entry.maybe("compute", list_of(partial(_compute_instance, profile=profile)), ())
    parts = parts or ((profile[0], int(profile["slices"]), entry.maybe("uuid", _mig_uuid, "")),)
    if sum(slices for _, slices, _ in parts) > int(profile["slices"]):
        raise ScenarioError(f"{entry.at('compute')}: takes more than the {profile['slices']} slices of {profile[0]}")
    return [
        MigDevice(
            uuid=Uuid(uuid or f"MIG-{derived_uuid(parent, instance_id, number)}"),
            profile=name,
            resource=resource or f"nvidia.com/mig-{name.replace('+', '.')}",
            gpu_instance_id=instance_id,
            compute_instance_id=number,
            compute_slices=slices,
            memory_bytes=memory,
            profile_id=PROFILE_IDS.get(int(profile["slices"])),
            placement_start=place[0],
            placement_size=place[1],
        )
        for number, (name, slices, uuid) in enumerate(parts)
    ]


def _compute_instance(value: object, place: str, profile: re.Match[str]) -> tuple[str, int, str]:
    """Name, slices, and the uuid or nothing."""
    fields = Fields({"profile": value} if isinstance(value, str) else value, place, ("profile", "uuid"))
    own = fields.need("profile", _profile)
    if own["compute"] is None and own[0] == profile[0]:
        return own[0], int(own["slices"]), fields.maybe("uuid", _mig_uuid, "")
    if own["compute"] is None or not own[0].endswith(f"c.{profile[0]}"):
        raise ScenarioError(f"{place}: expected a compute instance of {profile[0]}, such as 1c.{profile[0]}")
    return own[0], int(own["compute"]), fields.maybe("uuid", _mig_uuid, "")


def _profile(value: object, place: str) -> re.Match[str]:
    match = PROFILE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ScenarioError(f"{place}: expected a MIG profile such as 1g.10gb or 1c.3g.40gb")
    return match
