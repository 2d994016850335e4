"""GPU Health: cards that fail or may fail soon, the affected containers, and the sources of gpumap."""

from __future__ import annotations

from boards import agents
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

GPUS = q.BY_GPU
UP = q.most("gpumap_gpu_up", GPUS, q.GPU)
ANSWERS = q.answers(q.GPU, q.NODE)
EACH = f"{q.name_gpus(ANSWERS)} or on ({GPUS}) {ANSWERS}"
ON_NODE = "{{node}} {{index}}"
XIDS = f"{GPUS}, xid"
AGENTS = "cluster, node"
ON_GPUS, BY_FAULT = f'{q.NODE}, uuid=~"$gpu"', f"{q.BY_DEVICE}, reason"
FAULTY = q.worst_faults("gpus", ON_GPUS, BY_FAULT)
ON_FAULTS = f'{q.NODE}, finding="fault"'


def gpus(name: str, by: str = GPUS) -> str:
    return q.most(name, by, q.GPU)


NOW = Row(
    "Now",
    (
        Stat(
            title="GPUs",
            about="GPUs that gpumap knows, also those that do not answer. For a node whose whole driver is down: its "
            "GPUs of the last day. Absent if no node was scraped.",
            query=f"count({ANSWERS})",
            width=3,
        ),
        Stat(
            title="GPUs not answering",
            about="GPUs that are lost, hung or need a reset, and all GPUs of a node whose whole driver is down. "
            "Absent if no node was scraped.",
            query=f"sum({ANSWERS} == bool 0)",
            steps=((1, RED),),
            width=3,
        ),
        Stat(
            title="XID errors",
            about="XID errors that gpumap received in the time range. A panel below shows for how long it did not "
            "listen.",
            query=f"sum({q.happened('gpumap_gpu_xid_errors_total', GPUS, q.GPU)})",
            steps=((1, RED),),
            width=3,
        ),
        Stat(
            title="Memory errors, uncorrected",
            about="Increase of the driver's count in the time range. Absent if no GPU has ECC, or if ECC is off.",
            query="sum("
            + q.rose("gpumap_gpu_ecc_errors_total", f"{GPUS}, type, location", f'{q.GPU}, type="uncorrected"')
            + ")",
            steps=((1, RED),),
            width=3,
        ),
        Stat(
            title="Sources that do not answer",
            about="Sources of all nodes: the kubelet, NVML, procfs, pod identity. Their series are absent meanwhile, "
            "not 0.",
            query=f"sum({q.most('gpumap_source_up', q.BY_SOURCE, q.NODE)} == bool 0)",
            steps=((1, RED),),
            width=3,
        ),
        Stat(
            title="Oldest data",
            about="Age of the oldest data of a node. It exceeds a few intervals if a gpumap hangs.",
            query=f"max(time() - {q.most('gpumap_snapshot_timestamp_seconds', AGENTS, q.NODE)})",
            unit="s",
            decimals=0,
            steps=((60, YELLOW), (300, RED)),
            width=3,
        ),
        Stat(
            title="GPUs with a fault",
            about="GPUs in the table of faults below. Unknown if a GPU cannot be judged.",
            query=q.or_none(f"sum({FAULTY})", "fault", q.NODE),
            steps=((1, RED),),
            width=3,
        ),
        Stat(
            title="GPUs not judged",
            about="GPUs of which faults may be missing, because NVML does not answer. A node that never listed its "
            "GPUs counts as one.",
            query=f"sum({q.unjudged(ON_FAULTS)}) or 0 * count({q.series('gpumap_finding_judged', ON_FAULTS)})",
            steps=((1, YELLOW),),
            width=3,
        ),
    ),
)

GPU_KEYS = (
    Key("cluster", "Cluster"),
    NODE_KEY,
    Key("index", "GPU", TO_HEALTH),
    Key("model", "Model"),
    Key("gpu_uuid", "uuid"),
)
ILL = Row(
    "GPUs",
    (
        Table(
            title="GPUs",
            about="Each physical GPU. An empty cell is unknown, or this model does not report it. A card that does "
            "not answer has only Answers, and no name if the whole driver is down. Errors are of the time range, rows "
            "of the card's life.",
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
                Column(gpus("gpumap_gpu_row_remap_pending"), "Rows need a reset", decimals=0, steps=((1, YELLOW),)),
                Column(gpus("gpumap_gpu_row_remap_failure"), "No spare row", decimals=0, steps=((1, RED),)),
            ),
            sorted_by="Answers",
            rising=True,
            height=9,
        ),
        Table(
            title="Faults and recovery",
            about="GPUs that do not answer, need an action, or had a fatal error in the last hour: the worst reason "
            "of each. Remedies: docs/how-to/troubleshoot.md.",
            keys=(Key("cluster", "Cluster"), NODE_KEY, Key("uuid", "uuid"), Key("reason", "Reason")),
            columns=(
                Column(f"time() - ({q.worst_faults('since_timestamp_seconds', ON_GPUS, BY_FAULT)})", "For", unit="s"),
                Column(FAULTY, "GPUs", decimals=0),
            ),
            sorted_by="Node",
            rising=True,
            absent=NONE,
            width=12,
            height=7,
        ),
        Table(
            title="Containers affected by XID errors",
            about="Containers that held or used the device at the time of the error, in the time range. One of them "
            "may have caused it, or it affected all of them.",
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
    "Events",
    (
        States(
            title="Answers",
            about="Whether each GPU answered. A gap: gpumap was not scraped, or the whole driver did not answer.",
            query=Query(q.name_gpus(UP), ON_NODE),
            good="answers",
            bad="does not answer",
            steps=((0, RED), (1, GREEN)),
        ),
        Curves(
            title="XID errors, by code",
            about="A count that rises with each error. It begins with the first error of a code. NVIDIA's catalog "
            "explains the codes.",
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
            title="Clocks throttled, by reason",
            about="Share of time with throttled clocks, mean over the GPUs that report it. gpu_idle is harmless. "
            "Thermal slowdowns and the power brake are not.",
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
            about="Corrected errors over each GPU's life, as counted by the driver. A step is a new error.",
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
            about="Temperature of each GPU, by sensor. Absent for sensors that a GPU does not have.",
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
            about="Power draw divided by the enforced limit. At 1 the driver throttles the clocks.",
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
            about="Bytes per second to and from the GPU. Absent if the driver counts them in 32 bits.",
            queries=(
                Query(q.name_gpus(q.rate("gpumap_gpu_pcie_transmit_bytes_total", GPUS, q.GPU)), f"{ON_NODE} out"),
                Query(q.name_gpus(q.rate("gpumap_gpu_pcie_receive_bytes_total", GPUS, q.GPU)), f"{ON_NODE} in"),
            ),
            unit="Bps",
        ),
        Curves(
            title="NVLink",
            about="Bytes per second over all NVLinks of the GPU. Absent without NVLink.",
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
    about="Cards that fail or may fail soon, the affected containers, and the sources of gpumap.",
    variables=(
        *CLUSTERED,
        NODES,
        Variable("gpu", "GPU", f"label_values(gpumap_gpu_up{{{q.JOBS}, {q.NODE}}}, gpu_uuid)"),
    ),
    rows=(NOW, ILL, EVENTS, HARDWARE, agents.ROW),
)
