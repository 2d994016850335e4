"""What cannot be judged on a node, and why: each GPU, leaf or holder by itself, and as sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpumap.model.devices import NO_CONTAINER, device_name, has_kubelet, sources_up
from gpumap.model.findings import judged_holders
from gpumap.model.formatting import listed
from gpumap.model.gaps import invisible, unknown_of_devices, use_known
from gpumap.model.grouping import grouped
from gpumap.model.node import Node, Unjudged
from gpumap.model.readings import Uuid
from gpumap.model.terms import UNJUDGED_REASONS, ContainerName

NOTHING_ASSIGNED = (
    "This machine has no kubelet (--no-kubelet), so nothing is assigned and gpumap looks for no waste. `gpumap top` "
    "shows the use."
)


class Tally:
    """Counts what is judged, by kind of finding, and notes what is not, with its reason."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self.judged: Counter[str] = Counter(dict.fromkeys(kinds, 0))
        self._unjudged: dict[tuple[int, ContainerName, Uuid | None], list[str]] = {}

    def count(
        self, kind: str, reason: str | None, name: ContainerName = NO_CONTAINER, uuid: Uuid | None = None
    ) -> None:
        """Count a GPU, leaf, container or holder; with a `reason` as one that cannot be judged."""
        if reason is None:
            self.judged[kind] += 1
        else:
            key = UNJUDGED_REASONS.index(reason), name, uuid
            self._unjudged.setdefault(key, []).append(kind)

    def unjudged(self) -> tuple[Unjudged, ...]:
        """Return what cannot be judged, by reason."""
        entries = sorted(self._unjudged.items(), key=lambda entry: (*entry[0][:2], entry[0][2] or ""))
        return tuple(
            Unjudged(*name, reason=UNJUDGED_REASONS[rank], findings=tuple(kinds), uuid=uuid)
            for (rank, name, uuid), kinds in entries
        )


class Blockers(NamedTuple):
    """Why something cannot be judged on a leaf; `None` if it can."""

    holder_reason: str | None
    """Its holders: their use is what processes show."""
    owner_reason: str | None
    """Use without a grant: it is judged by the pods of processes."""
    unexplained_reason: str | None
    """Memory and load without a process."""


def find_blockers(node: Node) -> dict[Uuid, Blockers]:
    """Return what cannot be judged on each device, and why."""
    up, down = sources_up(node), {gpu.uuid for gpu in node.gpus if not gpu.up}
    sees_processes = node.capabilities.get("pid_visibility")
    blockers = {}
    for device in node.devices:
        is_down = device.gpu_uuid in down
        reasons = {
            "nvml_down": "nvml" not in up,
            "gpu_down": is_down,
            "kubelet_down": has_kubelet(node) and "kubelet" not in up,
            "no_kubelet": not has_kubelet(node),
            "identity_down": "pod_identity" not in up,
            "no_pid_visibility": not sees_processes,
            "unknown_process": device.has_unowned,
            "unknown_assignment": device.holders is None,
            "use_not_measured": not use_known(device),
        }
        owners = [reason for reason, applies in reasons.items() if applies]
        use = [reason for reason in owners if reason not in ("identity_down", "unknown_process")]
        unexplained = "gpu_down" if device.unexplained is None or is_down else device.unexplained.unjudged
        if not is_down and device.unexplained is not None and not sees_processes:
            unexplained = "no_pid_visibility"
        if "nvml" not in up:
            unexplained = "nvml_down"
        blockers[device.uuid] = Blockers(next(iter(use), None), next(iter(owners), None), unexplained)
    return blockers


# --- as sentences -----------------------------------------------------------------------------------------------------

_SENTENCES = {
    "gpu_down": "{devices} {are} down: gpumap cannot check anything there.",
    "identity_down": "gpumap cannot name the pods of processes, so it cannot detect squatters and leftovers.",
    "unknown_process": "The owner of some processes on {devices} is not known: each may be a squatter or a leftover.",
    "offers_unknown": "It is not known whether containers can be assigned {devices}: the kubelet does not report its "
    "offers, their ids do not name a GPU, or DRA offers GPUs.",
    "use_not_measured": "The driver cannot measure these holders, so it is not known whether they work: {pods}.",
    "unknown_work": "It is not known whether these holders work, because an unknown process did: {pods}.",
    "idle_power_unknown": "It is not known whether the work of these holders hangs. gpumap has not seen their GPUs "
    "without a process: {pods}.",
    "just_started": "gpumap has not watched these holders for long enough ({kinds}): {pods}.",
    "just_started of a leaf": "gpumap has not watched {devices} for long enough: it has memory or load without a "
    "process.",
}


def sentences(node: Node) -> Iterator[str]:
    """Return what cannot be judged, and why, a sentence for each reason."""
    if node.stale:
        yield node.stale
        return
    names = {device.uuid: device_name(device) for device in node.devices}
    names |= {gpu.uuid: str(gpu.index) for gpu in node.gpus}
    yield from _source_sentences(node)
    if count := judged_holders([node]):
        yield f"{count}."
    keys = (
        entry.reason
        if entry.pod or entry.reason not in ("just_started", "use_not_measured")
        else f"{entry.reason} of a leaf"
        for entry in node.unjudged
    )
    for reason, entries in grouped(zip(keys, node.unjudged, strict=True)).items():
        if reason not in _SENTENCES:
            continue
        pods = sorted({"/".join(entry.pod_name) for entry in entries if entry.pod})
        devices = sorted({names.get(entry.uuid, entry.uuid) for entry in entries if entry.uuid})
        kinds = listed(sorted({kind for entry in entries for kind in entry.findings}))
        yield _SENTENCES[reason].format(
            kinds=kinds, devices=f"GPU {listed(devices)}", are="is" if len(devices) == 1 else "are", pods=listed(pods)
        )
    yield from (f"{sentence[0].upper()}{sentence[1:]}." for sentence in unknown_of_devices(node))


def _source_sentences(node: Node) -> Iterator[str]:
    up = sources_up(node)
    if "nvml" not in up:
        yield "NVML does not answer. The use of GPUs is not known."
    elif not node.capabilities.get("pid_visibility") and has_kubelet(node):
        yield f"gpumap cannot detect idle holders, squatters and leftovers. {invisible(node)}"
    if not has_kubelet(node):
        yield NOTHING_ASSIGNED
    elif "kubelet" not in up:
        state = "may be old" if any(device.holders is not None for device in node.devices) else "are not known"
        yield f"The kubelet does not answer. The assignments {state}; gpumap can judge no holder, squatter or leftover."
