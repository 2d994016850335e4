"""The chart, rendered by a real helm: valid for Kubernetes, and never more privileged than contract.md §7 says."""

import json

import kubernetes_validate
import pytest
import yaml

import gpumap
from gpumap.flags import FLAGS
from gpumap.kubectl.agents import agents_of
from gpumap.kubectl.source import SELECTOR
from tests.chart import CHART, Manifest, container_of, helm, host_paths, pod_of, render

KUBERNETES_VERSION = "1.36"
BUILT_IN_KINDS = {"DaemonSet", "Service", "ServiceAccount"}

VARIATIONS: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "no checkpoint": ("privileges.checkpoint=false",),
    "no pod logs": ("privileges.podLogs=false",),
    "no hostPID": ("privileges.hostPID=false",),
    "map only": ("privileges.checkpoint=false", "privileges.podLogs=false", "privileges.hostPID=false"),
    "with DRA": ("privileges.dra=true",),
    "with the Pods API": ("privileges.podsApi=true",),
    "other kubelet root": ("kubelet.rootDir=/var/lib/k0s/kubelet",),
    "other kubelet root, and all": (
        "kubelet.rootDir=/var/lib/k0s/kubelet",
        "privileges.dra=true",
        "privileges.podsApi=true",
    ),
    "library from the node": ("nvml.hostPath=/run/nvidia/driver/usr/lib/x86_64-linux-gnu",),
    "service monitor": (
        "serviceMonitor.enabled=true",
        "serviceMonitor.scrapeTimeout=10s",
        "serviceMonitor.labels.release=prometheus",
        "serviceMonitor.relabelings[0].action=labeldrop",
        "serviceMonitor.relabelings[0].regex=endpoint",
        "serviceMonitor.metricRelabelings[0].action=drop",
        "serviceMonitor.metricRelabelings[0].sourceLabels={namespace}",
        "serviceMonitor.metricRelabelings[0].regex=kube-system",
    ),
    "scheduling": (
        "nodeSelector.accelerator=nvidia",
        "tolerations[0].operator=Exists",
        "runtimeClassName=nvidia",
        "priorityClassName=system-node-critical",
        "updateStrategy.type=OnDelete",
        "updateStrategy.rollingUpdate=null",
        "resources.limits.memory=1Gi",
        "imagePullSecrets[0].name=registry",
        "service.port=9500",
        "service.type=NodePort",
    ),
    "extras": (
        "extraArgs={--interval=10s,--dialect=native}",
        "extraEnv[0].name=GPUMAP_LOG_FORMAT",
        "extraEnv[0].value=json",
        "extraVolumes[0].name=web-config",
        "extraVolumes[0].secret.secretName=web-config",
        "extraVolumeMounts[0].name=web-config",
        "extraVolumeMounts[0].mountPath=/etc/gpumap",
        "extraVolumeMounts[0].readOnly=true",
        "podLabels.team=ml",
        "podAnnotations.note=hello",
    ),
    "nothing set": (
        "nodeSelector=null",
        "affinity=null",
        "tolerations=null",
        "resources=null",
        "podLabels=null",
        "podAnnotations=null",
        "extraArgs=null",
    ),
}


@pytest.fixture(params=VARIATIONS)
def manifests(request: pytest.FixtureRequest) -> dict[str, Manifest]:
    return render(*VARIATIONS[request.param])


