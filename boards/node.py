"""GPU Node: each card of a node, with its containers, and its held, used and wasted parts."""

from __future__ import annotations

from boards import queries as q
from boards.findings import finding_table, unjudged_table
from boards.links import CLUSTERED, NODE_KEY, NODES, TO_CARD, TO_POD, UUIDS
from boards.panels import GREEN, RED, YELLOW, Board, Column, Curves, Key, Query, Row, Stat, States, Table

TOTAL = q.most("gpumap_device_memory_total_bytes", q.BY_DEVICE, q.DEVICE)
USED = q.most("gpumap_device_memory_used_bytes", q.BY_DEVICE, q.DEVICE)
GRANTED = q.most("gpumap_container_allocated_gpu_memory_bytes", q.BY_HOLDER, q.DEVICE)
HELD = q.most("gpumap_container_allocated_gpus", q.BY_HOLDER, q.DEVICE)
THEIR_USE = q.most("gpumap_container_gpu_memory_used_bytes", q.BY_HOLDER, q.DEVICE)
UNUSED = q.unused(q.DEVICE)
SLOTS = q.most("gpumap_allocation_slots", f"{q.BY_HOLDER}, resource", q.DEVICE)
OFFERED = q.most("gpumap_device_slots_allocatable", f"{q.BY_DEVICE}, resource", q.DEVICE)
DEVICES = q.most("gpumap_device_info", q.BY_DEVICE, q.DEVICE)
HOLDERS = q.known(q.most("gpumap_device_holders", q.BY_DEVICE, q.DEVICE), DEVICES, q.BY_DEVICE)
"""Only devices: a partitioned GPU that is assigned as a whole has its own slots, but is not a device here."""
ON_GPUS = q.most("gpumap_device_info", q.BY_GPU, q.DEVICE)
"""The GPUs that the chosen devices are on."""
ON_NODE = "{{node}} {{device}} {{mig_profile}}"
GPU_ON_NODE = "{{node}} {{index}}"
FULL = ((0.8, YELLOW), (0.95, RED))


def of_gpus(name: str, by: str = q.BY_GPU) -> str:
    """A value of physical GPUs, of those that the chosen devices are on."""
    return f"({q.most(name, by, q.NODE)} and on ({q.BY_GPU}) {ON_GPUS})"


def finding_sums(expr: str) -> str:
    return f"sum by ({q.BY_DEVICE}) ({expr})"


NOW = Row(
    "Now",
    (
        Stat(
            title="Devices",
            about="Devices that a container can be assigned: GPUs without partitions, and MIG devices.",
            query=f"count({DEVICES})",
        ),
        Stat(
            title="Devices without a holder",
            about="Devices that no container holds. Absent if the kubelet does not answer.",
            query=f"sum({HOLDERS} == bool 0)",
            steps=((1, YELLOW),),
        ),
        Stat(
            title="GPUs held",
            about="Sum of the GPU shares that containers hold.",
            query=f"sum({HELD})",
            decimals=2,
        ),
        Stat(
            title="Memory",
            about="Memory of the devices. Shared memory of compute instances counts once.",
            query=f"sum({q.memory_of_gpus('gpumap_device_memory_total_bytes', q.DEVICE)})",
            unit="bytes",
        ),
        Stat(
            title="Granted memory",
            about="Memory granted to containers. Time-slicing grants none and counts nothing. Shared memory of compute"
            " instances counts once.",
            query=f"sum({q.grants(q.DEVICE)})",
            unit="bytes",
        ),
        Stat(
            title="Used memory",
            about="Used memory of the devices, for all owners.",
            query=f"sum({q.memory_of_gpus('gpumap_device_memory_used_bytes', q.DEVICE)})",
            unit="bytes",
        ),
    ),
)

CARDS = Row(
    "Devices",
    (
        Table(
            title="Devices: held, used, wasted",
            about="Each device. Unused is memory of idle and unused findings. An empty cell is none or unknown: "
            "granted is empty without a memory grant, used is empty for a lost card. Shared memory of compute "
            "instances is shown for each of them.",
            keys=(
                Key("cluster", "Cluster"),
                NODE_KEY,
                Key("device", "Device", TO_CARD),
                Key("mig_profile", "MIG"),
                Key("model", "Model"),
                Key("uuid", "uuid"),
            ),
            columns=(
                Column(q.name_devices(DEVICES)),
                Column(HOLDERS, "Holders", decimals=0),
                Column(q.known(finding_sums(OFFERED), DEVICES, q.BY_DEVICE), "Slots", decimals=0),
                Column(q.known(finding_sums(SLOTS), DEVICES, q.BY_DEVICE), "Slots held", decimals=0),
                Column(finding_sums(HELD), "GPUs held", decimals=2),
                Column(TOTAL, "Total", unit="bytes"),
                Column(finding_sums(GRANTED), "Granted", unit="bytes"),
                Column(USED, "Used", unit="bytes"),
                Column(q.most("gpumap_device_memory_free_bytes", q.BY_DEVICE, q.DEVICE), "Free", unit="bytes"),
                Column(f"{USED} / {TOTAL}", "Used of total", unit="percentunit", steps=FULL, gauge=True),
                Column(q.known(finding_sums(UNUSED), DEVICES, q.BY_DEVICE), "Unused", unit="bytes"),
            ),
            sorted_by="Unused",
            height=10,
        ),
    ),
)

