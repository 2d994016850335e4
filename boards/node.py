"""GPU Node: each card of a node, who is on it, and how much of it is given away, used and wasted."""

from __future__ import annotations

from boards import queries as q
from boards.links import CLUSTERED, NODE_KEY, NODES, TO_CARD, TO_POD, UUIDS
from boards.panels import GREEN, RED, YELLOW, Board, Column, Curves, Key, Query, Row, Stat, States, Table

TOTAL = q.most("gpumap_device_memory_total_bytes", q.BY_DEVICE, q.DEVICE)
USED = q.most("gpumap_device_memory_used_bytes", q.BY_DEVICE, q.DEVICE)
GRANTED = q.most("gpumap_container_allocated_gpu_memory_bytes", q.BY_HOLDER, q.DEVICE)
HELD = q.most("gpumap_container_allocated_gpus", q.BY_HOLDER, q.DEVICE)
THEIR_USE = q.most("gpumap_container_gpu_memory_used_bytes", q.BY_HOLDER, q.DEVICE)
SLOTS = q.most("gpumap_allocation_slots", f"{q.BY_HOLDER}, resource", q.DEVICE)
OFFERED = q.most("gpumap_device_slots_allocatable", f"{q.BY_DEVICE}, resource", q.DEVICE)
DEVICES = q.most("gpumap_device_info", q.BY_DEVICE, q.DEVICE)
HOLDERS = q.known(q.most("gpumap_device_holders", q.BY_DEVICE, q.DEVICE), DEVICES, q.BY_DEVICE)
"""Of devices alone: a partitioned GPU that is given away whole has slots of its own, and is no device."""
ON_GPUS = q.most("gpumap_device_info", "cluster, node, gpu_uuid", q.DEVICE)
CHOSEN = f'label_replace({ON_GPUS}, "uuid", "$1", "gpu_uuid", "(.+)")'
"""The GPUs that the chosen devices are on, by their own uuid."""
ON_NODE = "{{node}} {{device}} {{mig_profile}}"
GPU_ON_NODE = "{{node}} {{index}}"
FULL = ((0.8, YELLOW), (0.95, RED))


def of_gpus(name: str, by: str = q.BY_DEVICE) -> str:
    """A value of physical GPUs, of those that the chosen devices are on."""
    return f"({q.most(name, by, q.NODE)} and on ({q.BY_DEVICE}) {CHOSEN})"


def summed(expr: str) -> str:
    return f"sum by ({q.BY_DEVICE}) ({expr})"


NOW = Row(
    "Now",
    (
        Stat(
            title="Devices",
            about="What can be given away: GPUs that are not partitioned, and MIG devices.",
            query=f"count({DEVICES})",
        ),
        Stat(
            title="Devices that nobody holds",
            about="Devices without a holder. Absent: the kubelet does not answer.",
            query=f"sum({HOLDERS} == bool 0)",
            steps=((1, YELLOW),),
        ),
        Stat(
            title="GPUs held",
            about="Shares of GPUs that containers were given, added up.",
            query=f"sum({HELD})",
            decimals=2,
        ),
        Stat(
            title="Memory",
            about="Memory of the devices. What compute instances of one GPU instance share counts once.",
            query=f"sum({q.memory_of_gpus('gpumap_device_memory_total_bytes', q.DEVICE)})",
            unit="bytes",
        ),
        Stat(
            title="Granted memory",
            about="Memory that containers were given. Where sharing grants none (time-slicing) nothing is counted;"
            " what compute instances share counts once.",
            query=f"sum({q.grants(q.DEVICE)})",
            unit="bytes",
        ),
        Stat(
            title="Used memory",
            about="Memory in use on the devices, whoever uses it.",
            query=f"sum({q.memory_of_gpus('gpumap_device_memory_used_bytes', q.DEVICE)})",
            unit="bytes",
        ),
    ),
)

