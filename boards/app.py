"""GPU App: what each pod holds, uses and wastes, on each card."""

from __future__ import annotations

from boards import queries as q
from boards.findings import finding_table
from boards.links import CLUSTERED, CONTAINER_KEYS, NODES, TO_CARD, TO_POD, UUIDS, namespace_and_pod
from boards.panels import RED, YELLOW, Board, Column, Curves, Key, Query, Row, Stat, Table

USED = q.holders("gpumap_container_gpu_memory_used_bytes")
GRANTED = q.holders("gpumap_container_allocated_gpu_memory_bytes")
GRANTS = q.grants(q.POD)
HELD = q.holders("gpumap_container_allocated_gpus")
BUSY = q.holders("gpumap_container_sm_utilization_ratio")
THERE = f"({q.holders('gpumap_allocation_info')} or {q.holders('gpumap_container_gpu_processes')} > 0)"
TOTAL = q.most("gpumap_device_memory_total_bytes", q.BY_DEVICE, q.DEVICE)
SHARE_OF_CARD = f"{USED} / on ({q.BY_DEVICE}) group_left () {TOTAL}"
CARD_TOTAL = f"0 * {USED} + on ({q.BY_DEVICE}) group_left () {TOTAL}"
IDLE = f'{q.POD}, finding="idle"'
IDLE_GPUS = q.most("gpumap_finding_gpus", q.BY_HOLDER, IDLE)
IDLE_SINCE = q.most("gpumap_finding_since_timestamp_seconds", q.BY_HOLDER, IDLE)
UNUSED = q.unused(q.POD)
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
            title="GPUs held idle",
            about="Sum of the GPU shares that idle containers hold. Unknown if a container cannot be judged.",
            query=q.or_none(f"sum({IDLE_GPUS})", "idle", q.NODE),
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
            "the sharing grants no memory, SM is empty on MIG. Unused and idle for are of the findings below.",
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
                Column(UNUSED, "Unused", unit="bytes"),
                Column(BUSY, "SM", unit="percentunit", gauge=True),
                Column(q.holders("gpumap_container_gpu_processes"), "Processes", decimals=0),
                Column(f"time() - {IDLE_SINCE}", "Idle for", unit="s"),
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
            about="Memory of the pod in idle and unused findings. Absent if there are none, or they are unknown.",
            queries=(Query(f"sum by ({BY_POD}) ({UNUSED})", LEGEND),),
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

FINDINGS = Row("Findings", (finding_table(q.POD),))

BOARD = Board(
    uid="gpumap-app",
    title="GPU App",
    about="GPUs and GPU memory that each pod holds, uses and wastes.",
    variables=(
        *CLUSTERED,
        NODES,
        *namespace_and_pod("gpumap_pod_info", q.NODE),
        UUIDS,
    ),
    rows=(NOW, HOLDERS, MEMORY, COMPUTE, FINDINGS),
)
