"""The chart's pod: never more privileged than docs/explanation/security.md says. What values change in it."""

import argparse

import pytest
import yaml

import gpumap
from gpumap.agent.flags import ALL_DIALECTS, FLAGS, add_flags
from gpumap.agent.metrics import GROUPS
from gpumap.agent.settings import resolve
from gpumap.cli.credentials import URL_VARIABLE
from tests.deploy.chart import (
    CHART,
    OLDEST,
    Manifest,
    container_of,
    helm,
    host_paths,
    pod_of,
    render,
    render_all,
    settings,
)
from tests.deploy.chart_variations import VARIATIONS

SCALARS = ("123", "true", "1e3", "null")
"""Names that YAML reads as something else if they have no quotes."""


LOOSENED = ("security contexts", "more of one's own", "the node's network")
"""Variations that give the pod what it does not have otherwise."""


@pytest.fixture(params=VARIATIONS)
def manifests(request: pytest.FixtureRequest) -> dict[str, Manifest]:
    return {one["kind"]: one for one in render_all(*VARIATIONS[request.param])}


@pytest.mark.parametrize("variation", [name for name in VARIATIONS if name not in LOOSENED])
def test_no_variation_has_a_token_or_a_capability(variation: str) -> None:
    """No API token, no capability, no privileged container, no host network, a read-only root, unless asked for."""
    manifests = {one["kind"]: one for one in render_all(*VARIATIONS[variation])}
    pod, container = pod_of(manifests), container_of(manifests)
    assert manifests.get("ServiceAccount", {}).get("automountServiceAccountToken", False) is False
    assert pod["automountServiceAccountToken"] is False
    security = {name: value for name, value in pod["securityContext"].items() if name != "seLinuxOptions"}
    assert security == {"runAsUser": 0, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not pod.keys() & {"hostNetwork", "hostIPC", "initContainers"}


def test_every_mount_is_read_only_and_has_its_volume(manifests: dict[str, Manifest]) -> None:
    """Mounts and volumes correspond one to one; no folder of the node can be written; the kubelet's folder
    must exist."""
    mounts = {mount["name"]: mount for mount in container_of(manifests)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod_of(manifests)["volumes"]}
    assert len(mounts) == len(container_of(manifests)["volumeMounts"])
    assert sorted(mounts) == sorted(volumes)
    assert {name for name, mount in mounts.items() if not mount.get("readOnly")} - {"more"} <= {"tmp"}
    assert volumes["tmp"]["emptyDir"]["sizeLimit"]
    assert volumes["pod-resources"]["hostPath"]["type"] == "Directory"
    assert not any(path.endswith(".sock") for path in host_paths(manifests))
    assert not any("subPath" in mount for mount in mounts.values())


def test_no_variation_mounts_the_kubelets_root(manifests: dict[str, Manifest]) -> None:
    """It has every pod's Secrets in it; a file in it, such as dra_manager_state, would go stale when it is replaced."""
    below = {path.partition("/kubelet")[2] for path in host_paths(manifests) if "/kubelet" in path}
    assert below <= {"/pod-resources", "/device-plugins", "/plugins/gpu.nvidia.com", "/pods-api"}


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


def test_gpumap_knows_every_flag_and_variable_that_it_is_given(manifests: dict[str, Manifest]) -> None:
    """What the chart writes is spelt as `gpumap serve` reads it, or a command in the pod."""
    container = container_of(manifests)
    command, *flags = container["args"]
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_flags(parser)
    parser.parse_args(flags)
    assert command == "serve"
    variables = {one["name"] for one in container["env"] if one["name"].startswith("GPUMAP_")}
    assert variables <= {URL_VARIABLE, *(flag.variable for flag in FLAGS)}


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


def test_flags_have_values_of_their_own() -> None:
    """interval, dialects, native and collect are flags of `serve`, in front of extraArgs, which win."""
    dialects = ALL_DIALECTS
    container = container_of(
        render(
            "interval=10s",
            f"dialects={{{','.join(dialects)}}}",
            "native=false",
            f"collect={{{','.join(GROUPS)}}}",
            "extraArgs={--interval=20s}",
        )
    )
    assert container["args"] == [
        "serve",
        "--interval=10s",
        *(f"--dialect={name}" for name in dialects),
        "--no-native",
        *(f"--collect={name}" for name in GROUPS),
        "--interval=20s",
    ]


@pytest.mark.parametrize(("interval", "told"), [("30s", ""), ("31s", "62s"), ("2m", "240s"), ("1m1ms", "121s")])
def test_data_may_be_two_collections_old(interval: str, told: str) -> None:
    """gpumap does not start where data would be too old before the next collection: a long interval brings its own."""
    flags = container_of(render(f"interval={interval}"))["args"]
    assert [flag.removeprefix("--stale-after=") for flag in flags if "stale" in flag] == ([told] if told else [])
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_flags(parser)
    assert resolve(parser.parse_args(flags[1:]), {}).interval_seconds > 0


def test_an_annotation_of_ones_own_takes_the_place_of_the_charts() -> None:
    key = "kubectl.kubernetes.io/default-container"
    done = helm("template", "gpumap", CHART, *settings((rf"podAnnotations.{key.replace('.', chr(92) + '.')}=other",)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(key) == 1
    assert f"{key}: other" in done.stdout


@pytest.mark.parametrize(
    ("values", "image"),
    [
        (("image.registry=docker.io/",), "docker.io/gpumap"),
        (("global.imageRegistry=mirror.example.com/hub",), "mirror.example.com/hub/gpumap"),
        (("image.registry=docker.io", "global.imageRegistry=mirror.example.com/"), "mirror.example.com/gpumap"),
    ],
)
def test_a_registry_stands_in_front(values: tuple[str, ...], image: str) -> None:
    """A parent chart's replaces the chart's own."""
    assert container_of(render(*values))["image"] == f"{image}:{gpumap.__version__}"


@pytest.mark.parametrize("name", SCALARS)
def test_a_name_stays_a_name(name: str) -> None:
    """A release, a namespace, a runtime class, a priority or a Secret may be called what YAML takes for a number."""
    values = (
        "fullnameOverride=gpumap",
        f"nvml.hostPath=/opt/{name} # a",
        "serviceMonitor.enabled=true",
        "networkPolicy.enabled=true",
        "networkPolicy.from[0].podSelector.matchLabels.app=a",
    )
    strings = ("--set-string", f"runtimeClassName={name},priorityClassName={name},tls.secretName={name}")
    done = helm("template", name, CHART, "--namespace", name, *settings(values), *strings)
    assert done.returncode == 0, done.stderr
    manifests = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert {one["metadata"]["namespace"] for one in manifests} == {name}
    assert {one["metadata"]["labels"]["app.kubernetes.io/instance"] for one in manifests} == {name}
    by_kind = {one["kind"]: one for one in manifests}
    pod = pod_of(by_kind)
    assert (pod["runtimeClassName"], pod["priorityClassName"]) == (name, name)
    assert name in [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
    assert f"/opt/{name} # a" in host_paths(by_kind)
    for selector in (by_kind["DaemonSet"]["spec"]["selector"]["matchLabels"], by_kind["Service"]["spec"]["selector"]):
        assert selector["app.kubernetes.io/instance"] == name


def test_one_agent_goes_before_the_next_comes() -> None:
    """A roll-out never has two agents on a node, goes on when a new one is ready, and waits little for the old one."""
    spec = render()["DaemonSet"]["spec"]
    assert spec["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": "10%", "maxSurge": 0}
    assert spec["minReadySeconds"] > 0
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] < 30


def test_it_serves_on_while_prometheus_learns_that_it_goes() -> None:
    """What runs before the signal outlasts Prometheus's two timers of 5 s, and leaves gpumap time to end."""
    seconds = container_of(render())["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert 10 < seconds < pod_of(render())["terminationGracePeriodSeconds"] - 5
    for version, action in (("1.29", "exec"), ("1.30.0-gke.1", "sleep"), ("v1.31.4-eks-2d5f260", "sleep")):
        assert list(container_of(render(version=version))["lifecycle"]["preStop"]) == [action]
    *_, sleep = container_of(render(version=OLDEST))["lifecycle"]["preStop"]["exec"]["command"]
    assert f"time.sleep({seconds})" in sleep
