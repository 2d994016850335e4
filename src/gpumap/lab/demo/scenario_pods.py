"""Completes the pods and processes of a scenario: the devices that each one holds or uses, and when it runs.

Devices and times are checked against the GPUs and the length of the play. `allocation` assigns the ids of requests
later. Texts may name devices: `{0}` is the uuid of GPU 0, `{2.1}` that of MIG device 1 of GPU 2.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from msgspec import Struct, structs

from gpumap.lab.demo.scenario_model import (
    Answer,
    Container,
    Duration,
    Gpu,
    HostProcess,
    Instant,
    Leaf,
    MigPlace,
    Pod,
    Process,
    decode,
    each,
)
from gpumap.lab.demo.yaml_reading import ScenarioError
from gpumap.model.observations import PluginAnswer

P = TypeVar("P", bound=Process)
T = TypeVar("T")

STARTUP_SECONDS = 2.0
"""From a pod's admission to its first process: the kubelet assigns before the container is made."""
SHUTDOWN_SECONDS = 1.0
"""From the end of a pod's processes to its end."""
IDS_MAX = 10_000
"""Of one text with ranges."""

_DEVICE = re.compile(r"\{(\d{1,6})(?:\.(\d{1,6}))?\}", re.ASCII)
_RANGE = re.compile(r"\[(\d{1,9})-(\d{1,9})\]", re.ASCII)


class Request(NamedTuple):
    """A device that a container asks for: `slots` of a shared GPU, else the whole device."""

    place: str
    leaf: Leaf
    slots: int


class _Bounds(NamedTuple):
    """What a process must fit in: its pod, from `start` to `latest`, and what its container holds."""

    leaves: tuple[Leaf, ...] = ()
    start: float | None = None
    latest: float = math.inf
    init: bool = False


