"""How the dialect nvidia-smi reads its values: of GPUs, GPU instances, processes and the collection.

The label `uuid` is always the GPU's, in lower case and without NVML's prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from gpumap.agent.dialects.common import Reading, driver_version, gpus_by_uuid, sees_processes
from gpumap.model.families import Family, Rows, Series
from gpumap.model.grouping import grouped
from gpumap.model.node import Device, Gpu, SourceHealth
from gpumap.model.readings import RECOVERY_ACTIONS, GpuReading, Uuid
from gpumap.model.snapshot import Snapshot, once_per_snapshot
from gpumap.model.terms import Source

_EXIT_CODES = {
    "no_permission": 4,
    "insufficient_power": 8,
    "driver_not_loaded": 9,
    "irq_issue": 10,
    "library_not_found": 12,
    "function_not_found": 13,
    "corrupted_inforom": 14,
    "lost": 15,
    "gpu_is_lost": 15,
}
"""nvidia-smi(1), RETURN VALUE, by what gpumap calls the reason why NVML does not answer."""
_OTHER_ERROR = 255


def plain(uuid: Uuid) -> str:
    """Return a uuid as the original writes it."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


# --- GPUs -------------------------------------------------------------------------------------------------------------


CARDS = Rows(
    ("uuid",), lambda snapshot: (((plain(gpu.uuid),), gpu.reading) for gpu in snapshot.node.gpus if gpu.reading)
)
"""The GPUs that answer."""
GPUS = Rows(("uuid",), lambda snapshot: (((plain(gpu.uuid),), gpu) for gpu in snapshot.node.gpus))
XIDS = Rows(("uuid",), lambda snapshot: (((plain(xids.uuid),), xids) for xids in snapshot.node.xids))


_UNITS = {"[W]": "watts", "[MHz]": "clock_hz", "[MiB]": "bytes", "[%]": "ratio", "[us]": "seconds"}


def field(name: str, value: Reading) -> Family:
    """Return a gauge of a field of nvidia-smi, in base units: `power.draw [W]` is `nvidia_smi_power_draw_watts`.

    Its help text is the field.
    """
    words = [_UNITS.get(word, word) for word in name.replace(".", "_").split()]
    return CARDS.gauge(f"nvidia_smi_{'_'.join(words)}", name, value)


def info(snapshot: Snapshot) -> Iterator[Series]:
    """Only for GPUs that answer: the original drops the others."""
    driver = snapshot.node.driver
    for gpu in snapshot.node.gpus:
        if gpu.reading is not None:
            labels = (
                gpu.reading.compute_capability,
                driver.cuda_version if driver is not None else "",
                "[N/A]",  # driver models exist on Windows; elsewhere nvidia-smi prints this
                "[N/A]",
                driver_version(snapshot),
                str(gpu.index),
                gpu.model,
                gpu.pci_bus_id,
                plain(gpu.uuid),
                gpu.reading.vbios_version,
            )
            yield Series(labels, 1)


def recovery_action(gpu: Gpu) -> int | None:
    """Return nvml.h's number; also of a GPU that answers nothing else until it is reset."""
    action = gpu.recovery_action or ""
    if action in RECOVERY_ACTIONS:
        return RECOVERY_ACTIONS.index(action)
    number = action.removeprefix("code_")  # one that nvml.h has not had yet
    return int(number) if number.isascii() and number.isdecimal() else None


# --- GPU instances ----------------------------------------------------------------------------------------------------


def mig_info(snapshot: Snapshot) -> Iterator[Series]:
    for leaf, gpu in _mig_devices(snapshot):
        mig = leaf.mig
        if mig is not None:
            ids = str(mig.compute_instance_id), str(mig.gpu_instance_id)
            yield Series((*ids, plain(leaf.uuid), mig.profile, plain(gpu.uuid)), 1)


def on_gpu_instances(name: str, help: str, value: Callable[[Device], float | None]) -> Family:
    """Return a family with one value for each GPU instance: that of its first compute instance with a value."""

    def read(snapshot: Snapshot) -> Iterator[Series]:
        shown: set[tuple[str, ...]] = set()
        for leaf, gpu in _mig_devices(snapshot):
            labels = str(leaf.mig.gpu_instance_id if leaf.mig else ""), plain(gpu.uuid)
            if labels not in shown and (found := value(leaf)) is not None:
                shown.add(labels)
                yield Series(labels, found)

    return Family(f"nvidia_smi_{name}", "gauge", help, ("gpu_instance_id", "uuid"), read)


@once_per_snapshot
def _mig_devices(snapshot: Snapshot) -> list[tuple[Device, Gpu]]:
    """Return the MIG devices of GPUs that answer."""
    gpus = gpus_by_uuid(snapshot)
    found = ((leaf, gpus.get(leaf.uuid)) for leaf in snapshot.node.devices if leaf.mig is not None)
    return [(leaf, gpu) for leaf, gpu in found if gpu is not None and gpu.reading is not None]


# --- processes --------------------------------------------------------------------------------------------------------


@once_per_snapshot
def _compute_apps(snapshot: Snapshot) -> list[tuple[tuple[str, ...], list[int | None]]]:
    """Return the memory of each process with a compute context, on each device of the GPU."""
    if not sees_processes(snapshot):
        return []
    gpus = gpus_by_uuid(snapshot)
    found = grouped(
        ((str(one.pid), one.comm, plain(gpus[one.uuid].uuid)), one.memory_bytes)
        for one in snapshot.processes
        if one.uuid in gpus and "C" in one.type.split("+")
    )
    return sorted(found.items())


COMPUTE_APPS = Rows(("pid", "process_name", "uuid"), _compute_apps)


def compute_apps(snapshot: Snapshot) -> Iterator[Series]:
    """0 if there is none; absent if NVML does not list the GPU's processes."""
    if not sees_processes(snapshot):
        return
    counts = Counter(uuid for (_, _, uuid), _ in _compute_apps(snapshot))
    for gpu in snapshot.node.gpus:
        if gpu.reading is not None and _lists_processes(gpu.reading):
            yield Series((plain(gpu.uuid),), counts[plain(gpu.uuid)])


def _lists_processes(reading: GpuReading) -> bool:
    if not reading.partitioned:
        return reading.processes is not None
    return not reading.mig_unknown and all(instance.processes is not None for instance in reading.instances)


# --- the collection ---------------------------------------------------------------------------------------------------

COLLECTION = Rows(
    (),
    lambda snapshot: (
        ((), health) for health in snapshot.node.sources if health.source == Source.NVML and health.attempts
    ),
)
"""NVML's record after the first attempt."""


def exit_code(health: SourceHealth) -> int:
    return 0 if health.up else _EXIT_CODES.get(health.reason, _OTHER_ERROR)


def compute_apps_success(snapshot: Snapshot) -> Iterator[Series]:
    return (Series((), int(health.up and sees_processes(snapshot))) for _, health in COLLECTION.read(snapshot))
