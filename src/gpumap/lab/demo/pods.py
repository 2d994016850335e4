"""Reads the `pods` and `host_processes` of a scenario: who holds which devices, and what runs on them when.

Places and times are checked against the cards and the length of the play; ids of claims are given later (assign.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from gpumap.lab.demo.places import read_claims, read_leaves
from gpumap.lab.demo.plugin_allocations import ForeignReader
from gpumap.lab.demo.scenario_model import (
    ContainerSpec,
    GpuSpec,
    HostProcess,
    LeafPlace,
    PodSpec,
    ProcessSpec,
    Ramp,
    Wave,
    leaf_ids,
)
from gpumap.lab.demo.yaml_fields import (
    Fields,
    ScenarioError,
    boolean,
    duration,
    instant,
    list_of,
    matching,
    name,
    one_of,
    ratio,
    size,
)

TYPES = {"compute": "C", "graphics": "G", "compute+graphics": "C+G", "mps": "M"}
QOS = ("guaranteed", "burstable", "besteffort")
POD_KEYS = ("namespace", "name", "uid", "static", "qos", "from", "until", "leaks", "containers")
CONTAINER_KEYS = ("name", "init", "gpus", "slots", "mig", "ids", "answer", "alloc_env", "claims", "processes")
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


def read_pod(
    value: object, place: str, node: str, repeat: float, gpus: Sequence[GpuSpec], foreign: ForeignReader
) -> PodSpec:
    """A pod. Its containers' claims have no ids yet."""
    fields = Fields(value, place, POD_KEYS)
    static = fields.maybe("static", boolean, False)
    start, end = _lifetime(fields, repeat)
    leaks = fields.maybe("leaks", boolean, False)
    if leaks and "until" not in fields:
        raise ScenarioError(f'{place}: "leaks" needs an "until", which its processes outlive')
    latest = repeat if end is None or leaks or "until" not in fields else end - SHUTDOWN_SECONDS
    around = _Around(gpus, held=(), start=start, latest=latest, end_of_play=repeat)
    namespace = fields.maybe("namespace", name, "default")
    read_container = partial(_container, around=around, foreign=foreign, namespace=namespace)
    containers = fields.need("containers", list_of(read_container))
    if all(container.init for container in containers):
        raise ScenarioError(f'{place}: needs a container that is not "init"')
    pod_name = fields.need("name", name)
    return PodSpec(
        place=place,
        namespace=namespace,
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


def _container(value: object, place: str, around: _Around, foreign: ForeignReader, namespace: str) -> ContainerSpec:
    fields, gpus = Fields(value, place, CONTAINER_KEYS), around.gpus
    claims = read_claims(fields, gpus)
    devices = fields.maybe("ids", foreign.ids, ())
    resources = {leaf_ids(gpus[claim.leaf.gpu], claim.leaf.instance)[0] for claim in claims}
    resources |= {of_resource.resource for of_resource in devices}
    dra, notes = foreign.claims(fields, namespace)
    init = fields.maybe("init", boolean, False)
    inside = replace(around, held=tuple(claim.leaf for claim in claims), init=init)
    return ContainerSpec(
        name=fields.need("name", name),
        init=init,
        claims=claims,
        devices=devices,
        answers=foreign.answers(fields, sorted(resources)),
        dra=dra,
        notes=notes,
        processes=fields.each("processes", partial(_process, around=inside)),
    )


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
        leaves=tuple(dict.fromkeys(read_leaves(fields, around.gpus, around.held))),
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
