"""GPU App: what each pod holds, uses and wastes, on each card."""

from __future__ import annotations

from boards import queries as q
from boards.links import CLUSTERED, CONTAINER_KEYS, NODES, TO_CARD, TO_POD, UUIDS, whose
from boards.panels import NONE, RED, YELLOW, Board, Column, Curves, Key, Query, Row, Stat, Table

USED = q.holders("gpumap_container_gpu_memory_used_bytes")
GRANTED = q.holders("gpumap_container_allocated_gpu_memory_bytes")
GRANTS = q.grants(q.POD)
HELD = q.holders("gpumap_container_allocated_gpus")
BUSY = q.holders("gpumap_container_sm_utilization_ratio")
THERE = f"({q.holders('gpumap_allocation_info')} or {q.holders('gpumap_container_gpu_processes')} > 0)"
TOTAL = q.most("gpumap_device_memory_total_bytes", q.BY_DEVICE, q.DEVICE)
SHARE_OF_CARD = f"{USED} / on ({q.BY_DEVICE}) group_left () {TOTAL}"
CARD_TOTAL = f"0 * {USED} + on ({q.BY_DEVICE}) group_left () {TOTAL}"
BY_POD = "cluster, namespace, pod"
LEGEND = "{{namespace}}/{{pod}}"
ON_DEVICE = "{{namespace}}/{{pod}} {{container}} on {{node}} {{device}}"
FULL = ((0.9, YELLOW), (1.0, RED))

NOW = Row(
    "Now",
    (
        Stat(
            title="Pods that hold a GPU",
            about="Pods that hold a slot of a device. Absent if no node was scraped, or if the kubelet does not "
            "answer.",
            query=f"count(count by ({BY_POD}) ({q.holders('gpumap_allocation_info')}))",
        ),
        Stat(
            title="GPUs held",
            about="Sum of the GPU shares that pods hold: 1 for a whole card, 0.25 for one of four replicas.",
            query=f"sum({HELD})",
            decimals=2,
        ),
        Stat(
            title="Granted memory",
            about="GPU memory granted to pods. Time-slicing grants none and counts nothing. Shared memory of compute"
            " instances counts once.",
            query=f"sum({GRANTS})",
            unit="bytes",
        ),
        Stat(
            title="Used memory",
            about="GPU memory of the pods' processes, also above or without a grant.",
            query=f"sum({USED})",
            unit="bytes",
        ),
        Stat(
            title="Share of the grants in use",
            about="Used memory divided by granted memory, for containers with both values.",
            query=f"sum({q.known(USED, GRANTED)}) / sum({q.known(GRANTS, USED)})",
            unit="percentunit",
            decimals=0,
        ),
        Stat(
            title="Held, not busy",
            about="Held shares minus SM time, for each container and card. Only where SM time is known, not on MIG.",
            query=f"sum({q.idle(q.POD)})",
            decimals=2,
        ),
    ),
)

HOLDERS = Row(
    "Holders",
    (
        Table(
            title="Containers and their devices",
            about="Each container on each device that it holds or uses. An empty cell is unknown: granted is empty if "
            "the sharing grants no memory, SM is empty on MIG. Idle is 0. Unused is granted memory that is not used. "
            "Compute instances share memory in equal parts.",
            keys=(
                *CONTAINER_KEYS,
                Key("device", "Device", TO_CARD),
                Key("mig_profile", "MIG"),
                Key("uuid", "uuid"),
            ),
            columns=(
                Column(q.name_devices(THERE, "device, mig_profile")),
                Column(HELD, "GPUs", decimals=2),
                Column(GRANTED, "Granted", unit="bytes"),
                Column(USED, "Used", unit="bytes"),
                Column(q.holders("gpumap_container_gpu_memory_peak_bytes"), "Peak", unit="bytes"),
                Column(CARD_TOTAL, "Of device", unit="bytes"),
                Column(f"{USED} / {GRANTED}", "Used of granted", unit="percentunit", steps=FULL, gauge=True),
                Column(SHARE_OF_CARD, "Used of device", unit="percentunit", gauge=True),
                Column(q.unused(q.POD), "Unused", unit="bytes"),
                Column(BUSY, "SM", unit="percentunit", gauge=True),
                Column(q.holders("gpumap_container_gpu_processes"), "Processes", decimals=0),
                Column(f"time() - {q.holders('gpumap_container_last_active_timestamp_seconds')}", "Idle for", unit="s"),
            ),
            sorted_by="Unused",
            height=11,
        ),
    ),
)

