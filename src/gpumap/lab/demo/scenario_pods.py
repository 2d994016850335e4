"""Checks the pods and processes of a scenario: which devices each one holds or uses, and when it runs.

Devices and times are checked against the GPUs and the length of the play. `allocation` assigns the ids of claims later.
Texts may name devices: `{0}` is the uuid of GPU 0, `{2.1}` that of MIG device 1 of GPU 2.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gpumap.lab.decoding import unknown_key
from gpumap.lab.demo import scenario_file
from gpumap.lab.demo.scenario_file import Duration, Ramp, Ratio, Size, Wave
from gpumap.lab.demo.scenario_model import (
    Claim,
    ContainerSpec,
    GpuSpec,
    HostProcess,
    LeafPlace,
    PodSpec,
    ProcessSpec,
    leaf_ids,
)
from gpumap.lab.demo.yaml_reading import ScenarioError
from gpumap.model.observations import ClaimDevice, DeviceId, PluginAnswer, PreparedDevice, ResourceDevices
from gpumap.model.plugins import DRA_DRIVER
from gpumap.model.readings import Uuid

T = TypeVar("T")

NVML_TYPES: Mapping[scenario_file.ProcessType, str] = {
    "compute": "C",
    "graphics": "G",
    "compute+graphics": "C+G",
    "mps": "M",
}
STARTUP_SECONDS = 2.0
"""From a pod's admission to its first process: the kubelet assigns before the container is made."""
SHUTDOWN_SECONDS = 1.0
"""From the end of a pod's processes to its end."""
IDS_MAX = 10_000
"""In all of a scenario: a short text must not fill the memory of the process that reads it."""

