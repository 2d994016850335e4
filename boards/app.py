"""GPU App: what each pod was given, uses and wastes, on each card."""

from __future__ import annotations

from boards import queries as q
from boards.links import CLUSTERED, CONTAINER_KEYS, NODES, TO_CARD, TO_POD, UUIDS, whose
from boards.panels import NONE, RED, YELLOW, Board, Column, Curves, Key, Query, Row, Stat, Table

USED = q.holders("gpumap_container_gpu_memory_used_bytes")
GRANTED = q.holders("gpumap_container_allocated_gpu_memory_bytes")
GRANTS = q.grants(q.POD)
HELD = q.holders("gpumap_container_allocated_gpus")
BUSY = q.holders("gpumap_container_sm_utilization_ratio")
THERE = f"({q.holders('gpumap_allocation_info')} or {q.holders('gpumap_container_unassigned_use')})"
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
            about="Pods with a slot of a device. Absent: no node was scraped, or the kubelet does not answer.",
            query=f"count(count by ({BY_POD}) ({q.holders('gpumap_allocation_info')}))",
        ),
        Stat(
            title="GPUs held",
            about="Shares of GPUs that pods were given, added up: a whole card is 1, one of four replicas 0.25.",
            query=f"sum({HELD})",
            decimals=2,
        ),
        Stat(
            title="Granted memory",
            about="GPU memory that pods were given. Where sharing grants none (time-slicing) nothing is counted;"
            " what compute instances share counts once.",
            query=f"sum({GRANTS})",
            unit="bytes",
        ),
        Stat(
            title="Used memory",
            about="GPU memory of the pods' own processes, also beyond or without a grant.",
            query=f"sum({USED})",
            unit="bytes",
        ),
        Stat(
            title="Share of the grants in use",
            about="Used over granted memory, of the containers of which both are known.",
            query=f"sum({q.known(USED, GRANTED)}) / sum({q.known(GRANTS, USED)})",
            unit="percentunit",
            decimals=0,
        ),
        Stat(
            title="Held, not computing",
            about="Held shares less SM time, for each container and card, as far as SM time is known (on MIG it is"
            " not).",
            query=f"sum({q.idle(q.POD)})",
            decimals=2,
        ),
    ),
)

HOLDERS = Row(
    "Who holds what",
    (
        Table(
            title="Containers and their devices",
            about="Each container on each device that it holds or uses. An empty cell is not known: granted is empty"
            " where sharing grants no memory, SM is empty on MIG. Idle is 0. Unused is what was granted and is"
            " not used; of memory that compute instances share, each has its part.",
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
            about="GPU memory of the pod's own processes, over all of its cards. A pod that holds a card and runs"
            " nothing is 0; a gap means that the driver did not tell.",
            queries=(Query(f"sum by ({BY_POD}) ({USED})", LEGEND),),
            unit="bytes",
            link=TO_POD,
        ),
        Curves(
            title="Used of granted, by pod",
            about="1 is all that the pod was given; above it the pod takes what is not its own. Only pods that were"
            " granted memory, and only the cards on which they were.",
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
            about="The container's own memory over that of the device: the whole card, or its MIG device.",
            queries=(Query(q.name_devices(f"({SHARE_OF_CARD})"), ON_DEVICE),),
            unit="percentunit",
            most=1,
            link=TO_POD,
        ),
        Curves(
            title="Granted and not used, by pod",
            about="What the pod was given and does not use, card by card; use beyond a grant elsewhere does not count"
            " against it. Absent where nothing is granted.",
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
            about="Time that the container's own kernels kept the SMs busy, 0-1. On a shared card each container has"
            " its own, and they add up to the card's at most. Absent on MIG, where no driver tells it.",
            queries=(Query(q.name_devices(BUSY), ON_DEVICE),),
            unit="percentunit",
            most=1,
            link=TO_POD,
        ),
        Curves(
            title="Energy of each pod",
            about="An estimate: the GPU's energy shared out by SM time. Absent where SM time is not known.",
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
    "What is not as it should be",
    (
        Table(
            title="Beyond the grant",
            about="Containers that use more memory of a card than they were given there.",
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
            title="Used without being given",
            about="Containers with processes on a device that they do not hold: privileged ones, or with all GPUs"
            " visible.",
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
    about="What each pod was given of GPUs, what it uses, and what it wastes.",
    variables=(
        *CLUSTERED,
        NODES,
        *whose("gpumap_pod_info", q.NODE),
        UUIDS,
    ),
    rows=(NOW, HOLDERS, MEMORY, COMPUTE, WRONG),
)
