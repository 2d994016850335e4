"""GPU Health: cards that fail or are about to, whom it hits, and whether gpumap itself sees all."""

from __future__ import annotations

from boards import itself
from boards import queries as q
from boards.links import CLUSTERED, CONTAINER_KEYS, NODE_KEY, NODES, TO_HEALTH
from boards.panels import (
    GREEN,
    NONE,
    RED,
    YELLOW,
    Board,
    Column,
    Curves,
    Key,
    Query,
    Row,
    Stat,
    States,
    Table,
    Variable,
)

GPUS = q.BY_DEVICE
UP = q.most("gpumap_gpu_up", GPUS, q.GPU)
ANSWERS = q.answers(q.GPU, q.NODE)
EACH = f"{q.name_gpus(ANSWERS)} or on ({GPUS}) {ANSWERS}"
ON_NODE = "{{node}} {{index}}"
XIDS = f"{GPUS}, xid"
AGENTS = "cluster, node"
ASKED = f'{q.GPU}, action!="none"'


def gpus(name: str, by: str = GPUS) -> str:
    return q.most(name, by, q.GPU)


NOW = Row(
    "Now",
    (
        Stat(
            title="GPUs",
            about="GPUs that gpumap knows, also those that do not answer; of a node whose driver is down as a whole,"
            " those that it had in the last day. Absent: no node was scraped.",
            query=f"count({ANSWERS})",
        ),
        Stat(
            title="GPUs not answering",
            about="Lost, hung, or in need of a reset; or all that a node had in the last day, whose driver is down as a"
            " whole. Absent: no node was scraped.",
            query=f"sum({ANSWERS} == bool 0)",
            steps=((1, RED),),
        ),
        Stat(
            title="XID errors",
            about="Heard in the time range. gpumap hears them while it listens; below stands for how long it did not.",
            query=f"sum({q.happened('gpumap_gpu_xid_errors_total', GPUS, q.GPU)})",
            steps=((1, RED),),
        ),
        Stat(
            title="Memory errors, uncorrected",
            about="By how many the driver's count rose in the time range. Absent: no GPU has ECC, or it is off.",
            query="sum("
            + q.rose("gpumap_gpu_ecc_errors_total", f"{GPUS}, type, location", f'{q.GPU}, type="uncorrected"')
            + ")",
            steps=((1, RED),),
        ),
        Stat(
            title="Sources that do not answer",
            about="Of all nodes: the kubelet, NVML, procfs, pod identity. Their numbers are absent meanwhile, not 0.",
            query=f"sum({q.most('gpumap_source_up', q.BY_SOURCE, q.NODE)} == bool 0)",
            steps=((1, RED),),
        ),
        Stat(
            title="Oldest data",
            about="How long ago the oldest page of a node was collected. It is more than some intervals where gpumap"
            " is stuck.",
            query=f"max(time() - {q.most('gpumap_snapshot_timestamp_seconds', AGENTS, q.NODE)})",
            unit="s",
            decimals=0,
            steps=((60, YELLOW), (300, RED)),
        ),
    ),
)

GPU_KEYS = (
    Key("cluster", "Cluster"),
    NODE_KEY,
    Key("index", "GPU", TO_HEALTH),
    Key("model", "Model"),
    Key("uuid", "uuid"),
)
ILL = Row(
    "GPUs",
    (
        Table(
            title="GPUs",
            about="Each physical GPU. An empty cell is not known or not told by this kind of GPU; a card that does not"
            " answer has only Answers, and no name where its driver is down as a whole. Errors are those of the time"
            " range, rows those of the card's life.",
            keys=GPU_KEYS,
            columns=(
                Column(EACH, "Answers", decimals=0, steps=((0, RED), (1, GREEN))),
                Column(
                    q.most("gpumap_gpu_temperature_celsius", GPUS, f'{q.GPU}, sensor="gpu"'),
                    "Temperature",
                    unit="celsius",
                ),
                Column(gpus("gpumap_gpu_power_watts"), "Power", unit="watt"),
                Column(
                    f"{gpus('gpumap_gpu_power_watts')} / {gpus('gpumap_gpu_power_limit_watts')}",
                    "Power of limit",
                    unit="percentunit",
                    gauge=True,
                ),
                Column(
                    q.happened("gpumap_gpu_xid_errors_total", GPUS, q.GPU), "XID errors", decimals=0, steps=((1, RED),)
                ),
                Column(
                    f"sum by ({GPUS}) ("
                    + q.rose("gpumap_gpu_ecc_errors_total", f"{GPUS}, type, location", q.GPU)
                    + ")",
                    "Memory errors",
                    decimals=0,
                    steps=((1, YELLOW),),
                ),
                Column(
                    f"sum by ({GPUS}) ({gpus('gpumap_gpu_remapped_rows', f'{GPUS}, type')})",
                    "Rows replaced",
                    decimals=0,
                    steps=((1, YELLOW),),
                ),
                Column(gpus("gpumap_gpu_row_remap_pending"), "Rows wait for a reset", decimals=0, steps=((1, YELLOW),)),
                Column(gpus("gpumap_gpu_row_remap_failure"), "No spare row", decimals=0, steps=((1, RED),)),
            ),
            sorted_by="Answers",
            rising=True,
            height=9,
        ),
        Table(
            title="Faults and what the driver asks for",
            about="Why GPUs do not answer, and the recovery that the driver asks for (other than none)."
            " docs/how-to/troubleshoot.md has what to do.",
            keys=(*GPU_KEYS, Key("reason", "Fault"), Key("action", "Asked for")),
            columns=(
                Column(
                    q.name_gpus(
                        f"({gpus('gpumap_gpu_fault_info', f'{GPUS}, reason')}"
                        f" or {q.most('gpumap_gpu_recovery_action_info', f'{GPUS}, action', ASKED)})"
                    )
                ),
            ),
            sorted_by="Node",
            rising=True,
            absent=NONE,
            width=12,
            height=7,
        ),
        Table(
            title="Containers that were hit by XID errors",
            about="Containers that held or used the device when the error came, in the time range. One of them may"
            " have caused it, or all may have suffered it.",
            keys=(
                *CONTAINER_KEYS,
                Key("xid", "XID"),
                Key("uuid", "uuid"),
            ),
            columns=(
                Column(
                    q.happened("gpumap_container_xid_errors_total", f"{q.BY_HOLDER}, xid", q.NODE) + " > 0",
                    "Errors",
                    decimals=0,
                ),
            ),
            sorted_by="Errors",
            absent=NONE,
            width=12,
            height=7,
        ),
    ),
)

