"""The device plugins for NVIDIA GPUs: which plugin made an id, what one slot is, and what names the real GPU.

A plugin is one row of `PLUGINS`. docs/explanation/sharing.md has the same for people, and a test compares the two.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from gpumap.model.device_ids import ByUuid, DeviceRef, Meaning, parse, parse_dra, parse_node, parse_visible
from gpumap.model.observations import DeviceId, PluginAnswer

MOUNTED_DEVICES = "/var/run/nvidia-container-devices/"
"""Mount paths of plugins that name devices by mounts. IMEX channels are in a folder below."""
DRA_DRIVER = "gpu.nvidia.com"
"""NVIDIA's DRA driver. Its name is the resource of its devices."""
GPU_MEM = "aliyun.com/gpu-mem"
"""gpushare's resource."""
MIB, GIB = 1 << 20, 1 << 30
_MIB_UNIT_FACTOR = 1.25
"""A card with more slots than this times its GiB has MiB slots: gpushare does not publish its unit."""


class Unit(enum.Enum):
    """What one slot is. It decides how a grant is computed (docs/explanation/sharing.md)."""

    DEVICE = "a whole GPU or MIG device"
    REPLICA = "one replica of the device"
    GPUSHARE = "1 GiB or 1 MiB of a GPU"
    SPLIT = "a share of a GPU, with its own limits"
    CORE = "1 % of a GPU"
    VCUDA_MEMORY = "256 MiB"
    VOLCANO_MEMORY = "a configured number of MiB"
    UNKNOWN = "unknown"


class Trust(enum.Enum):
    """What names the device that a container gets."""

    ID = "the id"
    ANSWER = "the plugin's answer"


class Limit(enum.Enum):
    """What a slot limits of its holder."""

    COMPUTE = "a share of the card's compute"
    MEMORY = "memory only"


class Plugin(NamedTuple):
    """Ids of one kind of one device plugin. If a slot has a limit, `called` is its resource."""

    name: str
    resource: re.Pattern[str]
    shapes: frozenset[str]
    unit: Unit
    trust: Trust
    called: str = ""
    limits: Limit | None = None


_ANY = r".*"


def _plugin(
    name: str, resource: str, shapes: str, unit: Unit, trust: Trust, limits: Limit | None = None, called: str = ""
) -> Plugin:
    called = called or resource.replace("\\", "")  # the pattern is one name, escaped
    return Plugin(name, re.compile(resource, re.DOTALL), frozenset(shapes.split()), unit, trust, called, limits)


_FAMILIES = ("volcano.sh/vgpu-", "tencent.com/vcuda-")
_VGPU_SHAPES = "uuid split memory-split core-split"
PLUGINS = (
    # The first row whose resource and form of id match counts: rows for one resource are before rows for any (`_ANY`).
    # Each shape has a row for any resource.
    _plugin("volcano-vgpu-number", r"volcano\.sh/vgpu-number", _VGPU_SHAPES, Unit.SPLIT, Trust.ANSWER, Limit.MEMORY),
    _plugin("volcano-vgpu-memory", r"volcano\.sh/vgpu-memory", _VGPU_SHAPES, Unit.UNKNOWN, Trust.ANSWER, Limit.MEMORY),
    _plugin("volcano-vgpu-cores", r"volcano\.sh/vgpu-cores", _VGPU_SHAPES, Unit.UNKNOWN, Trust.ANSWER),
    _plugin("aws-vgpu", r"k8s\.amazonaws\.com/vgpu", "split", Unit.REPLICA, Trust.ID),
    _plugin("nvidia", _ANY, "uuid", Unit.DEVICE, Trust.ID),
    _plugin("nvidia-replicas", _ANY, "replica", Unit.REPLICA, Trust.ID),
    _plugin("nvidia-wsl", _ANY, "every", Unit.DEVICE, Trust.ID),
    _plugin("nvidia-wsl-replicas", _ANY, "every-share", Unit.REPLICA, Trust.ID),
    _plugin("nvidia-tegra", _ANY, "tegra", Unit.UNKNOWN, Trust.ID),
    _plugin("gke", _ANY, "node", Unit.DEVICE, Trust.ID),
    _plugin("gke-sharing", _ANY, "node-share", Unit.REPLICA, Trust.ID),
    _plugin("gpushare", _ANY, "gpushare", Unit.GPUSHARE, Trust.ANSWER, Limit.MEMORY, GPU_MEM),
    _plugin("hami", _ANY, "split", Unit.SPLIT, Trust.ANSWER),
    _plugin("vcuda-core", _ANY, "vcuda-core", Unit.CORE, Trust.ANSWER, Limit.COMPUTE, "tencent.com/vcuda-core"),
    _plugin(
        "vcuda-memory", _ANY, "vcuda-memory", Unit.VCUDA_MEMORY, Trust.ANSWER, Limit.MEMORY, "tencent.com/vcuda-memory"
    ),
    _plugin(
        "volcano-gpu-memory", r"volcano\.sh/gpu-memory", "index-unit", Unit.VOLCANO_MEMORY, Trust.ANSWER, Limit.MEMORY
    ),
    # Each card has many ids, and each id is a whole card (volcano-sh/devices, pkg/plugin/nvidia/server.go).
    _plugin("volcano-gpu-number", r"volcano\.sh/gpu-number", "index-unit", Unit.DEVICE, Trust.ANSWER),
    _plugin("unlisted", _ANY, "index-unit memory-split core-split", Unit.UNKNOWN, Trust.ANSWER),
    _plugin("passed-through", _ANY, "passed-through", Unit.UNKNOWN, Trust.ID),
)
DRA = _plugin("nvidia-dra", re.escape(DRA_DRIVER), "dra dra-passed-through", Unit.DEVICE, Trust.ID)