MEMORY = Row(
    "Memory",
    (
        Curves(
            title="Used by each pod",
            about="GPU memory of the pod's processes on all its cards. 0 if the pod holds a card and runs nothing on "
            "it. A gap means that the driver did not report it.",
            queries=(Query(f"sum by ({BY_POD}) ({USED})", LEGEND),),
            unit="bytes",
            link=TO_POD,
        ),
        Curves(
            title="Used of granted, by pod",
            about="1 is the whole grant. Above 1, the pod uses more memory than granted. Only pods with a memory "
            "grant, on the cards of the grant.",
            queries=(
                Query(
                    f"sum by ({BY_POD}) ({q.known(USED, GRANTED)}) / sum by ({BY_POD}) ({q.known(GRANTED, USED)})",
                    LEGEND,
                ),
            ),
            unit="percentunit",
            steps=FULL,
            link=TO_POD,
        ),
        Curves(
            title="Share of each card, by container",
            about="Memory of the container divided by that of the device: the whole card, or its MIG device.",
            queries=(Query(q.name_devices(f"({SHARE_OF_CARD})"), ON_DEVICE),),
            unit="percentunit",
            most=1,
            link=TO_POD,
        ),
        Curves(
            title="Granted and not used, by pod",
            about="Granted memory that the pod does not use, for each card. Use above a grant on another card does not"
            " reduce it. Absent if nothing is granted.",
            queries=(Query(f"sum by ({BY_POD}) ({q.unused(q.POD)})", LEGEND),),
            unit="bytes",
            link=TO_POD,
        ),
    ),
)

COMPUTE = Row(
    "Computing",
    (
        Curves(
            title="SM time of each container, by card",
            about="Share of time in which the container's kernels kept the SMs busy (0-1). On a shared card, the sum "
            "of all containers is at most 1. Absent on MIG, because the driver does not report it.",
            queries=(Query(q.name_devices(BUSY), ON_DEVICE),),
            unit="percentunit",
            most=1,
            link=TO_POD,
        ),
        Curves(
            title="Energy of each pod",
            about="An estimate: the energy of the GPU, shared by SM time. Absent if SM time is unknown.",
            queries=(
                Query(
                    f"sum by ({BY_POD}) ({q.rate('gpumap_container_energy_joules_total', q.BY_HOLDER, q.POD)})", LEGEND
                ),
            ),
            unit="watt",
            link=TO_POD,
        ),
    ),
)

WRONG_KEYS = (
    *CONTAINER_KEYS,
    Key("device", "Device", TO_CARD),
    Key("uuid", "uuid"),
)
WRONG = Row(
    "Problems",
    (
        Table(
            title="Above the grant",
            about="Containers that use more memory of a card than granted.",
            keys=WRONG_KEYS,
            columns=(
                Column(
                    q.name_devices(f"({USED} - {GRANTED} > 0)", "device"), "Beyond", unit="bytes", steps=((1, RED),)
                ),
                Column(f"{USED} and {USED} > {GRANTED}", "Used", unit="bytes"),
                Column(f"{GRANTED} and {USED} > {GRANTED}", "Granted", unit="bytes"),
            ),
            sorted_by="Beyond",
            absent=NONE,
            width=12,
            height=7,
        ),
        Table(
            title="Used, but not held",
            about="Containers with processes on a device that they do not hold. Usually they are privileged, or see all"
            " GPUs.",
            keys=WRONG_KEYS,
            columns=(
                Column(q.name_devices(f"({q.holders('gpumap_container_unassigned_use')} > 0)", "device")),
                Column(f"{USED} and {q.holders('gpumap_container_unassigned_use')} > 0", "Used", unit="bytes"),
                Column(f"{BUSY} and {q.holders('gpumap_container_unassigned_use')} > 0", "SM", unit="percentunit"),
            ),
            sorted_by="Used",
            absent=NONE,
            width=12,
            height=7,
        ),
    ),
)

BOARD = Board(
    uid="gpumap-app",
    title="GPU App",
    about="GPUs and GPU memory that each pod holds, uses and wastes.",
    variables=(
        *CLUSTERED,
        NODES,
        *whose("gpumap_pod_info", q.NODE),
        UUIDS,
    ),
    rows=(NOW, HOLDERS, MEMORY, COMPUTE, WRONG),
)
