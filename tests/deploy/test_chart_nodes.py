"""Where the chart's pods run, decided as Kubernetes decides it: by affinity, selector and tolerations."""

import json
from collections.abc import Mapping

import pytest

from tests.deploy.chart import CHART, helm, pod_of, render, settings
from tests.deploy.chart_variations import VARIATIONS

NFD = "feature.node.kubernetes.io"
CLIENT = "nvidia.com/gpu.deploy.client"
EXPORTER = "nvidia.com/gpu.deploy.dcgm-exporter"
REQUIRED = "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
APART = "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[0]"

GPU_NODES: dict[str, Mapping[str, str]] = {
    "GPU operator": {"nvidia.com/gpu.present": "true", CLIENT: "true", EXPORTER: "true"},
    "GPU feature discovery": {"nvidia.com/gpu.count": "8", "nvidia.com/gpu.product": "NVIDIA-H100"},
    "NFD by vendor": {f"{NFD}/pci-10de.present": "true"},
    "NFD by class, a display": {f"{NFD}/pci-0300_10de.present": "true"},
    "NFD by class, no display": {f"{NFD}/pci-0302_10de.present": "true"},
    "GKE": {"cloud.google.com/gke-accelerator": "nvidia-l4", "cloud.google.com/gke-nodepool": "gpu"},
    "Karpenter on AWS": {"karpenter.k8s.aws/instance-gpu-manufacturer": "nvidia"},
    "EKS Auto Mode": {"eks.amazonaws.com/instance-gpu-manufacturer": "nvidia"},
    "EKS node group": {"k8s.amazonaws.com/accelerator": "nvidia-tesla-t4"},
    "AKS": {"kubernetes.azure.com/accelerator": "nvidia", "accelerator": "nvidia"},
    "AKS of old": {"accelerator": "nvidia"},
    "Karpenter on Azure": {"karpenter.azure.com/sku-gpu-manufacturer": "nvidia"},
    "DigitalOcean": {"doks.digitalocean.com/gpu-brand": "nvidia"},
    "IBM Cloud": {"ibm-cloud.kubernetes.io/gpu-enabled": "true"},
    "Aliyun ACK": {"aliyun.accelerator/nvidia_name": "NVIDIA-A10"},
    "gpushare": {"gpushare": "true"},
    "tkestack": {"nvidia-device-enable": "enable"},
    "HAMi": {"gpu": "on"},
    "by hand": {"gpu": "true", "gpu-type": "V100"},
}
OTHER_NODES: dict[str, Mapping[str, str]] = {
    "no label": {"kubernetes.io/os": "linux", "node-role.kubernetes.io/worker": ""},
    "its GPU was taken out": {"nvidia.com/gpu.present": "false", "nvidia.com/gpu.count": "0"},
    "AMD's": {"doks.digitalocean.com/gpu-brand": "amd", f"{NFD}/pci-1002.present": "true"},
    "AMD's, by Karpenter": {"karpenter.k8s.aws/instance-gpu-manufacturer": "amd"},
    "TPU": {"cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice"},
    "not for HAMi": {"gpu": "off"},
}
PAUSED = ("paused-for-driver-upgrade", "paused-for-mig-change", "paused-for-vgpu-change", "false")


def holds(expression: Mapping[str, object], labels: Mapping[str, str]) -> bool:
    """One requirement of a node selector, as Kubernetes understands it (core/v1 NodeSelectorOperator)."""
    value, values = labels.get(str(expression["key"])), expression.get("values", [])
    assert isinstance(values, list)
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and int(value) > int(values[0])
    raise AssertionError(expression)


def runs_on(labels: Mapping[str, str], *values: str) -> bool:
    """Whether a node with these labels gets a pod and keeps it: the DaemonSet's controller asks at each change."""
    labels = {"kubernetes.io/os": "linux", **labels}
    pod = pod_of(render(*values))
    required = pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = required["nodeSelectorTerms"] if required else [{"matchExpressions": []}]
    affine = any(all(holds(one, labels) for one in term["matchExpressions"]) for term in terms)
    return affine and pod.get("nodeSelector", {}).items() <= labels.items()


@pytest.mark.parametrize("node", GPU_NODES)
def test_gpu_nodes_are_known_by_any_of_their_labels(node: str) -> None:
    """One label of anybody who labels GPU nodes is enough, beside others that say nothing."""
    assert runs_on(GPU_NODES[node])
    assert not runs_on({**GPU_NODES[node], "kubernetes.io/os": "windows"})


@pytest.mark.parametrize("node", OTHER_NODES)
def test_other_nodes_get_no_agent(node: str) -> None:
    """A node without an NVIDIA GPU gets one only where every node shall."""
    assert not runs_on(OTHER_NODES[node])
    assert runs_on(OTHER_NODES[node], "gpuNodesOnly=false")


