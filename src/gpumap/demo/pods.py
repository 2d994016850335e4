"""Reads the `pods` and `host_processes` of a scenario: who holds which devices, and what runs on them when.

Places and times are checked against the cards and the length of the play; ids of claims are given later (assign.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from gpumap.demo.play import Claim, ContainerSpec, GpuSpec, HostProcess, LeafPlace, PodSpec, ProcessSpec, Ramp, Wave
from gpumap.demo.yaml_fields import (
    Fields,
    ScenarioError,
    boolean,
    duration,
    expected,
    instant,
    integer,
    list_of,
    matching,
    name,
    one_of,
    one_or_list_of,
    ratio,
    size,
    text,
    texts,
)
from gpumap.model import DeviceId, ResourceDevices

TYPES = {"compute": "C", "graphics": "G", "compute+graphics": "C+G", "mps": "M"}
QOS = ("guaranteed", "burstable", "besteffort")
POD_KEYS = ("namespace", "name", "uid", "static", "qos", "from", "until", "leaks", "containers")
CONTAINER_KEYS = ("name", "init", "gpus", "slots", "mig", "ids", "alloc_env", "processes")
PROCESS_KEYS = (
    "gpu",
    "mig",
    "type",
    "memory",
    "sm",
    "memory_controller",
    "encoder",
    "decoder",
    "from",
    "until",
    "comm",
)

STARTUP_SECONDS = 2.0
"""From a pod's admission to its first process: the kubelet assigns before the container is made."""
SHUTDOWN_SECONDS = 1.0
"""From the end of a pod's processes to its end."""

_cgroup = matching(r"/[!-~]*", "a cgroup path that begins with /")
_comm = matching(r"[^\x00-\x1f/()]{1,15}", "a command name of 1 to 15 characters, no control character, /, ( or )")
_uid = matching(
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}", "a UUID, or 32 hex digits for a static pod, in quotes"
)


def read_pod(value: object, place: str, node: str, repeat: float, gpus: Sequence[GpuSpec]) -> PodSpec:
    """A pod. Its containers' claims have no ids yet."""
    fields = Fields(value, place, POD_KEYS)
    static = fields.maybe("static", boolean, False)
    start, end = _lifetime(fields, repeat)
    leaks = fields.maybe("leaks", boolean, False)
    if leaks and "until" not in fields:
        raise ScenarioError(f'{place}: "leaks" needs an "until", which its processes outlive')
    latest = repeat if end is None or leaks or "until" not in fields else end - SHUTDOWN_SECONDS
    around = _Around(gpus, held=(), start=start, latest=latest, end_of_play=repeat)
    containers = fields.need("containers", list_of(partial(_container, around=around)))
    if all(container.init for container in containers):
        raise ScenarioError(f'{place}: needs a container that is not "init"')
    pod_name = fields.need("name", name)
    return PodSpec(
        place=place,
        namespace=fields.maybe("namespace", name, "default"),
        name=f"{pod_name}-{node}" if static else pod_name,
        uid=fields.maybe("uid", _uid, None),
        static=static,
        qos=fields.maybe("qos", one_of(*QOS), "burstable"),
        start=start,
        end=end,
        leaks=leaks,
        containers=containers,
    )


def _lifetime(fields: Fields, repeat: float) -> tuple[float | None, float | None]:
    """Both or neither: what has no end of its own ends with the play."""
    if "from" not in fields and "until" not in fields:
        return None, None
    start, end = fields.maybe("from", instant, 0.0), fields.maybe("until", duration, repeat)
    if end <= start:
        raise ScenarioError(f"{fields.place}: ends before it begins")
    return start, end


