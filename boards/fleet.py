"""GPU Fleet: existing, held and busy GPUs of all nodes and clusters.

Its queries use the records of rules/fleet.yaml if they exist. It therefore also works on a server that has only these
records, and the findings.
"""

from __future__ import annotations

from boards import queries as q
from boards.findings import ABOUT, finding_sums, finding_table, unjudged_table
from boards.links import CLUSTERED, NODE_KEY, TO_NAMESPACE, TO_NODE, namespace_and_pod
from boards.panels import RED, YELLOW, Board, Column, Curves, Key, Query, Row, Stat, Table

NAMESPACES = f'{q.CLUSTER}, namespace=~"$namespace"'
NAMESPACE_KEY = Key("namespace", "Namespace", TO_NAMESPACE)
IN_NAMESPACE, ON_NODE = "cluster, namespace", "cluster, node"


def of_namespace(record: str, raw: str) -> str:
    whole = f"sum by ({IN_NAMESPACE}) ({raw})"
    return q.recorded(f"cluster_namespace:{record}", IN_NAMESPACE, NAMESPACES, whole)


def speed_of_namespace(name: str) -> str:
    return of_namespace(f"{name}:rate5m", q.rate(f"{name}_total", q.BY_HOLDER, NAMESPACES, "5m"))


def of_node(record: str, raw: str) -> str:
    _, _, operation = record.partition(":")
    whole = f"{'count' if operation == 'count' else 'sum'} by ({ON_NODE}) ({raw})"
    return q.recorded(f"cluster_node:{record}", ON_NODE, q.CLUSTER, whole)


def speed_of_node(name: str, by: str) -> str:
    return of_node(f"{name}:rate5m", q.rate(f"{name}_total", by, q.CLUSTER, "5m"))


GPUS, ANSWERING = (
    of_node(f"gpumap_gpu_up:{operation}", q.answers(q.CLUSTER, q.CLUSTER)) for operation in ("count", "sum")
)
TOLD_OF = of_node("gpumap_gpu_up:count", q.most("gpumap_gpu_up", q.BY_GPU, q.CLUSTER))
"""Without the nodes whose whole driver is down."""
FREE_ON_NODE = f"sum by ({ON_NODE}) ({q.most('gpumap_device_free_ratio', q.BY_DEVICE, q.CLUSTER)})"
HELD_ON_NODE = of_node(
    "gpumap_container_allocated_gpus:sum", q.most("gpumap_container_allocated_gpus", q.BY_HOLDER, q.CLUSTER)
)
COMPUTING_ON_NODE = of_node("gpumap_container_sm_seconds:rate5m", q.computed("rate", q.CLUSTER, "5m"))
MEMORY_OF_NODE, USED_OF_NODE = (
    of_node(f"{name}:sum", q.memory_of_gpus(name, q.CLUSTER))
    for name in ("gpumap_device_memory_total_bytes", "gpumap_device_memory_used_bytes")
)
POWER_OF_NODE = speed_of_node("gpumap_gpu_energy_joules", q.BY_GPU)
UTILIZATION, WITH_UTILIZATION = (
    of_node(f"gpumap_gpu_utilization_ratio:{operation}", q.most("gpumap_gpu_utilization_ratio", q.BY_GPU, q.CLUSTER))
    for operation in ("sum", "count")
)
HELD, USED = (
    of_namespace(f"{name}:sum", q.most(name, q.BY_HOLDER, NAMESPACES))
    for name in ("gpumap_container_allocated_gpus", "gpumap_container_gpu_memory_used_bytes")
)
GRANTED = of_namespace("gpumap_container_allocated_gpu_memory_bytes:sum", q.grants(NAMESPACES, q.CLUSTER))
UNUSED = q.unused(NAMESPACES)
IDLE = q.most("gpumap_finding_gpus", q.BY_HOLDER, f'{NAMESPACES}, finding="idle"')
COMPUTING = of_namespace("gpumap_container_sm_seconds:rate5m", q.computed("rate", NAMESPACES, "5m"))
OFFERED = q.most("gpumap_device_slots_allocatable", f"{q.BY_DEVICE}, resource", q.CLUSTER)
TAKEN = q.most("gpumap_allocation_slots", f"{q.BY_HOLDER}, resource", q.CLUSTER)
MODELS = q.recorded(
    "cluster_model:gpumap_gpu:count",
    "cluster, model",
    q.CLUSTER,
    f"count by (cluster, model) (count by ({q.BY_GPU}, model) ({q.names_of_gpus(q.CLUSTER)}))",
)