def test_lint_has_nothing_to_say() -> None:
    """`helm lint --strict` passes."""
    done = helm("lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kubernetes_accepts_every_variation(manifests: dict[str, Manifest]) -> None:
    """Each built-in object fits the API's schema, unknown fields refused, and stands in the release's namespace."""
    for kind, manifest in manifests.items():
        assert manifest["metadata"]["namespace"] == "monitoring"
        if kind in BUILT_IN_KINDS:
            kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def test_only_what_is_asked_for_is_installed() -> None:
    """By default the chart makes a DaemonSet, a Service and a ServiceAccount, and nothing else."""
    assert render().keys() == BUILT_IN_KINDS


def test_no_variation_has_a_token_or_a_capability(manifests: dict[str, Manifest]) -> None:
    """No API token, no capability, no privileged container, no host network, a read-only root, in every variation."""
    pod, container = pod_of(manifests), container_of(manifests)
    assert manifests["ServiceAccount"]["automountServiceAccountToken"] is False
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"] == {"runAsUser": 0, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not pod.keys() & {"hostNetwork", "hostIPC", "initContainers"}


def test_every_mount_is_read_only_and_has_its_volume(manifests: dict[str, Manifest]) -> None:
    """Mounts and volumes correspond one to one; nothing of the node can be written; the kubelet's folder must exist."""
    mounts = container_of(manifests)["volumeMounts"]
    volumes = {volume["name"]: volume for volume in pod_of(manifests)["volumes"]}
    assert sorted(mount["name"] for mount in mounts) == sorted(volumes)
    assert {mount["name"] for mount in mounts if not mount.get("readOnly")} == {"tmp"}
    assert volumes["tmp"]["emptyDir"]["sizeLimit"]
    assert volumes["pod-resources"]["hostPath"]["type"] == "Directory"
    assert not any(path.endswith(".sock") for path in host_paths(manifests))


def test_the_whole_ladder_is_the_default() -> None:
    """By default the agent sees the kubelet's two folders, the logs' names and the node's processes."""
    manifests = render()
    assert pod_of(manifests)["hostPID"] is True
    assert host_paths(manifests) == {
        path: path
        for path in (
            "/var/lib/kubelet/pod-resources",
            "/var/lib/kubelet/device-plugins",
            "/var/log/pods",
            "/var/log/containers",
        )
    }


@pytest.mark.parametrize(
    ("step", "lost"),
    [
        ("checkpoint", {"/var/lib/kubelet/device-plugins"}),
        ("podLogs", {"/var/log/pods", "/var/log/containers"}),
        ("hostPID", set()),
    ],
)
def test_each_step_of_the_ladder_can_be_left_out(step: str, lost: set[str]) -> None:
    """A privilege that is switched off takes its own mounts or hostPID away, and nothing else."""
    manifests = render(f"privileges.{step}=false")
    assert host_paths(render()).keys() - host_paths(manifests).keys() == lost
    assert pod_of(manifests)["hostPID"] is (step != "hostPID")


def test_what_only_some_nodes_have_is_off_until_asked_for() -> None:
    """The DRA driver's folder is mounted where it is asked for, and nothing else is; it need not exist."""
    manifests = render("privileges.dra=true")
    assert host_paths(manifests).items() - host_paths(render()).items() == {
        ("/var/lib/kubelet/plugins/gpu.nvidia.com", "/var/lib/kubelet/plugins/gpu.nvidia.com")
    }
    volumes = {volume["name"]: volume for volume in pod_of(manifests)["volumes"]}
    assert volumes["dra-plugin"]["hostPath"]["type"] == "DirectoryOrCreate"
    assert container_of(manifests)["args"] == ["serve"]
    below = render("privileges.dra=true", "kubelet.rootDir=/var/lib/k0s/kubelet")
    assert "/var/lib/k0s/kubelet/plugins/gpu.nvidia.com" in host_paths(below)


@pytest.mark.parametrize("root", ["/var/lib/kubelet", "/var/lib/k0s/kubelet"])
def test_the_pods_api_is_asked_only_where_it_is_asked_for(root: str) -> None:
    """Its folder, never the socket itself; and a variable names the socket to every command in the container."""
    manifests = render("privileges.podsApi=true", f"kubelet.rootDir={root}")
    assert host_paths(manifests).items() - host_paths(render(f"kubelet.rootDir={root}")).items() == {
        (f"{root}/pods-api", f"{root}/pods-api")
    }
    told = {"name": "GPUMAP_PODS_API_SOCKET", "value": f"{root}/pods-api/pods-api.sock"}
    assert told in container_of(manifests)["env"]
    assert "GPUMAP_PODS_API_SOCKET" not in {one["name"] for one in container_of(render())["env"]}


def test_no_variation_mounts_the_kubelets_root(manifests: dict[str, Manifest]) -> None:
    """It has every pod's Secrets in it; a file in it, such as dra_manager_state, would go stale when it is replaced."""
    below = {path.partition("/kubelet")[2] for path in host_paths(manifests) if "/kubelet" in path}
    assert below <= {"/pod-resources", "/device-plugins", "/plugins/gpu.nvidia.com", "/pods-api"}


def test_another_kubelet_root_is_told_and_mounted_at_its_own_path() -> None:
    """The variable and the mounts name the same folder; the checkpoint's hard-coded folder is mounted too."""
    manifests = render("kubelet.rootDir=/var/lib/k0s/kubelet")
    assert {"name": "GPUMAP_KUBELET_ROOT", "value": "/var/lib/k0s/kubelet"} in container_of(manifests)["env"]
    paths = host_paths(manifests)
    assert {path for path in paths if "kubelet" in path} == {
        "/var/lib/k0s/kubelet/pod-resources",
        "/var/lib/k0s/kubelet/device-plugins",
        "/var/lib/kubelet/device-plugins",
    }
    assert all(path == mounted_at for path, mounted_at in paths.items())


def test_settings_are_given_only_where_values_deviate() -> None:
    """With default values the agent runs with its own defaults, and learns its node from the downward API."""
    container = container_of(render())
    assert container["args"] == ["serve"]
    assert container["image"] == f"gpumap:{gpumap.__version__}"
    environment = {variable["name"]: variable for variable in container["env"]}
    assert not [name for name in environment if name.startswith("GPUMAP_")]
    assert environment["NODE_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
    assert environment["NODE_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.hostIP"
    assert environment["NVIDIA_VISIBLE_DEVICES"]["value"] == "all"
    assert environment["NVIDIA_DRIVER_CAPABILITIES"]["value"] == "utility"


def test_a_service_named_gpumap_sets_no_flag() -> None:
    """Kubernetes' variables for services (GPUMAP_PORT and the like) stay out of the agent's environment."""
    assert pod_of(render())["enableServiceLinks"] is False


@pytest.mark.parametrize(
    ("library", "host_path", "flag"),
    [
        ("/usr/local/nvidia/lib64/libnvidia-ml.so.1", "", "/usr/local/nvidia/lib64/libnvidia-ml.so.1"),
        ("", "/opt/nvidia", "/nvml/libnvidia-ml.so.1"),
        ("libnvidia-ml.so.570.1", "/opt/nvidia", "/nvml/libnvidia-ml.so.570.1"),
        ("/nvml/lib64/libnvidia-ml.so.1", "/opt/nvidia", "/nvml/lib64/libnvidia-ml.so.1"),
    ],
)
def test_the_library_can_come_from_the_node(library: str, host_path: str, flag: str) -> None:
    """nvml.library and nvml.hostPath end in one variable; the node's folder is mounted apart from /usr/lib."""
    manifests = render(f"nvml.library={library}", f"nvml.hostPath={host_path}")
    assert {"name": "GPUMAP_NVML_LIBRARY", "value": flag} in container_of(manifests)["env"]
    assert host_paths(manifests).get("/opt/nvidia") == ("/nvml" if host_path else None)


def test_extra_arguments_follow_the_charts_own() -> None:
    """extraArgs, extraEnv, extraVolumes and extraVolumeMounts reach the pod as they are."""
    manifests = render(*VARIATIONS["extras"])
    container = container_of(manifests)
    assert container["args"] == ["serve", "--interval=10s", "--dialect=native"]
    assert {"name": "GPUMAP_LOG_FORMAT", "value": "json"} in container["env"]
    assert {"name": "web-config", "secret": {"secretName": "web-config"}} in pod_of(manifests)["volumes"]


def test_a_digest_wins_over_the_tag() -> None:
    """An image named by digest is pulled by digest."""
    digest = "sha256:" + 64 * "a"
    image = container_of(render("image.tag=1.2", f"image.digest={digest}"))["image"]
    assert image == f"gpumap@{digest}"


def test_pod_labels_cannot_break_the_selectors() -> None:
    """DaemonSet, Service and ServiceMonitor find the agent's pods whatever podLabels say."""
    manifests = render(r"podLabels.app\.kubernetes\.io/name=other", "serviceMonitor.enabled=true", release="prod")
    labels = manifests["DaemonSet"]["spec"]["template"]["metadata"]["labels"].items()
    assert manifests["DaemonSet"]["spec"]["selector"]["matchLabels"].items() <= labels
    assert manifests["Service"]["spec"]["selector"].items() <= labels
    service_labels = manifests["Service"]["metadata"]["labels"].items()
    assert manifests["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items() <= service_labels
    assert manifests["DaemonSet"]["metadata"]["name"] == "prod-gpumap"


def test_ports_and_probes_agree() -> None:
    """Service, probes and container name one port, 9401; the service's own port can differ."""
    manifests = render("service.port=9500")
    container = container_of(manifests)
    assert container["ports"] == [{"name": "metrics", "containerPort": 9401}]
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    assert manifests["Service"]["spec"]["ports"] == [{"name": "metrics", "port": 9500, "targetPort": "metrics"}]
    assert render()["Service"]["spec"]["ports"][0]["port"] == 9401


@pytest.mark.parametrize("values", [(), ("service.port=9500",), (r"podLabels.app\.kubernetes\.io/name=other",)])
def test_the_plugin_finds_the_charts_agents(values: tuple[str, ...]) -> None:
    """By the label and the port's name that the chart gives its pods; without a port it asks at gpumap's own."""
    template = render(*values, release="prod")["DaemonSet"]["spec"]["template"]
    name, _, value = SELECTOR.partition("=")
    assert template["metadata"]["labels"][name] == value
    (port,) = template["spec"]["containers"][0]["ports"]
    port["containerPort"] = 9500
    metadata = {**template["metadata"], "name": "prod-gpumap-x", "namespace": "monitoring"}
    pod = {"metadata": metadata, "spec": {**template["spec"], "nodeName": "gpu-1"}, "status": {"phase": "Running"}}
    (agent,) = agents_of([pod])
    assert (agent.node, agent.port, agent.https, agent.why_not) == ("gpu-1", 9500, False, "")
    port["name"] = "other"
    (agent,) = agents_of([pod])
    assert f":{agent.port}" == next(flag.default for flag in FLAGS if flag.name == "--listen")


def test_the_service_monitor_keeps_our_labels_and_adds_the_node() -> None:
    """Series keep the namespace, pod and container they are about, and get the node's name."""
    monitor = render(*VARIATIONS["service monitor"])["ServiceMonitor"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["endpoints"] == [
        {
            "port": "metrics",
            "path": "/metrics",
            "interval": "15s",
            "scrapeTimeout": "10s",
            "honorLabels": True,
            "relabelings": [
                {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"},
                {"action": "labeldrop", "regex": "endpoint"},
            ],
            "metricRelabelings": [{"action": "drop", "sourceLabels": ["namespace"], "regex": "kube-system"}],
        }
    ]


@pytest.mark.parametrize(
    "mistake",
    [
        "hostPID=false",
        "privileges.hostPid=false",
        "privileges.hostPID=maybe",
        "privileges.dra=on",
        "privileges.podsapi=true",
        "kubelet.rootdir=/var/lib/k0s/kubelet",
        "kubelet.rootDir=/var/lib/kubelet/",
        "kubelet.rootDir=kubelet",
        "serviceMonitor.intervall=30s",
        "serviceMonitor.interval=30",
        "image.digest=latest",
        "service.port=0",
        "extraArgs=--interval=10s",
    ],
)
def test_a_mistake_in_the_values_is_refused(mistake: str) -> None:
    """A value that is misspelt or of the wrong shape stops the installation, and is named."""
    done = helm("template", "gpumap", CHART, "--set", mistake)
    assert done.returncode != 0
    assert mistake.partition("=")[0].rpartition(".")[2] in done.stderr


def test_the_schema_knows_exactly_the_documented_values() -> None:
    """values.yaml and values.schema.json name the same values."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert values.keys() == schema.keys() - {"global"}
    for name, part in schema.items():
        if "properties" in part:
            assert values[name].keys() == part["properties"].keys(), name


@pytest.mark.parametrize(
    ("version", "accepted"), [("v1.26.9", False), ("v1.27.0", True), ("v1.30.5-gke.1443001", True)]
)
def test_kubernetes_versions(version: str, accepted: bool) -> None:
    """Kubernetes 1.27 and later is accepted, also with a vendor's suffix; older is refused."""
    done = helm("template", "gpumap", CHART, "--kube-version", version)
    assert (done.returncode == 0) is accepted, done.stderr


def test_the_charts_app_is_this_version() -> None:
    """The chart installs the version of gpumap that it stands beside."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == gpumap.__version__
