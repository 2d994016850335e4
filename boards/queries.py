"""Common parts of the boards' queries.

Each query takes `max by (…)` over the labels that identify a series. So a node with two gpumaps or two targets counts
once. `cluster` is the reader's own label and may be absent: its "All" is `.*`, which also matches series without the
label.

Every selector comes from `series`: a job without honorLabels, which has gpumap's own pod in `pod`, never counts.
"""

from __future__ import annotations

from gpumap.agent.metrics import GROUPS, PROCESSES
from gpumap.model.terms import GPU_FINDINGS

JOBS = 'job=~".*gpumap.*"'
RECORDS = 'job=~"|.*gpumap.*"'
"""What rules record has no job; what a federation took from another server has the job of that."""
CLUSTER = 'cluster=~"$cluster"'
NODE = f'{CLUSTER}, node=~"$node"'
DEVICE = f'{NODE}, uuid=~"$uuid"'
POD = f'{DEVICE}, namespace=~"$namespace", pod=~"$pod"'
GPU = f'{NODE}, gpu_uuid=~"$gpu"'

BY_DEVICE = "cluster, node, uuid"
BY_GPU = "cluster, node, gpu_uuid"
BY_HOLDER = "cluster, node, namespace, pod, container, uuid"
BY_SOURCE = "cluster, node, source"

FAMILIES = (*(family for group in GROUPS.values() for family in group), *PROCESSES)
OF_PODS = frozenset({"kube_pod_labels", *(family.name for family in FAMILIES if "pod" in family.labels)})


def series(name: str, where: str) -> str:
    """The series of a name. Of pods only those that the scrape left under their own name.

    gpumap's series are those of jobs with gpumap in the name: any pod can expose them, but cannot choose its job.
    """
    own = ', exported_pod=""' if name in OF_PODS else ""
    job = f"{JOBS}, " if name.startswith("gpumap_") else ""
    return f"{name}{{{job}{where}{own}}}"


def most(name: str, by: str, where: str) -> str:
    """A gauge, once for each thing."""
    return f"max by ({by}) ({series(name, where)})"


def rate(name: str, by: str, where: str, window: str = "$__rate_interval") -> str:
    """A counter's increase in a second, once for each thing."""
    return f"max by ({by}) (rate({series(name, where)}[{window}]))"


def increase(name: str, by: str, where: str) -> str:
    """A counter's increase in the time range, once for each thing."""
    return f"max by ({by}) (increase({series(name, where)}[$__range]))"


def sm_counters(where: str) -> tuple[str, str]:
    """The counters of SM time, and those of SM activity on MIG devices, which have no SM time."""
    on_mig = f'{where}, uuid=~"MIG-.+"'
    return (
        series("gpumap_container_sm_seconds_total", where),
        series("gpumap_container_sm_activity_seconds_total", on_mig),
    )


def computed(function: str, where: str, window: str) -> str:
    """`function` of these counters, once for each holder."""
    return f"max by ({BY_HOLDER}) ({' or '.join(f'{function}({counter}[{window}])' for counter in sm_counters(where))})"


def happened(name: str, by: str, where: str) -> str:
    """How often it happened in the time range, in whole numbers, of what gpumap counts: a series begins at its birth.

    increase() stretches what it saw, and does not see the first event of a series that begins at 1.
    """
    last = f"max by ({by}) (last_over_time({series(name, where)}[$__range]))"
    before = f"max by ({by}) ({series(name, where)} offset $__range)"
    return f"clamp_min({last} - ({before} or 0 * {last}), 0)"


def rose(name: str, by: str, where: str) -> str:
    """How much a counter of the driver's rose in the time range, in whole numbers: it is older than its series.

    From the lowest that was seen: what a card brought with it is none of it, nor is a fall a new beginning.
    """
    last = f"max by ({by}) (last_over_time({series(name, where)}[$__range]))"
    return f"({last} - min by ({by}) (min_over_time({series(name, where)}[$__range])))"


def answers(where: str, there: str) -> str:
    """Each GPU: 1 if it answers, 0 if not. If the whole driver does not answer: all its GPUs of the last day.

    `there` selects the nodes. A day is for one moment; curves of it cost too much.
    """
    before = f"max by ({BY_GPU}) (last_over_time({series('gpumap_gpu_up', where)}[1d]))"
    driver = most("gpumap_source_up", "cluster, node", f'{there}, source="nvml"')
    return f"({most('gpumap_gpu_up', BY_GPU, where)} or 0 * {before} and on (cluster, node) {driver} == 0)"


def one_of(info: str, by: str = BY_DEVICE) -> str:
    """One row for each device, if two targets report different labels: otherwise no join is possible."""
    return f"topk by ({by}) (1, {info})"


def names_of_devices() -> str:
    """1 for each device, with `model`, `mig_profile`, and `device` as `gpumap map` writes it: index, or index/GI/CI."""
    numbers = '"index", "gpu_instance_id", "compute_instance_id"'
    of = "cluster, node, uuid, index, model, mig_profile, gpu_instance_id, compute_instance_id"
    info = f'label_join({one_of(most("gpumap_device_info", of, NODE))}, "device", "/", {numbers})'
    return f'label_replace({info}, "device", "$1", "device", "(.*?)/*")'