def _container(value: object, place: str, around: _Around) -> ContainerSpec:
    fields, gpus = Fields(value, place, CONTAINER_KEYS), around.gpus
    claims = (
        *fields.each("gpus", partial(_exclusive, gpus=gpus)),
        *fields.maybe("slots", one_or_list_of(partial(_slots, gpus=gpus)), ()),
        *fields.maybe("mig", one_or_list_of(lambda entry, at: Claim(at, _mig(entry, at, gpus), 1)), ()),
    )
    foreign = fields.maybe("ids", partial(_raw_ids, gpus=gpus), ())
    init = fields.maybe("init", boolean, False)
    inside = replace(around, held=tuple(claim.leaf for claim in claims), init=init)
    return ContainerSpec(
        name=fields.need("name", name),
        init=init,
        claims=claims,
        devices=foreign,
        alloc_env=fields.maybe("alloc_env", texts, ()),
        processes=fields.each("processes", partial(_process, around=inside)),
    )


def _gpu_index(value: object, place: str, gpus: Sequence[GpuSpec]) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise expected("the number of a GPU", value, place)
    if not 0 <= value < len(gpus):
        raise ScenarioError(f"{place}: there is no gpu {value} (this node has {len(gpus)})")
    return value


def _exclusive(value: object, place: str, gpus: Sequence[GpuSpec]) -> Claim:
    index = _gpu_index(value, place, gpus)
    if gpus[index].mig:
        raise ScenarioError(f'{place}: gpu {index} is partitioned, ask for its devices with "mig"')
    if gpus[index].replicas:
        raise ScenarioError(f'{place}: gpu {index} is shared, ask for its slots with "slots"')
    return Claim(place, LeafPlace(index), 1)


def _slots(value: object, place: str, gpus: Sequence[GpuSpec]) -> Claim:
    fields = Fields(value, place, ("gpu", "count"))
    index = fields.need("gpu", partial(_gpu_index, gpus=gpus))
    if not gpus[index].replicas:
        raise ScenarioError(f'{place}: gpu {index} has no slots (it has no "replicas")')
    count = fields.maybe("count", integer(1, 1000), 1)
    if count > gpus[index].replicas:
        raise ScenarioError(f"{place}: asks for {count} slots of gpu {index}, which has {gpus[index].replicas}")
    return Claim(place, LeafPlace(index), count)


def _mig(value: object, place: str, gpus: Sequence[GpuSpec]) -> LeafPlace:
    fields = Fields(value, place, ("gpu", "instance"))
    index = fields.need("gpu", partial(_gpu_index, gpus=gpus))
    instance = fields.need("instance", integer(0, 63))
    if instance >= len(gpus[index].mig):
        raise ScenarioError(f"{place}: gpu {index} has no MIG device {instance} (it has {len(gpus[index].mig)})")
    return LeafPlace(index, instance)


def _raw_ids(value: object, place: str, gpus: Sequence[GpuSpec]) -> tuple[ResourceDevices, ...]:
    """Ids of a foreign plugin, by resource; `{2}` in one stands for the uuid of GPU 2."""
    if not isinstance(value, dict):
        raise expected("a mapping of resources to ids", value, place)

    def read_id(entry: object, at: str) -> DeviceId:
        def uuid(match: re.Match[str]) -> str:
            return gpus[_gpu_index(int(match[1]), at, gpus)].uuid

        return DeviceId(re.sub(r"\{(\d{1,6})\}", uuid, text(entry, at)))

    return tuple(
        sorted(
            ResourceDevices(text(resource, place), tuple(sorted(set(list_of(read_id)(ids, f"{place}.{resource}")))))
            for resource, ids in value.items()
        )
    )


def _leaves(fields: Fields, gpus: Sequence[GpuSpec], held: tuple[LeafPlace, ...]) -> tuple[LeafPlace, ...]:
    if "gpu" in fields or "mig" in fields:
        cards = fields.maybe("gpu", one_or_list_of(partial(_gpu_index, gpus=gpus)), ())
        for index in cards:
            if gpus[index].mig:
                raise ScenarioError(f'{fields.at("gpu")}: gpu {index} is partitioned, name its device with "mig"')
        return (
            *(LeafPlace(index) for index in cards),
            *fields.maybe("mig", one_or_list_of(partial(_mig, gpus=gpus)), ()),
        )
    if not held:
        raise ScenarioError(f'{fields.place}: its container holds no device, so it needs "gpu" or "mig"')
    return held