CARDS = Row(
    "Devices",
    (
        Table(
            title="Devices: given away, used, wasted",
            about="Each device. Unused is what containers were given on it and do not use. An empty cell is not known:"
            " granted is empty where nobody was given memory, a lost card has no used memory. Shared memory of"
            " compute instances is shown with each of them.",
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
                Column(q.known(summed(OFFERED), DEVICES, q.BY_DEVICE), "Slots", decimals=0),
                Column(q.known(summed(SLOTS), DEVICES, q.BY_DEVICE), "Slots held", decimals=0),
                Column(summed(HELD), "GPUs held", decimals=2),
                Column(TOTAL, "Total", unit="bytes"),
                Column(summed(GRANTED), "Granted", unit="bytes"),
                Column(USED, "Used", unit="bytes"),
                Column(q.most("gpumap_device_memory_free_bytes", q.BY_DEVICE, q.DEVICE), "Free", unit="bytes"),
                Column(f"{USED} / {TOTAL}", "Used of total", unit="percentunit", steps=FULL, gauge=True),
                Column(summed(q.unused(q.DEVICE)), "Unused", unit="bytes"),
            ),
            sorted_by="Unused",
            height=10,
        ),
    ),
)

MEMORY = Row(
    "Memory",
    (
        Curves(
            title="Used of each device",
            about="Memory in use over memory of the device. A gap means that the card did not answer.",
            queries=(Query(q.name_devices(f"({USED} / {TOTAL})"), ON_NODE),),
            unit="percentunit",
            most=1,
            steps=FULL,
            link=TO_CARD,
        ),
        Curves(
            title="Used, by whose it is",
            about="All used memory of the devices by the owner of the processes: assigned, unassigned (a pod that does"
            " not hold the card), gone (its pod no longer exists), host, and what no process answers for."
            " Together it is what is used.",
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
            about="Each container's own memory on each device. The card's value is never copied to those who share it.",
            queries=(Query(q.name_devices(THEIR_USE), "{{node}} {{device}}: {{namespace}}/{{pod}} {{container}}"),),
            unit="bytes",
            stacked=True,
            link=TO_POD,
        ),
        Curves(
            title="Granted and not used, by device",
            about="What containers were given of the device and do not use. Absent where nothing is granted.",
            queries=(Query(q.name_devices(summed(q.unused(q.DEVICE))), ON_NODE),),
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
            about="Time that the container's own kernels kept the SMs of the device busy. Absent on MIG.",
            queries=(
                Query(
                    q.name_devices(q.most("gpumap_container_sm_utilization_ratio", q.BY_HOLDER, q.DEVICE)),
                    "{{node}} {{device}}: {{namespace}}/{{pod}} {{container}}",
                ),
            ),
            unit="percentunit",
            link=TO_POD,
        ),
        Curves(
            title="Utilization of each GPU",
            about="Time that any kernel ran on the GPU, whoever's. It is the GPU's and no pod's. Absent where it is"
            " partitioned.",
            queries=(Query(q.name_gpus(of_gpus("gpumap_gpu_utilization_ratio")), GPU_ON_NODE),),
            unit="percentunit",
            most=1,
        ),
        Curves(
            title="Tensor cores busy, by device",
            about="Time that the tensor cores were busy, also of MIG devices. Only Hopper and later tell it (GPM).",
            queries=(
                Query(q.name_devices(q.most("gpumap_device_tensor_activity_ratio", q.BY_DEVICE, q.DEVICE)), ON_NODE),
            ),
            unit="percentunit",
            most=1,
            link=TO_CARD,
        ),
        Curves(
            title="Memory bandwidth in use, by device",
            about="Bandwidth of the device's memory that was used, also of MIG devices. Only Hopper and later tell it"
            " (GPM).",
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
    "The GPUs themselves",
    (
        Curves(
            title="Temperature",
            about="Of each physical GPU, by sensor.",
            queries=(
                Query(
                    q.name_gpus(of_gpus("gpumap_gpu_temperature_celsius", f"{q.BY_DEVICE}, sensor")),
                    "{{node}} {{index}} {{sensor}}",
                ),
            ),
            unit="celsius",
            width=8,
        ),
        Curves(
            title="Power",
            about="Drawn by each physical GPU.",
            queries=(Query(q.name_gpus(of_gpus("gpumap_gpu_power_watts")), GPU_ON_NODE),),
            unit="watt",
            width=8,
        ),
        States(
            title="Answers",
            about="Whether each physical GPU answered. A gap: gpumap itself was not scraped, or the driver as a whole"
            " did not answer it.",
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
    about="Each card: who is on it, how much of it is given away, used and wasted.",
    variables=(*CLUSTERED, NODES, UUIDS),
    rows=(NOW, CARDS, MEMORY, COMPUTE, HARDWARE),
)