NOW = Row(
    "The fleet now",
    (
        Stat(
            title="Nodes",
            about="Nodes whose gpumap reports GPUs, or reported some in the last day and has no answer from the "
            "driver now.",
            query=f"count({GPUS})",
            width=3,
        ),
        Stat(
            title="GPUs",
            about="Physical GPUs that gpumap knows, also those that do not answer. For a node whose whole driver is "
            "down: its GPUs of the last day.",
            query=f"sum({GPUS})",
            width=3,
        ),
        Stat(
            title="GPUs not answering",
            about="GPUs that are lost, hung or need a reset, and all GPUs of a node whose whole driver is down. See GPU"
            " Health for details. Absent if no node was scraped.",
            query=f"sum({GPUS} - {ANSWERING})",
            steps=((1, RED),),
            width=3,
        ),
        Stat(
            title="GPUs held",
            about="Sum of the GPU shares that containers hold.",
            query=f"sum({HELD_ON_NODE})",
            decimals=1,
            width=3,
        ),
        Stat(
            title="GPUs busy",
            about="SM time of all containers, in whole GPUs. On MIG devices: SM activity, if it is known.",
            query=f"sum({COMPUTING_ON_NODE})",
            decimals=1,
            width=3,
        ),
        Stat(
            title="Memory in use",
            about="Used memory divided by total memory, for all owners.",
            query=f"sum({USED_OF_NODE}) / sum({MEMORY_OF_NODE})",
            unit="percentunit",
            decimals=0,
            width=3,
        ),
        Stat(
            title="Granted, unused",
            about="Granted memory of idle containers, and what others never needed. Unknown if one cannot be judged.",
            query=q.or_none(f"sum({UNUSED})", "idle|unused", q.CLUSTER),
            unit="bytes",
            width=3,
        ),
        Stat(
            title="Power",
            about="Power of all GPUs, from their energy counters over five minutes.",
            query=f"sum({POWER_OF_NODE})",
            unit="watt",
            width=3,
        ),
    ),
)

OVER_TIME = Row(
    "Over time",
    (
        Curves(
            title="GPUs: total, held, busy",
            about="Physical GPUs, without nodes whose whole driver is down; held shares of them; and SM time in whole "
            "GPUs (on MIG devices SM activity, if it is known).",
            queries=(
                Query(f"sum({TOLD_OF})", "there"),
                Query(f"sum({HELD_ON_NODE})", "held"),
                Query(f"sum({COMPUTING_ON_NODE})", "computing"),
            ),
        ),
        Curves(
            title="Memory: total, granted, used",
            about="Memory of all GPUs; memory granted to containers (nothing if the sharing grants none); memory used "
            "by all owners.",
            queries=(
                Query(f"sum({MEMORY_OF_NODE})", "there"),
                Query(f"sum({GRANTED})", "granted"),
                Query(f"sum({USED_OF_NODE})", "used"),
            ),
            unit="bytes",
        ),
        Curves(
            title="GPUs held, by namespace",
            about="Sum of the GPU shares that the namespace's containers hold.",
            queries=(Query(f"sum by ({IN_NAMESPACE}) ({HELD})", "{{namespace}}"),),
            stacked=True,
            link=TO_NAMESPACE,
        ),
        Curves(
            title="GPUs busy, by namespace",
            about="SM time of the namespace's containers, in whole GPUs. On MIG devices: SM activity. "
            "Absent if neither is known.",
            queries=(Query(f"sum by ({IN_NAMESPACE}) ({COMPUTING})", "{{namespace}}"),),
            stacked=True,
            link=TO_NAMESPACE,
        ),
    ),
)

