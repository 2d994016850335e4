"""The chart as a whole, rendered by a real helm: what it makes, and what it is called."""

import base64
import json
import re
from importlib import resources

import pytest
import yaml

import gpumap
from gpumap.agent.flags import FLAGS
from gpumap.cli.sources.kubectl import SELECTOR
from gpumap.cli.sources.kubectl_agents import agents_of
from tests.deploy.chart import CHART, Manifest, helm, refusal, render, render_all, settings
from tests.deploy.chart_variations import EVERYTHING, RENDERED, VARIATIONS
from tests.deploy.rendered import FOLDER, manifests, path_of
from tests.shells.api_server import listed

AREAS = {
    "ServiceMonitor": "serviceMonitor",
    "PodMonitor": "podMonitor",
    "PrometheusRule": "prometheusRule",
    "ConfigMap": "dashboards",
}
"""The kinds that have a namespace of their own, and the head of their values."""
OFTEN = (
    "values",
    [(), ("service.port=9500",), (r"podLabels.app\.kubernetes\.io/name=other",), ("nameOverride=a-gpumap",)],
)


@pytest.mark.parametrize("values", [(), EVERYTHING], ids=["defaults", "everything"])
def test_lint_has_nothing_to_say(values: tuple[str, ...]) -> None:
    done = helm("lint", "--strict", CHART, *settings(values))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"\[(INFO|WARNING|ERROR)\]", done.stdout), done.stdout


@pytest.mark.parametrize("variation", VARIATIONS)
def test_every_object_is_in_the_releases_namespace(variation: str) -> None:
    """Except objects with a namespace of their own, and OpenShift's constraints, which belong to the cluster."""
    values = dict(value.split("=", 1) for value in VARIATIONS[variation])
    common = values.get("namespaceOverride", "monitoring")
    for manifest in render_all(*VARIATIONS[variation]):
        if manifest["kind"] == "SecurityContextConstraints":
            assert manifest["metadata"]["name"].startswith(f"{common}-")
        else:
            own = values.get(f"{AREAS.get(manifest['kind'], '')}.namespace", common)
            assert manifest["metadata"]["namespace"] == own, manifest["kind"]


@pytest.mark.parametrize("variation", RENDERED)
def test_the_chart_renders_the_reviewed_manifests(variation: str) -> None:
    """Byte for byte: `make golden` writes the files again."""
    assert manifests(variation) == path_of(variation).read_text(encoding="utf-8")


def test_each_reviewed_file_has_its_values() -> None:
    assert {*FOLDER.iterdir()} == {path_of(variation) for variation in RENDERED}


def test_no_name_of_the_release_remains_after_a_namespace_override() -> None:
    """Names of the Service in certificates and in the test, and the constraints' account, have the new namespace."""
    manifests = render_all("namespaceOverride=gpu", "tls.secretName=certificate", *EVERYTHING)
    text = json.dumps([manifest for manifest in manifests if manifest["kind"] not in ("PrometheusRule", "ConfigMap")])
    assert "monitoring" not in text.replace("monitoring.coreos.com", "")
    assert "gpumap.gpu.svc" in text
    assert "system:serviceaccount:gpu:gpumap" in text


def test_a_string_of_extra_objects_is_a_template() -> None:
    """An object is taken as it is, braces included: they may be Alertmanager's."""
    values = (
        "extraObjects[0].kind=ConfigMap,extraObjects[0].apiVersion=v1,extraObjects[0].metadata.name=a-{{ a }}",
        "extraObjects[1]=kind: Secret\napiVersion: v1\nmetadata:\n  name: {{ .Release.Name }}-more",
    )
    names = {one["kind"]: one["metadata"]["name"] for one in render_all(*values, "tests.enabled=false", release="prod")}
    assert (names["ConfigMap"], names["Secret"]) == ("a-{{ a }}", "prod-more")


def test_without_a_service_there_is_no_test() -> None:
    """`helm test` asks the Service."""
    assert {one["kind"] for one in render_all("service.enabled=false")} == {"DaemonSet", "ServiceAccount"}


def test_an_image_is_required() -> None:
    """Without a name of it the installation stops, with one sentence."""
    said = refusal("image.repository=")
    assert "image.repository is empty: set it to an image" in said
    assert "schema" not in said


