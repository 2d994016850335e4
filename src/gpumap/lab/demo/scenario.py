"""Reads a scenario: YAML → a checked `Scenario`, or a `ScenarioError` of one line that names the place of the mistake.

docs/dev/scenario.md documents the format. Two scenarios come with gpumap: default.yaml is the play that `gpumap demo`
shows, sharing.yaml a tour of every way to share a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import resources
from pathlib import Path

from gpumap.lab.demo import assign
from gpumap.lab.demo.hardware import read_gpus
from gpumap.lab.demo.plugin_allocations import ForeignReader
from gpumap.lab.demo.pods import read_host_process, read_pod
from gpumap.lab.demo.scenario_model import GpuSpec, KubeletOutage, PodSpec, Scenario
from gpumap.lab.demo.yaml_fields import Fields, ScenarioError, duration, instant, name, one_of, read_yaml
from gpumap.model.observations import ResourceDevices

__all__ = ["Scenario", "ScenarioError", "default_scenario", "load_scenario", "parse_scenario"]

FILE_NAME_BYTES_MAX = 255
UID, STATIC_UID = "0" * 36, "0" * 32
"""As long as those that are derived."""
CGROUPS = ("v2-systemd", "v2-cgroupfs", "v1-cgroupfs")


def parse_scenario(source: str) -> Scenario:
    """The scenario that a YAML text describes."""
    fields = Fields(read_yaml(source), "", ("node", "repeat", "cgroups", "gpus", "kubelet", "pods", "host_processes"))
    node = fields.maybe("node", name, "demo-node")
    repeat = fields.maybe("repeat", duration, 300.0)
    gpus = read_gpus(fields, node)
    foreign = ForeignReader(node, gpus)
    away, offers = fields.maybe("kubelet", partial(_kubelet, foreign=foreign), ((), ()))
    pods = fields.each("pods", partial(read_pod, node=node, repeat=repeat, gpus=gpus, foreign=foreign))
    hosts = fields.each("host_processes", partial(read_host_process, repeat=repeat, gpus=gpus))
    _check_times(repeat, gpus, away, pods)
    _check_names(pods)
    assigned = assign.assign(gpus, pods)
    assign.check_memory(gpus, assigned, hosts)
    cgroups = fields.maybe("cgroups", one_of(*CGROUPS), CGROUPS[0])
    return Scenario(node, repeat, cgroups, gpus, away, offers, assigned, hosts, source)


def load_scenario(path: Path) -> Scenario:
    """The scenario in a file, or one of those that ship, by its name. Mistakes are told with the file's name."""
    try:
        if len(path.parts) > 1 or path.suffix or (path.exists() and not path.is_dir()):
            return parse_scenario(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ScenarioError(f"{path}: {error}") from error
    return _shipped(str(path))


def default_scenario() -> Scenario:
    """The embedded play."""
    return _shipped("default")


def _shipped(bare: str) -> Scenario:
    files = {file.name: file for file in resources.files("gpumap.lab.demo").iterdir() if file.name.endswith(".yaml")}
    if f"{bare}.yaml" not in files:
        known = ", ".join(sorted(file.removesuffix(".yaml") for file in files))
        raise ScenarioError(f"{bare}: no such file, nor a scenario that comes with gpumap ({known})")
    return parse_scenario(files[f"{bare}.yaml"].read_text(encoding="utf-8"))


def _kubelet(
    value: object, place: str, foreign: ForeignReader
) -> tuple[tuple[KubeletOutage, ...], tuple[ResourceDevices, ...]]:
    fields = Fields(value, place, ("away", "offers"))
    return fields.each("away", _away), fields.maybe("offers", foreign.ids, ())


def _away(value: object, place: str) -> KubeletOutage:
    fields = Fields(value, place, ("from", "until", "static_pods_for"))
    start, end = fields.need("from", instant), fields.need("until", duration)
    if end <= start:
        raise ScenarioError(f"{place}: ends before it begins")
    return KubeletOutage(start, end, end + fields.maybe("static_pods_for", instant, 5.0))


def _check_times(
    repeat: float, gpus: Sequence[GpuSpec], away: Sequence[KubeletOutage], pods: Sequence[PodSpec]
) -> None:
    ends = [(f"gpus[{gpu.index}].faults[{n}]", fault.end) for gpu in gpus for n, fault in enumerate(gpu.faults)]
    ends += [(f"kubelet.away[{n}]", absence.complete) for n, absence in enumerate(away)]
    ends += [(pod.place, pod.end) for pod in pods if pod.end is not None]
    for place, end in ends:
        if end > repeat:
            raise ScenarioError(f"{place}: ends at {end:g}s, after the play (repeat: {repeat:g}s)")
    for gpu in gpus:
        for xid in gpu.xids:
            if xid.at >= repeat:
                raise ScenarioError(
                    f"gpus[{gpu.index}].xids: one comes at {xid.at:g}s, after the play (repeat: {repeat:g}s)"
                )
    for pod in pods:
        for absence in away:
            if pod.start is not None and absence.start <= pod.start < absence.end:
                raise ScenarioError(f"{pod.place}: cannot start at {pod.start:g}s, while the kubelet is away")


def _check_names(pods: Sequence[PodSpec]) -> None:
    """A name may come again, as a successor, but not twice at once."""
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
            same = (pod.namespace, pod.name) == (other.namespace, other.name)
            if same and assign.overlap(pod, other):
                raise ScenarioError(f"{pod.place}: {pod.namespace}/{pod.name} is there at that time, by {other.place}")