@pytest.mark.parametrize("value", PAUSED)
@pytest.mark.parametrize(
    "values", [(), ("gpuNodesOnly=false",), ("nodeSelector.pool=a",), (f"{REQUIRED}[0].matchExpressions[0].key=pool",)]
)
def test_the_agent_leaves_a_node_whose_driver_is_taken_away(value: str, values: tuple[str, ...]) -> None:
    """The GPU operator pauses GPU clients by a label, whoever chose the nodes; without that label nothing changes."""
    if values and "affinity" in values[0]:
        values = (*values, values[0].replace("key=pool", "operator=Exists"))
    node = {"nvidia.com/gpu.present": "true", "pool": "a"}
    assert runs_on(node, *values)
    assert runs_on({**node, CLIENT: "true"}, *values)
    assert not runs_on({**node, CLIENT: value}, *values)
    assert runs_on({**node, CLIENT: value}, *values, "gpuOperator.followClient=false")


@pytest.mark.parametrize("values", [(), ("gpuNodesOnly=false",), ("nodeSelector.pool=a",)])
def test_the_agent_can_follow_dcgm_exporter(values: tuple[str, ...]) -> None:
    """Where asked for, it runs while the node has dcgm-exporter's label, which older operators take away."""
    node = {"nvidia.com/gpu.present": "true", "pool": "a"}
    follow = "gpuOperator.followDcgmExporter=true"
    assert runs_on({**node, EXPORTER: "true"}, *values, follow)
    assert not runs_on({**node, EXPORTER: "paused-for-driver-upgrade"}, *values, follow)
    assert not runs_on(node, *values, follow)
    assert runs_on(node, *values)


def test_who_chooses_nodes_says_it_all() -> None:
    """nodeSelector and affinity take the place of the known labels; the rest of an affinity is left as it is."""
    assert runs_on({"pool": "a"}, "nodeSelector.pool=a")
    assert not runs_on({"nvidia.com/gpu.present": "true"}, "nodeSelector.pool=a")
    chosen = f"{REQUIRED}[0].matchExpressions[0].key=pool", f"{REQUIRED}[0].matchExpressions[0].operator=Exists"
    assert runs_on({"pool": "b"}, *chosen)
    assert not runs_on({"nvidia.com/gpu.present": "true"}, *chosen)


@pytest.mark.parametrize(
    "values",
    [VARIATIONS["rather on some nodes"], (f"{APART}.topologyKey=kubernetes.io/hostname",)],
    ids=["a preference", "other pods"],
)
def test_what_requires_no_node_chooses_none(values: tuple[str, ...]) -> None:
    """A preference, and terms about other pods, are beside the known labels."""
    given = pod_of(render(*values))["affinity"]
    assert "preferredDuringSchedulingIgnoredDuringExecution" in given["nodeAffinity"] or "podAntiAffinity" in given
    assert runs_on({"nvidia.com/gpu.present": "true"}, *values)
    assert not runs_on({"pool": "a"}, *values)
    assert runs_on({"pool": "a"}, *values, "gpuNodesOnly=false")


def test_alternatives_stay_alternatives() -> None:
    """Each term of an affinity of one's own is kept, with the pause added to it."""
    terms = [{"matchExpressions": [{"key": key, "operator": "Exists"}]} for key in ("a", "b")]
    value = (
        f"affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms={json.dumps(terms)}"
    )
    done = helm("template", "gpumap", CHART, *settings(()), "--set-json", value)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(CLIENT) == 2


@pytest.mark.parametrize(
    ("taint", "tolerated"),
    [
        ({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}, True),
        ({"key": "nvidia.com/gpu", "value": "true", "effect": "NoExecute"}, True),
        ({"key": "sku", "value": "gpu", "effect": "NoSchedule"}, True),
        ({"key": "dedicated", "value": "training", "effect": "NoSchedule"}, True),
        ({"key": "dedicated", "value": "training", "effect": "NoExecute"}, False),
    ],
    ids=lambda one: "=".join((one["key"], one["value"])) if isinstance(one, dict) else "",
)
def test_the_taints_of_gpu_nodes_are_tolerated(taint: Mapping[str, str], tolerated: bool) -> None:
    """GKE, EKS and others taint GPU nodes nvidia.com/gpu, AKS's example sku=gpu; others choose names of their own.

    A taint with NoExecute of another name says that pods must leave.
    """
    found = any(
        one.get("key", taint["key"]) == taint["key"]
        and one.get("effect", taint["effect"]) == taint["effect"]
        and (one["operator"] == "Exists" or one.get("value") == taint["value"])
        for one in pod_of(render())["tolerations"]
    )
    assert found is tolerated