def names_of_gpus(where: str = NODE) -> str:
    """1 for each physical GPU, with `index` and `model`; also for those without a device."""
    infos = " or ".join(series(name, where) for name in ("gpumap_device_info", "gpumap_gpu_without_device_info"))
    return one_of(f"max by ({BY_GPU}, index, model) ({infos})", BY_GPU)


def name_devices(expr: str, labels: str = "device, model, mig_profile") -> str:
    return f"{expr} * on ({BY_DEVICE}) group_left ({labels}) {names_of_devices()}"


def name_gpus(expr: str) -> str:
    return f"{expr} * on ({BY_GPU}) group_left (index, model) {names_of_gpus()}"


def memory_of_gpus(name: str, where: str) -> str:
    """Memory of devices to be added up: of compute instances that share one GPU instance's memory only one counts."""
    place = "cluster, node, uuid, gpu_uuid, gpu_instance_id"
    info = one_of(most("gpumap_device_info", place, where))
    memory = most(name, BY_DEVICE, where)
    placed = f"{memory} * on ({BY_DEVICE}) group_left (gpu_uuid, gpu_instance_id) {info}"
    return f"max by (cluster, node, gpu_uuid, gpu_instance_id) ({placed})"


def holders(name: str) -> str:
    return most(name, BY_HOLDER, POD)


def sharers(where: str) -> str:
    """Of compute instances that share one GPU instance's memory: how many they are. Nothing for other devices."""
    place = "cluster, node, gpu_uuid, gpu_instance_id"
    info = most("gpumap_device_info", f"uuid, {place}", f'{where}, gpu_instance_id!=""')
    return f"max by ({BY_DEVICE}) ({info} * on ({place}) group_left () (count by ({place}) ({info}) > 1))"


def grants(where: str, there: str = NODE) -> str:
    """Granted memory for sums: memory that compute instances share is granted to each of them, and counts once.

    `there` selects where to look for the other instances; `where` may select only one of them.
    """
    granted = most("gpumap_container_allocated_gpu_memory_bytes", BY_HOLDER, where)
    return f"({granted} / on ({BY_DEVICE}) group_left () {sharers(there)} or {granted})"


def finding(name: str, where: str) -> str:
    """A value of each finding; of the faults of a GPU, of the worst one.

    A finding of a GPU has no pod, but a scrape without honorLabels gives it that of gpumap.
    """
    kinds = "|".join(GPU_FINDINGS)
    of_pods = most(f"gpumap_finding_{name}", f"{BY_HOLDER}, finding, reason", f'{where}, finding!~"{kinds}"')
    of_gpus = worst_faults(name, where, f"{BY_DEVICE}, finding, reason", f'finding=~"{kinds}"')
    return f"({of_pods} or {of_gpus})"


def worst_faults(name: str, where: str, by: str, kinds: str = 'finding="fault"') -> str:
    """A value of the worst fault of each GPU, or of these kinds of findings of GPUs: those that count the GPU."""
    values, gpus = (most(f"gpumap_finding_{of}", by, f"{where}, {kinds}") for of in (name, "gpus"))
    return f"{gpus} > 0" if name == "gpus" else f"{values} and {gpus} > 0"


def unused(where: str) -> str:
    """Memory that idle containers hold, and that others do not need, as the agents judged it."""
    return most("gpumap_finding_memory_bytes", BY_HOLDER, f'{where}, finding=~"idle|unused"')


def or_none(total: str, kinds: str, there: str) -> str:
    """A sum of findings of these kinds. Without findings it is 0 if the nodes can judge all of them, else unknown.

    A node with holders of which none has a known grant knows nothing of unused memory.
    """
    judged = series("gpumap_finding_judged", f'{there}, finding=~"{kinds}"')
    missing = series("gpumap_finding_unjudged", f'{there}, finding=~"{kinds}", reason!="not_supported"')
    if "unused" in kinds:
        holders, granted = (
            most("gpumap_finding_judged", "cluster, node", f'{there}, finding="{kind}"') for kind in ("idle", "unused")
        )
        missing = f"{missing} or {holders} > 0 and {granted} == 0"
    return f"({total} or 0 * (count({judged}) unless count({missing})))"


def unjudged(there: str) -> str:
    """How many cannot be judged, for each node, kind of finding and reason."""
    return most("gpumap_finding_unjudged", "cluster, node, finding, reason", there)


def known(expr: str, other: str, by: str = BY_HOLDER) -> str:
    """The first, where the second is known too."""
    return f"({expr} and on ({by}) {other})"


def recorded(record: str, by: str, where: str, raw: str) -> str:
    """A record of rules/fleet.yaml where it is, without what its server adds to it; else what it is made of.

    For servers that hold only the records of many clusters. Where there is both, it costs both.
    """
    return f"max by ({by}) ({record}{{{RECORDS}, {where}}} or {raw})"
