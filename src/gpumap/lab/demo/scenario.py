"""Reads a scenario: YAML → a checked `Scenario`, or a `ScenarioError` of one line that names the place of the mistake.

Two scenarios come with gpumap: default.yaml is the play that `gpumap demo` shows, sharing.yaml a tour of every way to
share a GPU. What is not written is derived from the node's name, and two readers of one text agree on it.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from msgspec import structs

from gpumap.lab.capture import contents
from gpumap.lab.demo.allocation import assign, check_memory
from gpumap.lab.demo.scenario_model import Gpu, GpuEntry, Scenario, ScenarioFile, decode
from gpumap.lab.demo.scenario_pods import PodReader
from gpumap.lab.demo.texts import derived_uuid
from gpumap.lab.demo.yaml_reading import ScenarioError, read_yaml

__all__ = ["Scenario", "ScenarioError", "default_scenario", "load_scenario", "parse_scenario"]

UID = "0" * 36
"""As long as those that are derived."""


def load_scenario(path: Path) -> Scenario:
    """The scenario in a file, or one of those that ship, by its name. A mistake is reported with the file's name."""
    try:
        if len(path.parts) > 1 or path.suffix or (path.exists() and not path.is_dir()):
            return parse_scenario(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ScenarioError) as error:
        reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", error)
        raise ScenarioError(f"{path}: {reason}") from error
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


def parse_scenario(text: str) -> Scenario:
    """The scenario that a YAML text describes."""
    file = decode(read_yaml(text), ScenarioFile)
    gpus = tuple(_gpu(entry, index, file) for index, entry in enumerate(file.gpus))
    reader = PodReader(file.node, file.repeat_seconds, gpus)
    hosts = tuple(reader.host_process(process, f"host_processes[{n}]") for n, process in enumerate(file.host_processes))
    pods = [reader.pod(pod, f"pods[{number}]") for number, pod in enumerate(file.pods)]
    offers = reader.ids(file.kubelet.offers, "kubelet.offers")
    completed: dict[str, Any] = {
        "gpus": gpus,
        "kubelet": structs.replace(file.kubelet, offers=offers),
        "pods": assign(reader, gpus, pods),
        "host_processes": hosts,
    }
    scenario = Scenario(**(structs.asdict(file) | completed), text=text)
    _check_uuids(scenario)
    _check_times(scenario)
    _check_names(scenario)
    check_memory(scenario)
    return scenario


def _gpu(entry: GpuEntry, index: int, file: ScenarioFile) -> Gpu:
    written = {name: value for name, value in structs.asdict(entry).items() if value is not None}
    derived: dict[str, Any] = {
        "uuid": f"GPU-{derived_uuid(file.node, 'gpu', index)}",
        "minor": index,
        "numa": 2 * index // len(file.gpus),
    }
    return Gpu(index=index, **(derived | written))


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_uuids(scenario: Scenario) -> None:
    place_of: dict[object, str] = {}
    for gpu in scenario.gpus:
        for kind, key in [("minor", gpu.minor), ("uuid", gpu.uuid), *(("uuid", device.uuid) for device in gpu.devices)]:
            if key in place_of:
                raise ScenarioError(f"gpus[{gpu.index}]: {kind} {key} is also that of {place_of[key]}")
            place_of[key] = f"gpus[{gpu.index}]"


def _check_times(scenario: Scenario) -> None:
    repeat, away = scenario.repeat_seconds, scenario.kubelet.away
    ends: list[tuple[str, float]] = []
    for gpu in scenario.gpus:
        ends += [(f"gpus[{gpu.index}].faults[{n}]", fault.end) for n, fault in enumerate(gpu.faults)]
        ends += [(f"gpus[{gpu.index}].xids[{n}]", xid.moment) for n, xid in enumerate(gpu.xids)]
    ends += [(f"kubelet.away[{n}]", absence.complete) for n, absence in enumerate(away)]
    ends += [(f"pods[{n}]", pod.end) for n, pod in enumerate(scenario.pods) if pod.end is not None]
    for place, end in ends:
        if end > repeat:
            raise ScenarioError(f"{place}: {end:g}s is after the play (repeat: {repeat:g}s)")
    for number, pod in enumerate(scenario.pods):
        for absence in away:
            if pod.start is not None and absence.start <= pod.start < absence.end:
                raise ScenarioError(f"pods[{number}]: cannot start at {pod.start:g}s, while the kubelet is away")


def _check_names(scenario: Scenario) -> None:
    """Two pods may have one name one after the other, but not at the same time."""
    for number, pod in enumerate(scenario.pods):
        folder = f"{pod.namespace}_{pod.name}_{pod.uid or UID}"
        if len(folder) > contents.NAME_BYTES_MAX:
            raise ScenarioError(
                f"pods[{number}]: the name of its log directory has {len(folder)} characters, more than 255"
            )
        for earlier, other_pod in enumerate(scenario.pods[:number]):
            if pod.uid is not None and pod.uid == other_pod.uid:
                raise ScenarioError(f"pods[{number}].uid: is also that of pods[{earlier}]")
            if (pod.namespace, pod.name) == (other_pod.namespace, other_pod.name) and pod.overlaps(other_pod):
                name = f"{pod.namespace}/{pod.name}"
                raise ScenarioError(f"pods[{number}]: {name} is there at that time, by pods[{earlier}]")