FINDINGS = Row("Findings", (finding_table(q.DEVICE, width=16), unjudged_table(q.NODE)))

MEMORY = Row(
    "Memory",
    (
        Curves(
            title="Used of each device",
            about="Used memory divided by total memory. A gap means that the card did not answer.",
            queries=(Query(q.name_devices(f"({USED} / {TOTAL})"), ON_NODE),),
            unit="percentunit",
            most=1,
            steps=FULL,
            link=TO_CARD,
        ),
        Curves(
            title="Used, by owner",
            about="Used memory of the devices by the owner of the processes. unassigned: a pod that does not hold the "
            "card. gone: the pod no longer exists. scheduled: a scheduler shares the card among pods. unaccounted: no "
            "process explains it. The sum is the used memory.",
            queries=(
                Query(
                    "sum by (owner) ("
                    f"{q.most('gpumap_device_memory_used_by_owner_bytes', f'{q.BY_DEVICE}, owner', q.DEVICE)})",
                    "{{owner}}",
                ),
            ),
            unit="bytes",
            stacked=True,
        ),
        Curves(
            title="Used by each container",
            about="Memory of each container on each device. Containers never get the value of the whole card.",
            queries=(Query(q.name_devices(THEIR_USE), "{{node}} {{device}}: {{namespace}}/{{pod}} {{container}}"),),
            unit="bytes",
            stacked=True,
            link=TO_POD,
        ),
        Curves(
            title="Granted and not used, by device",
            about="Memory of the device in idle and unused findings. Absent if there are none, or they are unknown.",
            queries=(Query(q.name_devices(finding_sums(UNUSED)), ON_NODE),),
            unit="bytes",
            link=TO_CARD,
        ),
    ),
)

COMPUTE = Row(
    "Computing",
    (
        Curves(
            title="SM time of each container",
            about="Share of time in which the container's kernels kept the SMs of the device busy. On a MIG device "
            "that one container uses: share of its SMs that were busy (Hopper and later).",
            queries=(
                Query(
                    q.name_devices(
                        f"({q.most('gpumap_container_sm_utilization_ratio', q.BY_HOLDER, q.DEVICE)}"
                        f" or {q.most('gpumap_container_sm_activity_ratio', q.BY_HOLDER, q.DEVICE)})"
                    ),
                    "{{node}} {{device}}: {{namespace}}/{{pod}} {{container}}",
                ),
            ),
            unit="percentunit",
            link=TO_POD,
        ),
        Curves(
            title="Utilization of each GPU",
            about="Share of time in which any kernel ran on the GPU. It is a value of the GPU, not of a pod. Absent on"
            " partitioned GPUs.",
            queries=(Query(q.name_gpus(of_gpus("gpumap_gpu_utilization_ratio")), GPU_ON_NODE),),
            unit="percentunit",
            most=1,
        ),
        Curves(
            title="Tensor cores busy, by device",
            about="Share of time in which the tensor cores were busy, also on MIG devices. Hopper and later (GPM).",
            queries=(
                Query(q.name_devices(q.most("gpumap_device_tensor_activity_ratio", q.BY_DEVICE, q.DEVICE)), ON_NODE),
            ),
            unit="percentunit",
            most=1,
            link=TO_CARD,
        ),
        Curves(
            title="Memory bandwidth in use, by device",
            about="Used share of the device's memory bandwidth, also on MIG devices. Hopper and later (GPM).",
            queries=(
                Query(q.name_devices(q.most("gpumap_device_dram_activity_ratio", q.BY_DEVICE, q.DEVICE)), ON_NODE),
            ),
            unit="percentunit",
            most=1,
            link=TO_CARD,
        ),
    ),
)

HARDWARE = Row(
    "Sensors of the GPUs",
    (
        Curves(
            title="Temperature",
            about="Temperature of each physical GPU, by sensor.",
            queries=(
                Query(
                    q.name_gpus(of_gpus("gpumap_gpu_temperature_celsius", f"{q.BY_GPU}, sensor")),
                    "{{node}} {{index}} {{sensor}}",
                ),
            ),
            unit="celsius",
            width=8,
        ),
        Curves(
            title="Power",
            about="Power draw of each physical GPU.",
            queries=(Query(q.name_gpus(of_gpus("gpumap_gpu_power_watts")), GPU_ON_NODE),),
            unit="watt",
            width=8,
        ),
        States(
            title="Answers",
            about="Whether each physical GPU answered. A gap: gpumap was not scraped, or the whole driver did not "
            "answer.",
            query=Query(q.name_gpus(of_gpus("gpumap_gpu_up")), GPU_ON_NODE),
            good="answers",
            bad="does not answer",
            steps=((0, RED), (1, GREEN)),
            width=8,
        ),
    ),
)

BOARD = Board(
    uid="gpumap-node",
    title="GPU Node",
    about="Each card with its containers, and its held, used and wasted parts.",
    variables=(*CLUSTERED, NODES, UUIDS),
    rows=(NOW, CARDS, FINDINGS, MEMORY, COMPUTE, HARDWARE),
)
