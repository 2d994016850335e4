"""Reads what the plugins of other makers, and DRA drivers, gave away in a scenario: ids, answers and claims.

Their texts may name devices: `{0}` is the uuid of GPU 0, `{2.1}` that of MIG device 1 of GPU 2.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Sequence
from functools import partial

from gpumap.lab.demo.places import gpu_index, mig_number
from gpumap.lab.demo.scenario_model import GpuSpec
from gpumap.lab.demo.yaml_fields import Fields, ScenarioError, boolean, expected, list_of, matching, name, size, text
from gpumap.model.observations import ClaimDevice, DeviceId, PluginAnswer, PreparedDevice, ResourceDevices
from gpumap.model.plugins import DRA_DRIVER
from gpumap.model.readings import Uuid

ANSWER_KEYS = ("envs", "annotations", "devices", "mounts", "cdi")
CLAIM_KEYS = ("claim", "device", "driver", "share_id", "notes")
NOTES_KEYS = ("uuid", "memory", "admin_access")
IDS_MAX = 10_000
"""In all of a scenario: a short text must not fill the memory of whoever reads it."""

_DEVICE = re.compile(r"\{(\d{1,6})(?:\.(\d{1,6}))?\}", re.ASCII)
_RANGE = re.compile(r"\[(\d{1,9})-(\d{1,9})\]", re.ASCII)
_path = matching(r"/[!-~]{1,254}", "a path that begins with /")


class ForeignReader:
    """Reads them for one scenario, whose cards they name and whose ids it counts."""

    def __init__(self, node: str, gpus: Sequence[GpuSpec]) -> None:
        self._node = node
        self._gpus = gpus
        self._count = 0

    def ids(self, value: object, place: str) -> tuple[ResourceDevices, ...]:
        """Ids by resource; `[0-3]` in one stands for four of them."""
        if not isinstance(value, dict):
            raise expected("a mapping of resources to ids", value, place)
        return tuple(
            sorted(
                ResourceDevices(text(resource, place), self._ids_of_resource(ids, f"{place}.{resource}"))
                for resource, ids in value.items()
            )
        )

    def answers(self, fields: Fields, resources: Collection[str]) -> tuple[tuple[str, PluginAnswer], ...]:
        """What plugins answered to the allocation of a container's `resources`: one for all of them, or one for each.

        Names of resources have a "/", the keys of an answer have none.
        """
        given = [key for key in ("answer", "alloc_env") if key in fields]
        if not given:
            return ()
        if len(given) > 1:
            raise ScenarioError(f'{fields.place}: "alloc_env" is short for "envs" in "answer": give one of them')
        place = fields.at(given[0])
        if not resources:
            raise ScenarioError(f"{place}: its container holds nothing that a plugin could answer to")
        if given == ["alloc_env"]:
            one = PluginAnswer(envs=fields.need("alloc_env", self._texts))
            return tuple((resource, one) for resource in resources)
        value = fields.need("answer", lambda value, _: value)
        if isinstance(value, dict) and any("/" in str(key) for key in value):
            each = Fields(value, place, resources)
            return tuple((resource, each.need(resource, self._answer)) for resource in resources if resource in each)
        one = self._answer(value, place)
        return tuple((resource, one) for resource in resources)

    def claims(self, fields: Fields, namespace: str) -> tuple[tuple[ClaimDevice, ...], tuple[PreparedDevice, ...]]:
        """The DRA devices of a container, and what their driver wrote down of them.

        Pods of one namespace share a claim by its name.
        """
        found = fields.each("claims", partial(self._claim, namespace=namespace))
        return tuple(sorted({claim for claim, _ in found})), tuple(notes for _, notes in found if notes is not None)

    def _ids_of_resource(self, value: object, place: str) -> tuple[DeviceId, ...]:
        ids = [id_ for of_entry in list_of(self._range)(value, place) for id_ in of_entry]
        return tuple(sorted(set(ids)))

    def _range(self, value: object, place: str) -> list[DeviceId]:
        pieces = _RANGE.split(self._text(value, place))
        bounds = [(int(low), int(high)) for low, high in zip(pieces[1::3], pieces[2::3], strict=True)]
        for low, high in bounds:
            if high < low:
                raise ScenarioError(f"{place}: the range [{low}-{high}] ends before it begins")
        self._count += math.prod(high - low + 1 for low, high in bounds)
        if self._count > IDS_MAX:
            raise ScenarioError(f"{place}: with it, the scenario has more than {IDS_MAX} ids of other plugins")
        numbers = itertools.product(*(range(low, high + 1) for low, high in bounds))
        return [DeviceId(_joined(pieces[::3], chosen)) for chosen in numbers]

    def _answer(self, value: object, place: str) -> PluginAnswer:
        fields = Fields(value, place, ANSWER_KEYS)
        return PluginAnswer(
            envs=fields.maybe("envs", self._texts, ()),
            annotations=fields.maybe("annotations", self._texts, ()),
            device_paths=fields.each("devices", self._path),
            mount_paths=fields.each("mounts", self._path),
            cdi_devices=fields.each("cdi", self._text),
        )

    def _claim(self, value: object, place: str, namespace: str) -> tuple[ClaimDevice, PreparedDevice | None]:
        fields = Fields(value, place, CLAIM_KEYS)
        claim = ClaimDevice(
            driver=fields.maybe("driver", name, DRA_DRIVER),
            pool=self._node,
            device=fields.need("device", self._text),
            share_id=fields.maybe("share_id", self._text, ""),
            claim_namespace=namespace,
            claim=fields.need("claim", name),
        )
        if "notes" in fields and claim.driver != DRA_DRIVER:
            raise ScenarioError(f"{fields.at('notes')}: only {DRA_DRIVER} writes such, and this is {claim.driver}'s")
        return claim, fields.maybe("notes", partial(self._notes, claim=claim), None)

    def _notes(self, value: object, place: str, claim: ClaimDevice) -> PreparedDevice:
        fields = Fields(value, place, NOTES_KEYS)
        return PreparedDevice(
            claim_namespace=claim.claim_namespace,
            claim=claim.claim,
            device=claim.device,
            share_id=claim.share_id,
            uuid=Uuid(fields.need("uuid", self._text)),
            admin_access=fields.maybe("admin_access", boolean, False),
            memory_bytes=fields.maybe("memory", size, None),
        )

    def _texts(self, value: object, place: str) -> tuple[tuple[str, str], ...]:
        if not isinstance(value, dict):
            raise expected("a mapping", value, place)
        return tuple((text(key, place), self._text(entry, f"{place}.{key}")) for key, entry in value.items())

    def _path(self, value: object, place: str) -> str:
        return _path(self._text(value, place), place)

    def _text(self, value: object, place: str) -> str:
        """A text with the uuids of the devices that it names."""

        def uuid(match: re.Match[str]) -> str:
            gpu = self._gpus[gpu_index(int(match[1]), place, self._gpus)]
            return gpu.uuid if match[2] is None else gpu.mig[mig_number(int(match[2]), place, gpu)].uuid

        return _DEVICE.sub(uuid, text(value, place))


def _joined(pieces: Sequence[str], numbers: Sequence[int]) -> str:
    """Pieces with a number between each two."""
    return pieces[0] + "".join(f"{number}{piece}" for number, piece in zip(numbers, pieces[1:], strict=True))
