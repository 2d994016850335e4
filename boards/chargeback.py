"""GPU Chargeback: held GPU-hours, SM-hours, energy and cost of namespaces, teams and pods."""

from __future__ import annotations

from boards import queries as q
from boards.links import CLUSTERED, NODES, TO_NAMESPACE, TO_POD, namespace_and_pod
from boards.panels import YELLOW, Board, Choice, Column, Curves, Key, Query, Row, Stat, Table

PODS = f'{q.NODE}, namespace=~"$namespace", pod=~"$pod"'
JOULES_IN_KWH = 3_600_000
GIB_HOUR = 1024**3 * 3600
IN_POD = "cluster, namespace, pod"
BY_NAMESPACE = "cluster, namespace"
HELD_COUNTER = "gpumap_container_allocated_gpu_seconds_total"


def counted(name: str) -> str:
    return q.increase(name, q.BY_HOLDER, PODS)


HELD = counted(HELD_COUNTER)
COMPUTED = q.computed("increase", PODS, "$__range")
MEMORY = counted("gpumap_container_gpu_memory_byte_seconds_total")
ENERGY = counted("gpumap_container_energy_joules_total")
UNCHARGED = q.increase("gpumap_gpu_energy_unattributed_joules_total", q.BY_GPU, q.NODE)
LABELS = q.series("kube_pod_labels", f'{q.CLUSTER}, namespace=~"$namespace", pod=~"$pod"')
TEAMS = (
    f"label_replace(topk by ({IN_POD}) (1, max by ({IN_POD}, $label) (last_over_time({LABELS}[$__range]))),"
    ' "team", "$1", "$label", "(.+)")'
)
"""1 for each pod, with its team. If the team changed in the time range, one value."""


def by(labels: str, expr: str) -> str:
    return f"sum by ({labels}) ({expr})"


def by_team(_: str, expr: str) -> str:
    """Return sums by team. Pods without the label are one line; without kube-state-metrics, all pods are."""
    pods = f"sum by ({IN_POD}) ({expr})"
    named = f"{pods} * on ({IN_POD}) group_left (team) {TEAMS} or on ({IN_POD}) {pods}"
    return f'sum by (team) (label_replace({named}, "team", "(none)", "team", ""))'


def not_computing(labels: str, total: bool = False) -> str:
    """Return the part of the held GPU-hours without SM time, where both are known, for each holding as in a bill."""
    rest, held = f"clamp_min({HELD} - {COMPUTED}, 0)", q.known(HELD, COMPUTED)
    if total:
        return f"sum({rest}) / sum({held})"
    sums = by_team if labels == "team" else by
    return f"{sums(labels, rest)} / {sums(labels, held)}"


def bill(labels: str) -> tuple[Column, ...]:
    sums = by_team if labels == "team" else by
    return (
        Column(f"{sums(labels, HELD)} / 3600", "GPU-hours held", unit="none", decimals=2),
        Column(f"{sums(labels, COMPUTED)} / 3600", "SM-hours", unit="none", decimals=2),
        Column(not_computing(labels), "Not busy", unit="percentunit", steps=((0.5, YELLOW),), gauge=True),
        Column(f"{sums(labels, MEMORY)} / {GIB_HOUR}", "Memory, GiB-hours", unit="none", decimals=2),
        Column(f"{sums(labels, ENERGY)} / {JOULES_IN_KWH}", "Energy", unit="kwatth", decimals=3),
        Column(f"{sums(labels, HELD)} / 3600 * $price", "Cost", unit="none", decimals=2),
    )


ESTIMATE = " For boards only: increase() extrapolates. For invoices use `gpumap bill` (docs/how-to/charge-teams.md)."
EMPTY = " An empty cell is unknown: MIG devices have no energy of containers, and often no SM time."

