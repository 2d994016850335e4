"""GPU Chargeback: who held how many GPU-hours, computed on them, and took how much energy, and what that costs."""

from __future__ import annotations

from boards import queries as q
from boards.links import CLUSTERED, NODES, TO_NAMESPACE, TO_POD, whose
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
COMPUTED = counted("gpumap_container_sm_seconds_total")
MEMORY = counted("gpumap_container_gpu_memory_byte_seconds_total")
ENERGY = counted("gpumap_container_energy_joules_total")
UNCHARGED = q.increase("gpumap_gpu_energy_unattributed_joules_total", q.BY_DEVICE, q.NODE)
LABELS = q.series("kube_pod_labels", f'{q.CLUSTER}, namespace=~"$namespace", pod=~"$pod"')
TEAMS = (
    f"label_replace(topk by ({IN_POD}) (1, max by ({IN_POD}, $label) (last_over_time({LABELS}[$__range]))),"
    ' "team", "$1", "$label", "(.+)")'
)
"""1 for each pod, with its team. Of two values in the time range one is taken."""


def by(labels: str, expr: str) -> str:
    return f"sum by ({labels}) ({expr})"


def by_team(_: str, expr: str) -> str:
    """Pods without the label, and all where kube-state-metrics is not there, are one line, so that the total stays."""
    pods = f"sum by ({IN_POD}) ({expr})"
    named = f"{pods} * on ({IN_POD}) group_left (team) {TEAMS} or on ({IN_POD}) {pods}"
    return f'sum by (team) (label_replace({named}, "team", "(none)", "team", ""))'


def not_computing(labels: str, total: bool = False) -> str:
    """The part of what was held that was not computed on, where both are known, each holding by itself as in a bill."""
    idle, held = f"clamp_min({HELD} - {COMPUTED}, 0)", q.known(HELD, COMPUTED)
    if total:
        return f"sum({idle}) / sum({held})"
    sums = by_team if labels == "team" else by
    return f"{sums(labels, idle)} / {sums(labels, held)}"


def bill(labels: str) -> tuple[Column, ...]:
    sums = by_team if labels == "team" else by
    return (
        Column(f"{sums(labels, HELD)} / 3600", "GPU-hours held", unit="none", decimals=2),
        Column(f"{sums(labels, COMPUTED)} / 3600", "SM-hours", unit="none", decimals=2),
        Column(not_computing(labels), "Idle", unit="percentunit", steps=((0.5, YELLOW),), gauge=True),
        Column(f"{sums(labels, MEMORY)} / {GIB_HOUR}", "Memory, GiB-hours", unit="none", decimals=2),
        Column(f"{sums(labels, ENERGY)} / {JOULES_IN_KWH}", "Energy", unit="kwatth", decimals=3),
        Column(f"{sums(labels, HELD)} / 3600 * $price", "Cost", unit="none", decimals=2),
    )


ESTIMATE = (
    " For boards: increase() reads between the samples. For money use `gpumap bill` (docs/how-to/charge-teams.md)."
)
EMPTY = " An empty cell is not known: MIG has no SM time, and so no share of energy."

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
            about="Time that the containers' kernels kept SMs busy. MIG tells none." + ESTIMATE,
            query=f"sum({COMPUTED}) / 3600",
            unit="none",
            decimals=2,
        ),
        Stat(
            title="Idle part",
            about="Of the GPU-hours held, those that were not computed on, where both are known. Each container on a"
            " device counts by itself: who computes more than its share makes no other one less idle.",
            query=not_computing("", total=True),
            unit="percentunit",
            decimals=0,
            steps=((0.5, YELLOW),),
        ),
        Stat(
            title="Cost",
            about="GPU-hours held times the price above. Money has no unit here: it is that of the price." + ESTIMATE,
            query=f"sum({HELD}) / 3600 * $price",
            unit="none",
            decimals=2,
        ),
        Stat(
            title="Energy of containers",
            about="An estimate: the GPUs' energy shared out by SM time.",
            query=f"sum({ENERGY}) / {JOULES_IN_KWH}",
            unit="kwatth",
            decimals=3,
        ),
        Stat(
            title="Energy of nobody",
            about="Energy of the chosen nodes' GPUs that no container was charged for: idle cards, MIG, the host.",
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
            about="What each namespace held, computed, took, and what that costs." + EMPTY + ESTIMATE,
            keys=(Key("cluster", "Cluster"), Key("namespace", "Namespace", TO_NAMESPACE)),
            columns=bill(BY_NAMESPACE),
            sorted_by="GPU-hours held",
            width=12,
        ),
        Table(
            title="By the pods' label",
            about="By the label of pods that the variable names, as kube-state-metrics tells it"
            " when it is started with --metric-labels-allowlist=pods=[team]. Pods without it"
            " are (none)." + EMPTY + ESTIMATE,
            keys=(Key("team", "Team"),),
            columns=bill("team"),
            sorted_by="GPU-hours held",
            width=12,
        ),
        Table(
            title="By pod",
            about="What each pod held, computed, took, and what that costs." + EMPTY + ESTIMATE,
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
    "As it goes",
    (
        Curves(
            title="GPUs held, by namespace",
            about="The rate at which GPU-hours are counted: how many GPUs the namespace holds.",
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
            about="Power that containers are charged for, an estimate, and that nobody is charged for; together it is"
            " the power of the GPUs if every namespace and pod is chosen.",
            queries=(
                Query(
                    by(BY_NAMESPACE, q.rate("gpumap_container_energy_joules_total", q.BY_HOLDER, PODS)), "{{namespace}}"
                ),
                Query(f"sum({q.rate('gpumap_gpu_energy_unattributed_joules_total', q.BY_DEVICE, q.NODE)})", "nobody"),
            ),
            unit="watt",
            stacked=True,
        ),
        Curves(
            title="GPU time that nobody was charged for",
            about="Of how many GPUs of the chosen nodes nothing could be measured, so that nobody was charged for them."
            " 0 is right: above it a bill is short.",
            queries=(Query(f"sum({q.rate('gpumap_accounting_gap_seconds_total', q.BY_DEVICE, q.NODE)})", "GPUs"),),
        ),
    ),
)

BOARD = Board(
    uid="gpumap-chargeback",
    title="GPU Chargeback",
    about="Who held how many GPU-hours, computed on them, took how much energy, and what that costs.",
    variables=(
        *CLUSTERED,
        NODES,
        *whose(HELD_COUNTER, q.NODE),
    ),
    choices=(
        Choice("price", "Price per GPU-hour", "In any currency; costs are in the same.", "1"),
        Choice("label", "Label of pods", "As kube-state-metrics writes it: label_ and the label's name.", "label_team"),
    ),
    rows=(NOW, BILLS, FLOW),
    since="now-24h",
)