_DEVICE = re.compile(r"\{(\d{1,6})(?:\.(\d{1,6}))?\}", re.ASCII)
_RANGE = re.compile(r"\[(\d{1,9})-(\d{1,9})\]", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What a process must fit in: its pod, from `start` to `latest`, and what its container holds."""

    held: tuple[LeafPlace, ...]
    start: float | None
    latest: float
    init: bool = False


class PodReader:
    """Reads the pods and processes of one scenario; they name its GPUs. It counts the ids of other plugins."""

    def __init__(self, node: str, repeat: float, gpus: Sequence[GpuSpec]) -> None:
        self._node = node
        self._repeat = repeat
        self._gpus = gpus
        self._ids = 0

    def pod(self, entry: scenario_file.PodEntry, place: str) -> PodSpec:
        """A pod. Its containers' claims have no ids yet."""
        start, end = self._pod_lifetime(entry, place)
        if entry.leaks and entry.end is None:
            raise ScenarioError(f'{place}: "leaks" needs an "until", which its processes outlive')
        latest = self._repeat if entry.leaks or entry.end is None else entry.end - SHUTDOWN_SECONDS
        containers = tuple(
            self._container(container, f"{place}.containers[{number}]", entry.namespace, start, latest)
            for number, container in enumerate(entry.containers)
        )
        if all(container.init for container in containers):
            raise ScenarioError(f'{place}: needs a container that is not "init"')
        return PodSpec(
            place=place,
            namespace=entry.namespace,
            name=f"{entry.name}-{self._node}" if entry.static else entry.name,
            uid=entry.uid,
            static=entry.static,
            qos=entry.qos,
            start=start,
            end=end,
            leaks=entry.leaks,
            containers=containers,
        )

    def host_process(self, entry: scenario_file.HostProcessEntry, place: str) -> HostProcess:
        """A process in no pod."""
        process = self._process(entry, place, _Bounds(held=(), start=None, latest=self._repeat))
        return HostProcess(entry.cgroup or f"/system.slice/{process.comm}.service", process)

    def ids(self, entries: Mapping[str, Sequence[str]], place: str) -> tuple[ResourceDevices, ...]:
        """Ids by resource; `[0-3]` in one means four of them."""
        found = []
        for resource, texts in entries.items():
            places = (f"{place}.{resource}[{number}]" for number in range(len(texts)))
            ids = {id_ for text, at in zip(texts, places, strict=True) for id_ in self._range(text, at)}
            found.append(ResourceDevices(resource, tuple(sorted(ids))))
        return tuple(sorted(found))

    def _pod_lifetime(self, entry: scenario_file.PodEntry, place: str) -> tuple[float | None, float | None]:
        """Both or neither: a pod without an end ends with the play."""
        if entry.start is None and entry.end is None:
            return None, None
        start, end = entry.start or 0.0, self._repeat if entry.end is None else entry.end
        if end <= start:
            raise ScenarioError(f"{place}: ends before it begins")
        return start, end

    def _container(
        self, entry: scenario_file.ContainerEntry, place: str, namespace: str, start: float | None, latest: float
    ) -> ContainerSpec:
        claims = tuple(self._claims(entry, place))
        devices = self.ids(entry.ids, f"{place}.ids")
        resources = {leaf_ids(self._gpus[claim.leaf.gpu], claim.leaf.instance)[0] for claim in claims}
        resources |= {of_resource.resource for of_resource in devices}
        dra = [self._dra_claim(one, f"{place}.claims[{n}]", namespace) for n, one in enumerate(entry.claims)]
        bounds = _Bounds(tuple(claim.leaf for claim in claims), start, latest, entry.init)
        return ContainerSpec(
            name=entry.name,
            init=entry.init,
            claims=claims,
            devices=devices,
            answers=self._answers(entry, place, sorted(resources)),
            dra=tuple(sorted({claim for claim, _ in dra})),
            notes=tuple(notes for _, notes in dra if notes is not None),
            processes=tuple(
                self._process(one, f"{place}.processes[{n}]", bounds) for n, one in enumerate(entry.processes)
            ),
        )

    # --- devices of the node's own plugin -----------------------------------------------------------------------------

    def _claims(self, entry: scenario_file.ContainerEntry, place: str) -> Iterator[Claim]:
        """What a container asks for: `gpus`, `slots` and `mig`."""
        for number, index in enumerate(entry.gpus):
            at = f"{place}.gpus[{number}]"
            gpu = self._gpu(index, at)
            if gpu.mig:
                raise ScenarioError(f'{at}: gpu {index} is partitioned, ask for its devices with "mig"')
            if gpu.replicas:
                raise ScenarioError(f'{at}: gpu {index} is shared, ask for its slots with "slots"')
            yield Claim(at, LeafPlace(index), 1)
        for slots, at in _each(entry.slots, f"{place}.slots"):
            gpu = self._gpu(slots.gpu, f"{at}.gpu")
            if not gpu.replicas:
                raise ScenarioError(f'{at}: gpu {slots.gpu} has no slots (it has no "replicas")')
            if slots.count > gpu.replicas:
                raise ScenarioError(f"{at}: asks for {slots.count} slots of gpu {slots.gpu}, which has {gpu.replicas}")
            yield Claim(at, LeafPlace(slots.gpu), slots.count)
        for mig, at in _each(entry.mig, f"{place}.mig"):
            yield Claim(at, self._mig(mig, at), 1)

    def _gpu(self, index: int, place: str) -> GpuSpec:
        """A GPU by its NVML index."""
        if not 0 <= index < len(self._gpus):
            raise ScenarioError(f"{place}: there is no gpu {index} (this node has {len(self._gpus)})")
        return self._gpus[index]

    def _mig(self, entry: scenario_file.MigDeviceEntry, place: str) -> LeafPlace:
        self._mig_uuid(self._gpu(entry.gpu, f"{place}.gpu"), entry.instance, place)
        return LeafPlace(entry.gpu, entry.instance)

    def _mig_uuid(self, gpu: GpuSpec, number: int, place: str) -> Uuid:
        """The uuid of a MIG device by its number on its GPU."""
        if number >= len(gpu.mig):
            raise ScenarioError(f"{place}: gpu {gpu.index} has no MIG device {number} (it has {len(gpu.mig)})")
        return gpu.mig[number].uuid

    # --- processes ----------------------------------------------------------------------------------------------------

    def _process(self, entry: scenario_file.ProcessEntry, place: str, bounds: _Bounds) -> ProcessSpec:
        start, end = self._process_lifetime(entry, place, bounds)
        sm = _wave(entry.sm)
        half = Wave(Ratio(sm.low / 2), Ratio(sm.high / 2), sm.period_seconds)
        return ProcessSpec(
            comm=entry.comm,
            types=NVML_TYPES[entry.type],
            leaves=tuple(dict.fromkeys(self._leaves(entry, place, bounds.held))),
            memory=_ramp(entry.memory),
            sm=sm,
            memory_controller=half if entry.memory_controller is None else _wave(entry.memory_controller),
            encoder=_wave(entry.encoder),
            decoder=_wave(entry.decoder),
            jpeg=_wave(entry.jpeg),
            ofa=_wave(entry.ofa),
            start=start,
            end=end,
        )

    def _process_lifetime(
        self, entry: scenario_file.ProcessEntry, place: str, bounds: _Bounds
    ) -> tuple[float | None, float | None]:
        start, latest = bounds.start, bounds.latest
        if bounds.init and start is None:
            raise ScenarioError(f"{place}: its pod is always there, so its init containers have finished")
        if bounds.init and entry.end is None:
            raise ScenarioError(f'{place}: a process of an init container needs an "until"')
        if start is None and entry.start is None and entry.end is None:
            return None, None
        default = 0.0 if start is None else start + STARTUP_SECONDS
        begins = default if entry.start is None else entry.start
        ends = latest if entry.end is None else entry.end
        if begins < (start or 0.0):
            raise ScenarioError(f"{place}: begins before its pod")
        if ends > latest:
            why = "the play ends" if latest == self._repeat else 'its pod needs (unless it has "leaks") it to end'
            raise ScenarioError(f"{place}: lives until {ends:g}s, but {why} at {latest:g}s")
        if ends <= begins:
            raise ScenarioError(f"{place}: would live from {begins:g}s to {ends:g}s, which is never")
        return begins, ends

    def _leaves(
        self, entry: scenario_file.ProcessEntry, place: str, held: tuple[LeafPlace, ...]
    ) -> Iterator[LeafPlace]:
        """The devices that a process uses: those that it names, else those that its container claims."""
        if entry.gpu is None and entry.mig is None:
            if not held:
                raise ScenarioError(f'{place}: its container holds no device, so it needs "gpu" or "mig"')
            yield from held
        for index, at in () if entry.gpu is None else _each(entry.gpu, f"{place}.gpu"):
            if self._gpu(index, at).mig:
                raise ScenarioError(f'{place}.gpu: gpu {index} is partitioned, name its device with "mig"')
            yield LeafPlace(index)
        for mig, at in () if entry.mig is None else _each(entry.mig, f"{place}.mig"):
            yield self._mig(mig, at)

    # --- plugins of other makers, and DRA drivers ---------------------------------------------------------------------

    def _answers(
        self, entry: scenario_file.ContainerEntry, place: str, resources: Collection[str]
    ) -> tuple[tuple[str, PluginAnswer], ...]:
        """What plugins answered to the allocation of `resources`: one answer for all of them, or one for each.

        Names of resources have a "/", the keys of an answer have none.
        """
        if entry.answer is None and entry.alloc_env is None:
            return ()
        if entry.answer is not None and entry.alloc_env is not None:
            raise ScenarioError(f'{place}: "alloc_env" is short for "envs" in "answer": give one of them')
        place = f"{place}.answer" if entry.alloc_env is None else f"{place}.alloc_env"
        if not resources:
            raise ScenarioError(f"{place}: its container holds nothing that a plugin could answer to")
        if entry.alloc_env is not None:
            envs = PluginAnswer(envs=self._texts(entry.alloc_env, place))
            return tuple((resource, envs) for resource in resources)
        if isinstance(entry.answer, dict) and any("/" in str(key) for key in entry.answer):
            for key in entry.answer:
                if key not in resources:
                    raise ScenarioError(unknown_key(str(key), resources, place))
            return tuple(
                (resource, self._answer(entry.answer[resource], f"{place}.{resource}"))
                for resource in resources
                if resource in entry.answer
            )
        one = self._answer(entry.answer, place)
        return tuple((resource, one) for resource in resources)

    def _answer(self, value: object, place: str) -> PluginAnswer:
        entry = scenario_file.read_answer(value, place)
        return PluginAnswer(
            envs=self._texts(entry.envs, f"{place}.envs"),
            annotations=self._texts(entry.annotations, f"{place}.annotations"),
            device_paths=self._list(entry.devices, f"{place}.devices"),
            mount_paths=self._list(entry.mounts, f"{place}.mounts"),
            cdi_devices=self._list(entry.cdi, f"{place}.cdi"),
        )

    def _dra_claim(
        self, entry: scenario_file.DraClaimEntry, place: str, namespace: str
    ) -> tuple[ClaimDevice, PreparedDevice | None]:
        """A DRA device, and what its driver wrote down of it. Pods of one namespace share a claim by its name."""
        claim = ClaimDevice(
            driver=entry.driver or DRA_DRIVER,
            pool=self._node,
            device=self._text(entry.device, f"{place}.device"),
            share_id=self._text(entry.share_id or "", f"{place}.share_id"),
            claim_namespace=namespace,
            claim=entry.claim,
        )
        if entry.notes is None:
            return claim, None
        if claim.driver != DRA_DRIVER:
            raise ScenarioError(f"{place}.notes: only {DRA_DRIVER} writes such, and this is {claim.driver}'s")
        uuid = Uuid(self._text(entry.notes.uuid, f"{place}.notes.uuid"))
        notes = PreparedDevice(
            namespace, claim.claim, claim.device, claim.share_id, uuid, entry.notes.admin_access, entry.notes.memory
        )
        return claim, notes

    def _range(self, text: str, place: str) -> list[DeviceId]:
        pieces = _RANGE.split(self._text(text, place))
        bounds = [(int(low), int(high)) for low, high in zip(pieces[1::3], pieces[2::3], strict=True)]
        for low, high in bounds:
            if high < low:
                raise ScenarioError(f"{place}: the range [{low}-{high}] ends before it begins")
        self._ids += math.prod(high - low + 1 for low, high in bounds)
        if self._ids > IDS_MAX:
            raise ScenarioError(f"{place}: with it, the scenario has more than {IDS_MAX} ids of other plugins")
        numbers = itertools.product(*(range(low, high + 1) for low, high in bounds))
        return [DeviceId(_interleaved(pieces[::3], chosen)) for chosen in numbers]

    def _texts(self, entries: Mapping[str, str], place: str) -> tuple[tuple[str, str], ...]:
        return tuple((key, self._text(entry, f"{place}.{key}")) for key, entry in entries.items())

    def _list(self, texts: Sequence[str], place: str) -> tuple[str, ...]:
        return tuple(self._text(text, f"{place}[{number}]") for number, text in enumerate(texts))

    def _text(self, text: str, place: str) -> str:
        """A text with the uuids of the devices that it names."""

        def uuid(match: re.Match[str]) -> str:
            gpu = self._gpu(int(match[1]), place)
            return gpu.uuid if match[2] is None else self._mig_uuid(gpu, int(match[2]), place)

        return _DEVICE.sub(uuid, text)


def _each(entries: T | tuple[T, ...], place: str) -> Iterator[tuple[T, str]]:
    """One entry, or those of a list, with their places."""
    if isinstance(entries, tuple):
        yield from ((entry, f"{place}[{number}]") for number, entry in enumerate(entries))
    else:
        yield entries, place


def _interleaved(pieces: Sequence[str], numbers: Sequence[int]) -> str:
    """Pieces with a number between each two."""
    return pieces[0] + "".join(f"{number}{piece}" for number, piece in zip(numbers, pieces[1:], strict=True))


def _ramp(memory: str | Ramp) -> Ramp | None:
    if isinstance(memory, Ramp):
        return memory
    return None if memory == "unknown" else Ramp(Size.read(memory), Size.read(memory), Duration(0))


def _wave(load: float | str | Wave) -> Wave:
    return load if isinstance(load, Wave) else Wave(Ratio.read(load), Ratio.read(load))