NOW = Row(
    "In the time range",
    (
        Stat(
            title="GPU-hours held",
            about="Time that containers held GPUs, times their share of them." + ESTIMATE,
            query=f"sum({HELD}) / 3600",
            unit="none",
            decimals=2,
        ),
        Stat(
            title="SM-hours",
            about="Time that the containers' kernels kept SMs busy. On MIG devices: SM activity." + ESTIMATE,
            query=f"sum({COMPUTED}) / 3600",
            unit="none",
            decimals=2,
        ),
        Stat(
            title="Not busy",
            about="Share of the held GPU-hours without SM time, where SM time is known. Each container on a device "
            "counts separately: one that uses more than its share does not reduce the share of others.",
            query=not_computing("", total=True),
            unit="percentunit",
            decimals=0,
            steps=((0.5, YELLOW),),
        ),
        Stat(
            title="Cost",
            about="GPU-hours held times the price above, in the currency of the price." + ESTIMATE,
            query=f"sum({HELD}) / 3600 * $price",
            unit="none",
            decimals=2,
        ),
        Stat(
            title="Energy of containers",
            about="An estimate: the energy of the GPUs, shared by SM time.",
            query=f"sum({ENERGY}) / {JOULES_IN_KWH}",
            unit="kwatth",
            decimals=3,
        ),
        Stat(
            title="Energy without a container",
            about="Energy of the selected nodes' GPUs that is charged to no container: idle cards, MIG, the host.",
            query=f"sum({UNCHARGED}) / {JOULES_IN_KWH}",
            unit="kwatth",
            decimals=3,
        ),
    ),
)

BILLS = Row(
    "Who",
    (
        Table(
            title="By namespace",
            about="Held GPU-hours, SM-hours, energy and cost of each namespace." + EMPTY + ESTIMATE,
            keys=(Key("cluster", "Cluster"), Key("namespace", "Namespace", TO_NAMESPACE)),
            columns=bill(BY_NAMESPACE),
            sorted_by="GPU-hours held",
            width=12,
        ),
        Table(
            title="By the pods' label",
            about="By the pod label in the variable. It requires kube-state-metrics with"
            " --metric-labels-allowlist=pods=[team]. Pods without the label"
            " are (none)." + EMPTY + ESTIMATE,
            keys=(Key("team", "Team"),),
            columns=bill("team"),
            sorted_by="GPU-hours held",
            width=12,
        ),
        Table(
            title="By pod",
            about="Held GPU-hours, SM-hours, energy and cost of each pod." + EMPTY + ESTIMATE,
            keys=(
                Key("cluster", "Cluster"),
                Key("namespace", "Namespace", TO_NAMESPACE),
                Key("pod", "Pod", TO_POD),
            ),
            columns=bill(IN_POD),
            sorted_by="GPU-hours held",
            height=11,
        ),
    ),
)

FLOW = Row(
    "Over time",
    (
        Curves(
            title="GPUs held, by namespace",
            about="Number of GPUs that the namespace holds: the rate of its GPU-hours.",
            queries=(Query(by(BY_NAMESPACE, q.rate(HELD_COUNTER, q.BY_HOLDER, PODS)), "{{namespace}}"),),
            stacked=True,
            link=TO_NAMESPACE,
        ),
        Curves(
            title="Cost per hour, by namespace",
            about="GPUs held times the price.",
            queries=(Query(f"{by(BY_NAMESPACE, q.rate(HELD_COUNTER, q.BY_HOLDER, PODS))} * $price", "{{namespace}}"),),
            unit="none",
            stacked=True,
            link=TO_NAMESPACE,
        ),
        Curves(
            title="Energy, by namespace",
            about="Power charged to containers (an estimate), and power charged to no container. The sum is the power "
            "of the GPUs if all namespaces and pods are selected.",
            queries=(
                Query(
                    by(BY_NAMESPACE, q.rate("gpumap_container_energy_joules_total", q.BY_HOLDER, PODS)), "{{namespace}}"
                ),
                Query(
                    f"sum({q.rate('gpumap_gpu_energy_unattributed_joules_total', q.BY_GPU, q.NODE)})", "unattributed"
                ),
            ),
            unit="watt",
            stacked=True,
        ),
        Curves(
            title="GPU time charged to no container",
            about="Number of GPUs of the selected nodes that gpumap could not measure and not charge. It should be 0. "
            "Above 0, a bill is too low.",
            queries=(Query(f"sum({q.rate('gpumap_accounting_gap_seconds_total', q.BY_GPU, q.NODE)})", "GPUs"),),
        ),
    ),
)

BOARD = Board(
    uid="gpumap-chargeback",
    title="GPU Chargeback",
    about="Held GPU-hours, SM-hours, energy and cost of namespaces, teams and pods.",
    variables=(
        *CLUSTERED,
        NODES,
        *namespace_and_pod(HELD_COUNTER, q.NODE),
    ),
    choices=(
        Choice("price", "Price per GPU-hour", "In any currency; costs are in the same currency.", "1"),
        Choice(
            "label",
            "Label of pods",
            "In the form of kube-state-metrics: label_ and the name of the label.",
            "label_team",
        ),
    ),
    rows=(NOW, BILLS, FLOW),
    since="now-24h",
)