@pytest.mark.parametrize(
    ("values", "name", "made"),
    [
        ((), "gpumap", True),
        (("serviceAccount.name=agent",), "agent", True),
        (("serviceAccount.create=false",), "default", False),
        (("serviceAccount.create=false", "serviceAccount.name=agent"), "agent", False),
    ],
)
def test_the_pods_have_the_named_service_account(values: tuple[str, ...], name: str, made: bool) -> None:
    """Made by the chart or not; without a token either way."""
    manifests = render(*values, "openshift.securityContextConstraints=true")
    pod = manifests["DaemonSet"]["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (name, False)
    assert manifests["SecurityContextConstraints"]["users"] == [f"system:serviceaccount:monitoring:{name}"]
    assert ("ServiceAccount" in manifests) is made
    assert not made or manifests["ServiceAccount"]["metadata"]["name"] == name


@pytest.mark.parametrize(
    ("release", "values", "name"),
    [
        ("gpumap", (), "gpumap"),
        ("prod", (), "prod-gpumap"),
        ("prod", ("nameOverride=gpumap-agents",), "prod-gpumap-agents"),
        ("gpumap-agents", ("nameOverride=gpumap",), "gpumap-agents"),
        ("prod", ("fullnameOverride=the-gpumap",), "the-gpumap"),
        ("r" * 53, (), "r" * 53 + "-gpumap"),
    ],
)
def test_every_name_is_the_releases(release: str, values: tuple[str, ...], name: str) -> None:
    """Each object has the release's full name, or begins with it: two releases in one namespace share none."""
    manifests = render_all(*values, *EVERYTHING, "tls.secretName=certificate", "tests.enabled=false", release=release)
    for manifest in manifests:
        found = manifest["metadata"]["name"].removeprefix("monitoring-")
        assert found == name or found.startswith(f"{name}-"), manifest["kind"]
    pods = render(*values, release=release)["DaemonSet"]["spec"]["template"]
    assert pods["metadata"]["labels"]["app.kubernetes.io/instance"] == release
    assert pods["spec"]["serviceAccountName"] == name


def test_the_longest_name_is_that_of_a_label() -> None:
    """Names that must fit a label's value do, however long the override is."""
    assert "fullnameOverride" in refusal(f"fullnameOverride=gpumap-{'a' * 57}")
    manifests = render(f"nameOverride=gpumap-{'a' * 56}", release="r" * 53)
    assert len(manifests["Service"]["metadata"]["name"]) == 63


@pytest.mark.parametrize(*OFTEN)
def test_the_selectors_find_the_pods(values: tuple[str, ...]) -> None:
    """DaemonSet, Service and both monitors find the agent's pods, whatever podLabels, commonLabels and names say."""
    common = r"commonLabels.app\.kubernetes\.io/instance=other"
    manifests = render(*values, common, "serviceMonitor.enabled=true", release="prod")
    manifests |= render(*values, common, "podMonitor.enabled=true", release="prod")
    labels = manifests["DaemonSet"]["spec"]["template"]["metadata"]["labels"].items()
    assert manifests["DaemonSet"]["spec"]["selector"]["matchLabels"].items() <= labels
    assert manifests["Service"]["spec"]["selector"].items() <= labels
    assert manifests["PodMonitor"]["spec"]["selector"]["matchLabels"].items() <= labels
    service_labels = manifests["Service"]["metadata"]["labels"].items()
    assert manifests["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items() <= service_labels


def agent_pod(manifests: dict[str, Manifest]) -> Manifest:
    template: Manifest = manifests["DaemonSet"]["spec"]["template"]
    metadata = {**template["metadata"], "name": "prod-gpumap-x", "namespace": "monitoring"}
    return {"metadata": metadata, "spec": {**template["spec"], "nodeName": "gpu-1"}, "status": {"phase": "Running"}}


@pytest.mark.parametrize(*OFTEN)
def test_the_plugin_finds_the_charts_agents(values: tuple[str, ...]) -> None:
    """By the label and the port's name that the chart gives its pods; without a port it asks at gpumap's own."""
    pod = agent_pod(render(*values, release="prod"))
    name, _, value = SELECTOR.partition("=")
    assert pod["metadata"]["labels"][name] == value
    (port,) = pod["spec"]["containers"][0]["ports"]
    port["containerPort"] = 9500
    (agent,) = agents_of(listed(pod))
    assert (agent.node, agent.port, agent.https, agent.why_not) == ("gpu-1", 9500, False, "")
    port["name"] = "other"
    (agent,) = agents_of(listed(pod))
    assert f":{agent.port}" == next(flag.default for flag in FLAGS if flag.name == "--listen")


@pytest.mark.parametrize("values", [("tls.secretName=a",), ("webConfig.secretName=a", "webConfig.tls=true")])
def test_the_plugin_sees_that_an_agent_speaks_tls(values: tuple[str, ...]) -> None:
    """By the scheme of its probes."""
    (agent,) = agents_of(listed(agent_pod(render(*values))))
    assert agent.https


NO_NODES = "DESIRED 0"


@pytest.mark.parametrize(
    ("values", "said", "not_said"),
    [
        ((), (NO_NODES, "enforce=privileged", "serviceMonitor.enabled=true"), ("followDcgmExporter",)),
        (("gpuNodesOnly=false",), ("every node",), (NO_NODES,)),
        (("nodeSelector.gpu=h100",), ("your nodeSelector",), (NO_NODES,)),
        (("gpuOperator.followDcgmExporter=true",), ("nvidia.com/gpu.deploy.dcgm-exporter",), ()),
        (("podMonitor.enabled=true",), ("podMonitor.labels",), ("serviceMonitor", "1000")),
        (
            ("serviceMonitor.enabled=true",),
            ("1000", "commonLabels.release=", "serviceMonitor.labels", "prometheusRule.labels"),
            (),
        ),
        (("serviceMonitor.enabled=true", "commonLabels.release=a"), (), ("kube-prometheus-stack",)),
        (
            ("tls.secretName=certificate",),
            ("page of the node NODE at https://127.0.0.1:9401/", "spec.nodeName=NODE"),
            (),
        ),
        (("port=9500",), ("at http://127.0.0.1:9401/", "port-forward $POD 9401:9500"), ()),
        (("serviceMonitor.enabled=true", "serviceMonitor.serviceDiscoveryRole=EndpointSlice"), (), ("1000",)),
        (("serviceMonitor.labels.release=a", "prometheusRule.labels.release=a"), (), ("kube-prometheus-stack",)),
        (VARIATIONS["rather on some nodes"], (NO_NODES,), ("your nodeSelector",)),
        (("privileges.hostPID=false",), ("hostPath", "privileges.dra=true"), ("hostPID",)),
        (("privileges.dra=true",), (), ("privileges.dra",)),
    ],
)
def test_the_notes_tell_what_is_next(values: tuple[str, ...], said: tuple[str, ...], not_said: tuple[str, ...]) -> None:
    """`helm install` ends with what to do where no pod comes up, and what is not switched on yet."""
    done = helm("install", "prod", CHART, "--dry-run=client", "--namespace", "gpu", *settings(values))
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "kubectl --namespace gpu exec daemonset/prod-gpumap -- gpumap doctor" in notes
    assert all(words in notes for words in said)
    assert not any(words in notes for words in not_said)
    assert "\n\n\n" not in notes


@pytest.mark.parametrize(
    ("version", "accepted"), [("v1.26.9", False), ("v1.27.0", True), ("v1.30.5-gke.1443001", True)]
)
def test_kubernetes_versions(version: str, accepted: bool) -> None:
    """Kubernetes 1.27 and later is accepted, also with a vendor's suffix; older is refused."""
    done = helm("template", "gpumap", CHART, "--kube-version", version, *settings(()))
    assert (done.returncode == 0) is accepted, done.stderr


def test_the_charts_app_is_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == gpumap.__version__


def test_the_icon_is_gpumaps() -> None:
    """The icon is in the chart itself and is the page's. Nothing is fetched for it."""
    icon = yaml.safe_load((CHART / "Chart.yaml").read_text())["icon"]
    page = resources.files("gpumap.agent.web") / "page" / "icon.svg"
    assert base64.b64decode(icon.removeprefix("data:image/svg+xml;base64,")) == page.read_bytes()
