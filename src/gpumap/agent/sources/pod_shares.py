"""Shares of GPUs in the labels and annotations of pods: what KAI-Scheduler and Run:ai write there. Pure.

A share needs a device, by group or by uuid, and an amount. A value that is none of theirs counts as absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import islice

from gpumap.agent.sources.messages import fit
from gpumap.model.device_ids import UUID
from gpumap.model.observations import ScheduledShare
from gpumap.model.plugins import GIB, MIB
from gpumap.model.readings import Uuid
from gpumap.model.terms import PodUid

GROUP = "runai-gpu-group"
"""A pod with several shared devices has a label `runai-gpu-group/<group>` for each instead (KAI-Scheduler,
pkg/common/resources, GetMultiFractionGpuGroupLabel)."""
FRACTION, MEMORY, CONTAINER = "gpu-fraction", "gpu-memory", "gpu-fraction-container-name"
"""The share of each device, as a ratio or in MiB, is of this container; by default of the first one."""
OF_CONTAINER = re.compile(
    r"nvidia\.com/container\.([a-z0-9-]{1,63})\.(gpu-memory\.limit|gpu-memory\.request|gpus\.devices)"
)
"""KAI-Scheduler 0.18 and later (NvFractions): a limit, or else a request, and the devices that its binder chose."""
_SIGN = re.compile(r"kai\.scheduler|runai|run\.ai|^gpu-|^received-resource-type$|^nvidia\.com/container\.")
"""Keys of labels and annotations that users, admission or the binder write at the pods of KAI-Scheduler and Run:ai."""
DEFAULT_SCHEDULER = "default-scheduler"
SHARES_MAX = 64
"""Of one pod. A node has fewer GPUs, and every user writes annotations: 256 KiB have room for 6000 devices."""
_RATIO = re.compile(r"[0-9]{0,3}\.?[0-9]{1,18}", re.ASCII)
_MIB = re.compile(r"[0-9]{1,9}", re.ASCII)
QUANTITY = re.compile(r"([0-9]{1,15}|[0-9]{1,6}\.[0-9]{1,6}(?=[KMGTk]))(Ki|Mi|Gi|Ti|k|M|G|T|)", re.ASCII)
"""Without exponents, and without fractions of a byte."""
_SUFFIXES = {
    "": 1,
    **{"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12},
    **{"Ki": 1 << 10, "Mi": MIB, "Gi": GIB, "Ti": 1 << 40},
}
_DEVICE = re.compile(rf"(?:k8s\.device-plugin\.nvidia\.com/gpu=)?(GPU-{UUID})", re.ASCII)


def gpu_groups(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the groups of shared devices that a pod belongs to, sorted."""
    groups = (value for key, value in labels.items() if value and (key == GROUP or key.startswith(f"{GROUP}/")))
    return tuple(sorted({fit(group) for group in islice(groups, SHARES_MAX)}))


def may_share(keys: Iterable[str], scheduler: str) -> bool:
    """Return whether a scheduler that shares GPUs may know a pod with these labels and annotations.

    Kubernetes' own scheduler shares none. Any other one may, and so may the scheduler of a pod that does not name it.
    """
    return scheduler != DEFAULT_SCHEDULER or any(map(_SIGN.search, keys))


def pod_shares(
    uid: PodUid, groups: Sequence[str], annotations: Mapping[str, str], containers: Sequence[str]
) -> tuple[ScheduledShare, ...]:
    """Return the shares of a pod's containers. `containers` are in the order of the specification."""
    shares = list(islice(_container_shares(uid, annotations), SHARES_MAX))
    gpus, mib = _ratio(annotations.get(FRACTION, "")), annotations.get(MEMORY, "")
    memory = (int(mib) if _MIB.fullmatch(mib) else 0) * MIB or None
    container = fit(annotations.get(CONTAINER, "") or next(iter(containers), ""))
    if container and (gpus is not None or memory is not None):
        shares += [ScheduledShare(uid, container, group=group, gpus=gpus, memory_bytes=memory) for group in groups]
    return tuple(shares)


def _container_shares(uid: PodUid, annotations: Mapping[str, str]) -> Iterator[ScheduledShare]:
    by_container: dict[str, dict[str, str]] = {}
    for key, value in sorted(annotations.items()):
        match = OF_CONTAINER.fullmatch(key)
        if match is not None:
            by_container.setdefault(match[1], {})[match[2]] = value
    for container, values in by_container.items():
        quantity = QUANTITY.fullmatch(values.get("gpu-memory.limit", values.get("gpu-memory.request", "")))
        memory = int(Decimal(quantity[1]) * _SUFFIXES[quantity[2]]) if quantity else 0
        if not memory:
            continue
        for text in values.get("gpus.devices", "").split(",", SHARES_MAX)[:SHARES_MAX]:
            if (device := _DEVICE.fullmatch(text.strip())) is not None:
                yield ScheduledShare(uid, container, uuid=Uuid(device[1]), memory_bytes=memory)


def _ratio(text: str) -> float | None:
    """Return a share above 0, at most a whole device."""
    value = float(text) if _RATIO.fullmatch(text) else 0.0
    return value if 0.0 < value <= 1.0 else None