@dataclass(frozen=True, slots=True)
class _Around:
    """What a process must fit in: its pod, from `start` to `latest`, and what its container holds."""

    gpus: Sequence[GpuSpec]
    held: tuple[LeafPlace, ...]
    start: float | None
    latest: float
    end_of_play: float
    init: bool = False


def _process(value: object, place: str, around: _Around, more_keys: tuple[str, ...] = ()) -> ProcessSpec:
    fields = Fields(value, place, PROCESS_KEYS + more_keys)
    start, end = _process_lifetime(fields, around)
    sm = fields.maybe("sm", _wave, Wave(0.0, 0.0))
    return ProcessSpec(
        comm=fields.maybe("comm", _comm, "python3"),
        types=TYPES[fields.maybe("type", one_of(*TYPES), "compute")],
        leaves=tuple(dict.fromkeys(_leaves(fields, around.gpus, around.held))),
        memory=fields.need("memory", _memory),
        sm=sm,
        memory_controller=fields.maybe("memory_controller", _wave, Wave(sm.low / 2, sm.high / 2, sm.period_seconds)),
        encoder=fields.maybe("encoder", _wave, Wave(0.0, 0.0)),
        decoder=fields.maybe("decoder", _wave, Wave(0.0, 0.0)),
        start=start,
        end=end,
    )


def _process_lifetime(fields: Fields, around: _Around) -> tuple[float | None, float | None]:
    place, start, latest = fields.place, around.start, around.latest
    if around.init and start is None:
        raise ScenarioError(f"{place}: its pod is always there, so its init containers have finished")
    if around.init and "until" not in fields:
        raise ScenarioError(f'{place}: a process of an init container needs an "until"')
    if start is None and "from" not in fields and "until" not in fields:
        return None, None
    begins = fields.maybe("from", instant, 0.0 if start is None else start + STARTUP_SECONDS)
    ends = fields.maybe("until", duration, latest)
    if begins < (start or 0.0):
        raise ScenarioError(f"{place}: begins before its pod")
    if ends > latest:
        why = "the play ends" if latest == around.end_of_play else 'its pod needs (unless it has "leaks") it to end'
        raise ScenarioError(f"{place}: lives until {ends:g}s, but {why} at {latest:g}s")
    if ends <= begins:
        raise ScenarioError(f"{place}: would live from {begins:g}s to {ends:g}s, which is never")
    return begins, ends


def _memory(value: object, place: str) -> Ramp | None:
    if value == "unknown":
        return None
    if isinstance(value, dict):
        fields = Fields(value, place, ("from", "to", "over"))
        return Ramp(fields.need("from", size), fields.need("to", size), fields.need("over", duration))
    constant = size(value, place)
    return Ramp(constant, constant)


def _wave(value: object, place: str) -> Wave:
    if isinstance(value, dict):
        fields = Fields(value, place, ("from", "to", "period"))
        return Wave(fields.need("from", ratio), fields.need("to", ratio), fields.maybe("period", duration, 60.0))
    constant = ratio(value, place)
    return Wave(constant, constant)


def read_host_process(value: object, place: str, repeat: float, gpus: Sequence[GpuSpec]) -> HostProcess:
    """A process in no pod."""
    around = _Around(gpus, held=(), start=None, latest=repeat, end_of_play=repeat)
    process = _process(value, place, around, more_keys=("cgroup",))
    fields = Fields(value, place, (*PROCESS_KEYS, "cgroup"))
    return HostProcess(fields.maybe("cgroup", _cgroup, f"/system.slice/{process.comm}.service"), process)