class PodReader:
    """Completes the pods and processes of one scenario; they name its GPUs."""

    def __init__(self, node: str, repeat_seconds: float, gpus: Sequence[Gpu]) -> None:
        self._node = node
        self._repeat_seconds = repeat_seconds
        self._gpus = gpus

    def pod(self, pod: Pod, place: str) -> Pod:
        """A pod. Its containers' requests have no ids yet."""
        start, end = self._pod_lifetime(pod, place)
        latest = self._repeat_seconds if pod.leaks or pod.end is None else pod.end - SHUTDOWN_SECONDS
        containers = (
            self._container(container, f"{place}.containers[{number}]", start, latest)
            for number, container in enumerate(pod.containers)
        )
        name = f"{pod.name}-{self._node}" if pod.static else pod.name
        return structs.replace(pod, name=name, start=start, end=end, containers=tuple(containers))

    def host_process(self, process: HostProcess, place: str) -> HostProcess:
        """A process in no pod."""
        process = self._process(process, place, _Bounds(latest=self._repeat_seconds))
        return structs.replace(process, cgroup=process.cgroup or f"/system.slice/{process.comm}.service")

    def ids(self, entries: Mapping[str, Sequence[str]], place: str) -> dict[str, tuple[str, ...]]:
        """Ids by resource; `[0-3]` in one means four of them."""
        ids_of: dict[str, tuple[str, ...]] = {}
        for resource, texts in self._named(entries, place).items():
            resource_place = f"{place}.{resource}"
            ids = {id_ for number, text in enumerate(texts) for id_ in _range(text, f"{resource_place}[{number}]")}
            ids_of[resource] = tuple(sorted(ids))
        return ids_of

    def _pod_lifetime(self, pod: Pod, place: str) -> tuple[Instant | None, Duration | None]:
        """Both or neither: a pod without an end ends with the play."""
        if pod.start is None and pod.end is None:
            return None, None
        start, end = pod.start or Instant(0), Duration(self._repeat_seconds) if pod.end is None else pod.end
        if end <= start:
            raise ScenarioError(f"{place}: ends before it begins")
        return start, end

    def _container(self, container: Container, place: str, start: float | None, latest: float) -> Container:
        requests = list(self.requests(container, place))
        ids = self.ids(container.ids, f"{place}.ids")
        resources = {self._gpus[request.leaf.gpu].ids(request.leaf.instance)[0] for request in requests}
        bounds = _Bounds(tuple(request.leaf for request in requests), start, latest, container.init)
        processes = (
            self._process(process, f"{place}.processes[{number}]", bounds)
            for number, process in enumerate(container.processes)
        )
        return structs.replace(
            container,
            ids=ids,
            answer=self._answers(container, place, sorted({*resources, *ids})),
            claims=self._named(container.claims, f"{place}.claims"),
            processes=tuple(processes),
        )

    # --- devices of the node's own plugin -----------------------------------------------------------------------------

    def requests(self, container: Container, place: str) -> Iterator[Request]:
        """What a container asks for: `gpus`, `slots` and `mig`."""
        for number, index in enumerate(container.gpus):
            gpu_place = f"{place}.gpus[{number}]"
            gpu = self._gpu(index, gpu_place)
            if gpu.mig:
                raise ScenarioError(f'{gpu_place}: gpu {index} is partitioned, ask for its devices with "mig"')
            if gpu.replicas:
                raise ScenarioError(f'{gpu_place}: gpu {index} is shared, ask for its slots with "slots"')
            yield Request(gpu_place, Leaf(index), 1)
        for slots, gpu_place in each(container.slots, f"{place}.slots"):
            if not self._gpu(slots.gpu, f"{gpu_place}.gpu").replicas:
                raise ScenarioError(f'{gpu_place}: gpu {slots.gpu} has no slots (it has no "replicas")')
            yield Request(gpu_place, Leaf(slots.gpu), slots.count)
        for mig, gpu_place in each(container.mig, f"{place}.mig"):
            self._mig_uuid(self._gpu(mig.gpu, f"{gpu_place}.gpu"), mig.instance, gpu_place)
            yield Request(gpu_place, Leaf(mig.gpu, mig.instance), 1)

    def _gpu(self, index: int, place: str) -> Gpu:
        """A GPU by its NVML index."""
        if not 0 <= index < len(self._gpus):
            raise ScenarioError(f"{place}: there is no gpu {index} (this node has {len(self._gpus)})")
        return self._gpus[index]

    def _mig_uuid(self, gpu: Gpu, number: int, place: str) -> str:
        """The uuid of a MIG device by its number on its GPU."""
        if number >= len(gpu.devices):
            raise ScenarioError(f"{place}: gpu {gpu.index} has no MIG device {number} (it has {len(gpu.devices)})")
        return gpu.devices[number].uuid

    # --- processes ----------------------------------------------------------------------------------------------------

    def _process(self, process: P, place: str, bounds: _Bounds) -> P:
        start, end = self._process_lifetime(process, place, bounds)
        process = structs.replace(process, start=start, end=end)
        if not process.leaves:
            if not bounds.leaves:
                raise ScenarioError(f'{place}: its container holds no device, so it needs "gpu" or "mig"')
            gpus = tuple(leaf.gpu for leaf in bounds.leaves if leaf.instance is None)
            migs = tuple(MigPlace(leaf.gpu, leaf.instance) for leaf in bounds.leaves if leaf.instance is not None)
            return structs.replace(process, gpu=gpus, mig=migs)
        for index, gpu_place in each(process.gpu, f"{place}.gpu"):
            if self._gpu(index, gpu_place).mig:
                raise ScenarioError(f'{place}.gpu: gpu {index} is partitioned, name its device with "mig"')
        for mig, mig_place in each(process.mig, f"{place}.mig"):
            self._mig_uuid(self._gpu(mig.gpu, f"{mig_place}.gpu"), mig.instance, mig_place)
        return process

    def _process_lifetime(
        self, process: Process, place: str, bounds: _Bounds
    ) -> tuple[Instant | None, Duration | None]:
        start, latest = bounds.start, bounds.latest
        if bounds.init and start is None:
            raise ScenarioError(f"{place}: its pod is always there, so its init containers have finished")
        if bounds.init and process.end is None:
            raise ScenarioError(f'{place}: a process of an init container needs an "until"')
        if start is None and process.start is None and process.end is None:
            return None, None
        default = 0.0 if start is None else start + STARTUP_SECONDS
        begins = default if process.start is None else process.start
        ends = latest if process.end is None else process.end
        if begins < (start or 0.0):
            raise ScenarioError(f"{place}: begins before its pod")
        if ends > latest:
            is_play = latest == self._repeat_seconds
            why = "the play ends" if is_play else 'its pod needs (unless it has "leaks") it to end'
            raise ScenarioError(f"{place}: lives until {ends:g}s, but {why} at {latest:g}s")
        if ends <= begins:
            raise ScenarioError(f"{place}: would live from {begins:g}s to {ends:g}s, which is never")
        return Instant(begins), Duration(ends)

    # --- plugins of other makers, and DRA drivers ---------------------------------------------------------------------

    def _answers(self, container: Container, place: str, resources: Sequence[str]) -> dict[str, PluginAnswer]:
        """What plugins answered to the allocation of `resources`: one answer for all of them, or one for each.

        Names of resources have a "/", the keys of an answer have none.
        """
        if not container.answer:
            return {}
        place = f"{place}.answer"
        if not resources:
            raise ScenarioError(f"{place}: its container holds nothing that a plugin could answer to")
        answers = self._named(container.answer, place)
        if not any("/" in key for key in answers):
            return dict.fromkeys(resources, _answer(answers, place))
        for key in answers:
            if key not in resources:
                raise ScenarioError(f'{place}: its container does not hold "{key}" (it holds {", ".join(resources)})')
        return {resource: _answer(answer, f"{place}.{resource}") for resource, answer in answers.items()}

    def _named(self, value: T, place: str) -> T:
        """Return a value with uuids in place of the names of devices in its texts."""

        def uuid(match: re.Match[str]) -> str:
            gpu = self._gpu(int(match[1]), place)
            return gpu.uuid if match[2] is None else self._mig_uuid(gpu, int(match[2]), place)

        named: object = value
        if isinstance(value, str):
            named = _DEVICE.sub(uuid, value)
        elif isinstance(value, dict):
            named = {key: self._named(entry, f"{place}.{key}") for key, entry in value.items()}
        elif isinstance(value, tuple | list):
            named = type(value)(self._named(entry, f"{place}[{number}]") for number, entry in enumerate(value))
        elif isinstance(value, Struct):
            named = type(value)(**self._named(structs.asdict(value), place))
        return named  # type: ignore[return-value]


def _answer(value: object, place: str) -> PluginAnswer:
    answer = decode(value, Answer, place)
    return PluginAnswer(
        envs=tuple(answer.envs.items()),
        annotations=tuple(answer.annotations.items()),
        device_paths=answer.devices,
        mount_paths=answer.mounts,
        cdi_devices=answer.cdi,
    )


def _range(text: str, place: str) -> list[str]:
    """The ids of a text: with each number of its ranges, or with each pair of two."""
    pieces = _RANGE.split(text)
    bounds = [(int(low), int(high)) for low, high in zip(pieces[1::3], pieces[2::3], strict=True)]
    for low, high in bounds:
        if high < low:
            raise ScenarioError(f"{place}: the range [{low}-{high}] ends before it begins")
    if math.prod(high - low + 1 for low, high in bounds) > IDS_MAX:
        raise ScenarioError(f"{place}: means more than {IDS_MAX} ids")
    form = "{}".join(piece.replace("{", "{{").replace("}", "}}") for piece in pieces[::3])
    return [form.format(*numbers) for numbers in itertools.product(*(range(low, high + 1) for low, high in bounds))]