BY_NAMESPACE = Row(
    "Holders",
    (
        Table(
            title="Namespaces",
            about="Idle and unused are of the findings below. An empty cell is none or unknown: "
            "granted if the sharing grants no memory, busy on MIG devices of unknown activity.",
            keys=(Key("cluster", "Cluster"), NAMESPACE_KEY),
            columns=(
                Column(HELD, "GPUs held", decimals=2),
                Column(COMPUTING, "Computing", decimals=2),
                Column(f"sum by ({IN_NAMESPACE}) ({IDLE})", "Idle", decimals=2),
                Column(GRANTED, "Granted", unit="bytes"),
                Column(USED, "Used", unit="bytes"),
                Column(f"sum by ({IN_NAMESPACE}) ({UNUSED})", "Unused", unit="bytes"),
                Column(speed_of_namespace("gpumap_container_energy_joules"), "Power", unit="watt"),
            ),
            sorted_by="GPUs held",
        ),
    ),
)

FINDINGS = Row(
    "Findings",
    (
        finding_sums(
            NAMESPACE_KEY,
            NAMESPACES,
            "Which teams waste most, the most GPUs first. A broken GPU has no namespace.",
        ),
        finding_sums(NODE_KEY, NAMESPACES, "Which nodes have findings, the most GPUs first."),
        finding_table(NAMESPACES, width=16),
        unjudged_table(q.CLUSTER),
        finding_table(
            f'{NAMESPACES}, finding="idle"',
            "Longest idle",
            f"Idle containers, the longest first. {ABOUT}",
            sorted_by="For",
        ),
    ),
)

WHERE = Row(
    "Nodes and slots",
    (
        Table(
            title="Nodes",
            about="Free: GPUs and MIG devices that a new pod could be given; of a shared one, the free part. "
            "An empty cell is unknown: busy if no SM time or activity is known, used if no card answers.",
            keys=(Key("cluster", "Cluster"), NODE_KEY),
            columns=(
                Column(GPUS, "GPUs", decimals=0),
                Column(f"{GPUS} - {ANSWERING}", "Do not answer", decimals=0, steps=((1, RED),)),
                Column(HELD_ON_NODE, "Held", decimals=2),
                Column(FREE_ON_NODE, "Free", decimals=1),
                Column(COMPUTING_ON_NODE, "Computing", decimals=2),
                Column(MEMORY_OF_NODE, "Memory", unit="bytes"),
                Column(USED_OF_NODE, "Used", unit="bytes"),
                Column(f"{USED_OF_NODE} / {MEMORY_OF_NODE}", "Used of memory", unit="percentunit", gauge=True),
                Column(POWER_OF_NODE, "Power", unit="watt"),
            ),
            sorted_by="GPUs",
            width=14,
        ),
        Table(
            title="Slots",
            about="GPU slots that the kubelets offer, by resource, and the held ones. A free slot of a shared card is "
            "not a free card.",
            keys=(Key("resource", "Resource"),),
            columns=(
                Column(f"sum by (resource) ({OFFERED})", "Offered", decimals=0),
                Column(f"sum by (resource) ({TAKEN})", "Held", decimals=0),
                Column(
                    f"sum by (resource) ({TAKEN}) / sum by (resource) ({OFFERED})",
                    "Held of offered",
                    unit="percentunit",
                    steps=((0.8, YELLOW), (1, RED)),
                    gauge=True,
                ),
            ),
            sorted_by="Held of offered",
            width=10,
        ),
        Curves(
            title="GPUs by model",
            about="Physical GPUs of the nodes.",
            queries=(Query(f"sum by (model) ({MODELS})", "{{model}}"),),
            stacked=True,
        ),
        Curves(
            title="Utilization of nodes",
            about="Share of time in which any kernel ran, mean over the node's GPUs without partitions.",
            queries=(Query(f"{UTILIZATION} / {WITH_UTILIZATION}", "{{node}}"),),
            unit="percentunit",
            most=1,
            link=TO_NODE,
        ),
    ),
)

BOARD = Board(
    uid="gpumap-fleet",
    title="GPU Fleet",
    about="Existing, held and busy GPUs of all nodes and clusters.",
    variables=(
        *CLUSTERED,
        namespace_and_pod("gpumap_pod_info", q.CLUSTER)[0],
    ),
    rows=(NOW, OVER_TIME, BY_NAMESPACE, FINDINGS, WHERE),
    since="now-6h",
)