_LIMITS = {plugin.called: plugin.limits for plugin in PLUGINS}


def limit_of(resource: str) -> Limit | None:
    """Return what slots of a resource limit; `None` if unknown."""
    return _LIMITS.get(resource)


def gpushare_slot_bytes(slots: int, memory_bytes: int) -> int:
    """Return the size of one gpushare slot on a card with this number of slots and this memory."""
    return MIB if slots * GIB > _MIB_UNIT_FACTOR * memory_bytes else GIB


class Recognised(NamedTuple):
    """An id with the plugin that made it. `device` is `None` if it names no device of NVML."""

    plugin: Plugin
    device: DeviceRef | None


def family(resource: str) -> str:
    """Return the family of resources that share one plugin answer; empty if each resource has its own answer."""
    return next((prefix for prefix in _FAMILIES if resource.startswith(prefix)), "")


def recognise(resource: str, device_id: DeviceId) -> Recognised | None:
    """Return the plugin and the device of an id; `None` if no known plugin makes such ids."""
    meaning = parse(device_id)
    return Recognised(_plugins_by_shape(resource)[meaning.shape], meaning.device) if meaning else None


@lru_cache(maxsize=256)
def _plugins_by_shape(resource: str) -> dict[str, Plugin]:
    """Return the plugin of each shape of id for one resource: the first one in the table."""
    return {
        shape: plugin for plugin in reversed(PLUGINS) if plugin.resource.fullmatch(resource) for shape in plugin.shapes
    }


def recognise_dra(driver: str, device_name: str) -> Recognised | None:
    """Return the same for a DRA device; `None` for all drivers but NVIDIA's for GPUs."""
    meaning: Meaning | None = parse_dra(device_name) if driver == DRA_DRIVER else None
    return Recognised(DRA, meaning.device) if meaning else None


def named_devices(answer: PluginAnswer) -> tuple[DeviceRef, ...]:
    """Return the devices that a plugin's answer names, in its order; empty if it names none.

    A uuid is more exact than an index or a minor. gpushare has both an index and a minor; the container runtime uses
    NVIDIA_VISIBLE_DEVICES, the index (AliyunContainerService/gpushare-scheduler-extender#220).
    """
    visible = tuple(_visible(answer))
    annotated = dict(answer.annotations).get("tencent.com/vcuda-device", "")
    index = dict(answer.envs).get("ALIYUN_COM_GPU_MEM_IDX", "")
    candidates: tuple[tuple[DeviceRef | None, ...], ...] = (
        tuple(ref for ref in visible if isinstance(ref, ByUuid)),
        tuple(parse_node(path.strip()) for path in annotated.split(",")),
        visible,
        (parse_node(f"/dev/nvidia{index}"),),
        tuple(map(parse_node, answer.device_paths)),
    )
    named = (tuple(dict.fromkeys(ref for ref in refs if ref is not None)) for refs in candidates)
    return next((refs for refs in named if refs), ())


def _visible(answer: PluginAnswer) -> Iterator[DeviceRef]:
    """Return the devices for the container runtime, in each of the forms of NVIDIA's plugin."""
    words = list(answer.cdi_devices)
    words += [word for key, value in answer.annotations if "cdi.k8s.io/" in key for word in value.split(",")]
    words += [path.removeprefix(MOUNTED_DEVICES) for path in answer.mount_paths]
    words += dict(answer.envs).get("NVIDIA_VISIBLE_DEVICES", "").split(",")
    for word in words:
        # CDI's names are "<vendor>/<class>=<device>"; other classes are IMEX channels and the like.
        kind, _, device = word.strip().rpartition("=")
        ref = parse_visible(device) if not kind or kind.endswith("/gpu") else None
        if ref is not None:
            yield ref