EVENTS = Row(
    "What happened",
    (
        States(
            title="Answers",
            about="Whether each GPU answered. A gap: gpumap itself was not scraped, or the driver as a whole did not"
            " answer it.",
            query=Query(q.name_gpus(UP), ON_NODE),
            good="answers",
            bad="does not answer",
            steps=((0, RED), (1, GREEN)),
        ),
        Curves(
            title="XID errors heard, by code",
            about="A count that steps up with each error; it begins with the first one of a code. NVIDIA's list says"
            " what a code means.",
            queries=(
                Query(
                    f"sum by (xid) ({gpus('gpumap_gpu_xid_errors_by_code_total', XIDS)})",
                    "XID {{xid}}",
                ),
            ),
            decimals=0,
            absent=NONE,
        ),
        Curves(
            title="Clocks lowered, by reason",
            about="Share of the time in which clocks were lowered, mean over the GPUs that tell it. gpu_idle is"
            " harmless; thermal slowdowns and the power brake are not.",
            queries=(
                Query(
                    "avg by (reason) ("
                    + q.rate("gpumap_gpu_clock_event_seconds_total", f"{GPUS}, reason", q.GPU)
                    + ")",
                    "{{reason}}",
                ),
            ),
            unit="percentunit",
            most=1,
        ),
        Curves(
            title="Memory errors corrected",
            about="Over each GPU's life, as the driver counts: a step is a new error.",
            queries=(
                Query(
                    q.name_gpus(
                        f"sum by ({GPUS}) ("
                        + q.most("gpumap_gpu_ecc_errors_total", f"{GPUS}, type, location", f'{q.GPU}, type="corrected"')
                        + ")"
                    ),
                    ON_NODE,
                ),
            ),
            decimals=0,
        ),
    ),
)

HARDWARE = Row(
    "Hardware",
    (
        Curves(
            title="Temperature",
            about="Of each GPU, by sensor. Absent for sensors that a GPU does not have.",
            queries=(
                Query(
                    q.name_gpus(gpus("gpumap_gpu_temperature_celsius", f"{GPUS}, sensor")),
                    "{{node}} {{index}} {{sensor}}",
                ),
            ),
            unit="celsius",
        ),
        Curves(
            title="Power of its limit",
            about="Power drawn over the limit that is enforced. At 1 clocks are lowered.",
            queries=(
                Query(
                    q.name_gpus(f"({gpus('gpumap_gpu_power_watts')} / {gpus('gpumap_gpu_power_limit_watts')})"), ON_NODE
                ),
            ),
            unit="percentunit",
            steps=((0.95, YELLOW), (1.0, RED)),
        ),
        Curves(
            title="PCIe",
            about="Bytes per second to and from the GPU. Absent where the driver counts them in 32 bits.",
            queries=(
                Query(q.name_gpus(q.rate("gpumap_gpu_pcie_transmit_bytes_total", GPUS, q.GPU)), f"{ON_NODE} out"),
                Query(q.name_gpus(q.rate("gpumap_gpu_pcie_receive_bytes_total", GPUS, q.GPU)), f"{ON_NODE} in"),
            ),
            unit="Bps",
        ),
        Curves(
            title="NVLink",
            about="Bytes per second over all NVLinks of the GPU. Absent where it has none.",
            queries=(
                Query(q.name_gpus(q.rate("gpumap_gpu_nvlink_transmit_bytes_total", GPUS, q.GPU)), f"{ON_NODE} out"),
                Query(q.name_gpus(q.rate("gpumap_gpu_nvlink_receive_bytes_total", GPUS, q.GPU)), f"{ON_NODE} in"),
            ),
            unit="Bps",
        ),
    ),
)

BOARD = Board(
    uid="gpumap-health",
    title="GPU Health",
    about="Cards that fail or are about to, whom it hits, and whether gpumap itself sees all.",
    variables=(*CLUSTERED, NODES, Variable("gpu", "GPU", f"label_values(gpumap_gpu_up{{{q.JOBS}, {q.NODE}}}, uuid)")),
    rows=(NOW, ILL, EVENTS, HARDWARE, itself.ROW),
)
