"""Pages of exporters that stay beside gpumap, made to fit simulated nodes: kube-state-metrics and dcgm-exporter.

Only what queries of the field ask for, with the names, labels and units of the originals.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal

from prometheus_client.parser import text_string_to_metric_families

from tests import dcgm_exporter as dcgm
from tests.demo_process import fetch

Labels = Mapping[str, str]
Row = tuple[str, Labels, float]
Samples = Mapping[str, list[tuple[Labels, float]]]


def read(url: str) -> Samples:
    """A node's page by the names of its samples."""
    found: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for family in text_string_to_metric_families(fetch(f"{url}/metrics", accept="text/plain")[0]):
        for sample in family.samples:
            found[sample.name].append((sample.labels, sample.value))
    return found


def page(rows: Iterable[Row]) -> str:
    lines = []
    for name, labels, value in rows:
        shown = ",".join(f'{key}="{text}"' for key, text in labels.items())
        lines.append(f"{name}{{{shown}}} {value}")
    return "\n".join([*sorted(set(lines)), ""])


def kube_state_metrics(nodes: Mapping[str, str]) -> str:
    return page(row for node, url in nodes.items() for row in kube_rows(node, read(url)))


def kube_rows(node: str, samples: Samples) -> Iterator[Row]:
    pods = {(labels["namespace"], labels["pod"]): labels["uid"] for labels, _ in samples["gpumap_pod_info"]}
    for (namespace, pod), uid in pods.items():
        known = {"namespace": namespace, "pod": pod, "uid": uid}
        yield "kube_pod_labels", {**known, "label_app": re.sub(r"-\d+$", "", pod), "label_team": namespace}, 1
        yield "kube_pod_info", {**known, "node": node, "created_by_kind": "StatefulSet"}, 1
    limits: dict[tuple[str, str, str, str], float] = defaultdict(float)
    for labels, slots in (*samples["gpumap_allocation_slots"], *samples["gpumap_unmatched_slots"]):
        limits[labels["namespace"], labels["pod"], labels["container"], labels["resource"]] += slots
    for (namespace, pod, container, resource), slots in limits.items():
        whose = {"namespace": namespace, "pod": pod, "uid": pods.get((namespace, pod), ""), "container": container}
        of = {"node": node, "resource": sanitized(resource), "unit": "integer"}
        yield "kube_pod_container_resource_limits", {**whose, **of}, slots
        yield "kube_pod_container_resource_requests", {**whose, **of}, slots
    offered: dict[str, float] = defaultdict(float)
    for labels, slots in samples["gpumap_device_slots_allocatable"]:
        offered[labels["resource"]] += slots
    on_cards = frozenset(offered)
    for (*_, resource), slots in limits.items():
        if resource not in on_cards:  # ids that name no card: gpumap has them on none
            offered[resource] += slots
    for resource, slots in offered.items():
        of = {"node": node, "resource": sanitized(resource), "unit": "integer"}
        yield "kube_node_status_allocatable", of, slots
        yield "kube_node_status_capacity", of, slots


def sanitized(resource: str) -> str:
    """kube-state-metrics' form of a resource's name: nvidia_com_gpu."""
    return re.sub(r"\W", "_", resource)


DCGM = {
    "DCGM_FI_DEV_SM_CLOCK": "1980",
    "DCGM_FI_DEV_MEM_CLOCK": "2619",
    "DCGM_FI_DEV_GPU_TEMP": "51",
    "DCGM_FI_DEV_MEMORY_TEMP": "58",
    "DCGM_FI_DEV_POWER_USAGE": "310.5",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "7200000000",
    "DCGM_FI_DEV_GPU_UTIL": "71",
    "DCGM_FI_DEV_MEM_COPY_UTIL": "33",
    "DCGM_FI_DEV_ENC_UTIL": "0",
    "DCGM_FI_DEV_DEC_UTIL": "0",
    "DCGM_FI_DEV_XID_ERRORS": "0",
    "DCGM_FI_DEV_FB_FREE": "30000",
    "DCGM_FI_DEV_FB_USED": "51559",
    "DCGM_FI_DEV_FB_RESERVED": "512",
    "DCGM_FI_DEV_FB_TOTAL": "82071",
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": "1000",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "0.7",
    "DCGM_FI_PROF_SM_ACTIVE": "0.6",
    "DCGM_FI_PROF_SM_OCCUPANCY": "0.3",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "0.4",
    "DCGM_FI_PROF_DRAM_ACTIVE": "0.2",
    "DCGM_FI_PROF_PCIE_TX_BYTES": "150000000",
    "DCGM_FI_PROF_PCIE_RX_BYTES": "250000000",
}
"""Of every device, as before 4.9."""
UPGRADED = "older-node"
"""Where it is of 4.9 already: an upgrade goes from node to node."""


def dcgm_exporter(nodes: Mapping[str, str]) -> str:
    return page(row for node, url in nodes.items() for row in dcgm_rows(node, read(url)))


def dcgm_rows(node: str, samples: Samples) -> Iterator[Row]:
    holders = defaultdict(list)
    for labels, _ in samples["gpumap_allocation_info"]:
        holders[labels["uuid"]].append({name: labels[name] for name in ("container", "namespace", "pod")})
    values = {field: Decimal(value) for field, value in DCGM.items()}
    for labels, _ in samples["gpumap_device_info"]:
        held = sorted(holders[labels["uuid"]], key=lambda holder: tuple(holder.values()))
        parts = {field: values[field] / len(held) for field in dcgm.BY_PROCESS} if held else {}
        device = dcgm.Device(dcgm_labels(labels), values, tuple(dcgm.Slot(holder, parts) for holder in held))
        for name, of, value in dcgm.rows(device, node, since_4_9=node == UPGRADED):
            yield name, of, float(value)


def dcgm_labels(leaf: Labels) -> Labels:
    """A MIG device has its GPU's UUID."""
    instance = (
        {"GPU_I_PROFILE": leaf["mig_profile"], "GPU_I_ID": leaf["gpu_instance_id"]} if leaf["mig_profile"] else {}
    )
    return {
        "gpu": leaf["index"],
        "UUID": leaf["gpu_uuid"],
        "pci_bus_id": leaf["pci_bus_id"],
        "device": f"nvidia{leaf['minor']}",
        "modelName": leaf["model"],
        **instance,
    }


PAGES: Mapping[str, Callable[[Mapping[str, str]], str]] = {
    "kube-state-metrics": kube_state_metrics,
    "dcgm-exporter": dcgm_exporter,
}
"""By the exporter's name. Each is made of what the nodes say at that moment."""
