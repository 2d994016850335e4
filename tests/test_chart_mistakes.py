"""Mistakes in the chart's values: what stops an installation, and how it is told."""

import re

import pytest

from tests.chart import refusal

HASH = "$2y$10$" + 53 * "a"
TLS = ("tls.secretName=certificate",)
OWN_CONFIG = ("webConfig.secretName=own",)
MONITORS = ("serviceMonitor", "podMonitor")
MISTAKES = {
    # Names that are almost one, and shapes that are not.
    "hostPID": "true",
    "privileges.hostPid": "false",
    "privileges.hostPID": "maybe",
    "privileges.dra": "on",
    "privileges.podsapi": "true",
    "kubelet.rootdir": "/var/lib/k0s/kubelet",
    "kubelet.rootDir": "/var/lib/kubelet/",
    "nvml.hostPath": "lib",
    "image.digest": "latest",
    "image.repository": "gpumap:0.1.0",
    "image.tag": "not a tag",
    "image.pullPolicy": "Sometimes",
    "imagePullSecrets[0].Name": "registry",
    "nameOverride": "agents",
    "fullnameOverride": "Gpumap",
    "gpuNodesOnly": "yes",
    "gpuOperator.followDCGMExporter": "true",
    "nodeSelector.pool": "5",
    "affinity.nodeaffinity.a": "b",
    "tolerations[0].efect": "NoSchedule",
    "tolerations[0].operator": "Exist",
    "runtimeClassName": "NVIDIA",
    "resourceClaims[0].name": "gpus",
    "seLinuxOptions.Type": "spc_t",
    "openshift.scc": "true",
    "resources.request.cpu": "1",
    "resources.requests.cpu": "1 core",
    "updateStrategy.type": "Recreate",
    "updateStrategy.rollingUpdate.maxUnavailable": "ten",
    "minReadySeconds": "10s",
    "interval": "10",
    "dialects[0]": "dcgm-exporter",
    "dialects": "dcgm",
    "collect[0]": "gpu",
    "stateFile.hostPath": "/var/lib/gpumap/",
    "extraArgs": "--interval=10s",
    "extraArgs[0]": "interval=10s",
    "extraEnv[0].value": "json",
    "extraEnv[0].Name": "A",
    "extraVolumes": "more",
    "extraVolumeMounts[0].name": "more",
    "podLabels.team": "true",
    "service.port": "0",
    "service.type": "ExternalName",
    "serviceMonitor.intervall": "30s",
    "serviceMonitor.interval": "30",
    "serviceMonitor.scrapeTimeout": "10",
    "serviceMonitor.relabelings[0].source_labels[0]": "pod",
    "serviceMonitor.relabelings[0].action": "delete",
    "serviceMonitor.tlsConfig.insecure_skip_verify": "true",
    "serviceMonitor.basicAuth.username": "prometheus",
    "podMonitor.tlsConfig.caFile": "/etc/ca.crt",
    "prometheusRule.disabledAlert[0]": "GpumapDown",
    "prometheusRule.runbookUrl": "docs/runbooks",
    "dashboards.label.grafana_dashboard": "1",
    "networkPolicy.from[0].podselector.a": "b",
    "tls.minVersion": "TLS1.3",
    "tls.secret": "certificate",
    "basicAuth.users.prometheus": "secret",
    "webConfig.secretname": "own",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_values_is_refused(name: str) -> None:
    """A value that is misspelt or of the wrong shape stops the installation, and is named."""
    said = refusal(f"{name}={MISTAKES[name]}")
    *_, parent, last = ("", *re.findall(r"[A-Za-z_]+", name))
    # An unknown parent hides what is in it; what lacks its name is told by where it stands.
    assert any(words in said for words in (last, f"'{parent}'", f"/{parent}/0")), said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (tuple(f"{monitor}.enabled=true" for monitor in MONITORS), "scraped twice"),
        ((*OWN_CONFIG, *TLS), "webConfig.secretName"),
        ((*OWN_CONFIG, f"basicAuth.users.me={HASH}"), "instead of tls and basicAuth"),
        (("webConfig.tls=true",), "webConfig.tls"),
        (("tls.clientCaSecretName=clients",), "tls.clientCaSecretName is set, and there is no TLS"),
        (("tls.minVersion=TLS13",), "tls.minVersion is set, and there is no TLS"),
        (("updateStrategy.rollingUpdate.maxSurge=1",), "updateStrategy.rollingUpdate.maxSurge is 1"),
        (("updateStrategy.rollingUpdate.maxSurge=10%",), "updateStrategy.rollingUpdate.maxSurge is 10%"),
        (("dialects={none,native}",), "dialects: none"),
        (("stateFile.hostPath=/var/lib",), "stateFile.hostPath /var/lib "),
        (("stateFile.hostPath=/var/lib/kubelet/pods",), "stateFile.hostPath /var/lib/kubelet/pods "),
        *(
            ((f"{monitor}.enabled=true", f"basicAuth.users.me={HASH}"), f"{monitor}.basicAuth is missing")
            for monitor in MONITORS
        ),
        *(
            ((f"{monitor}.enabled=true", *TLS, "tls.clientCaSecretName=a"), f"{monitor}.tlsConfig has no cert")
            for monitor in MONITORS
        ),
        (("prometheusRule.enabled=true", "prometheusRule.disabledAlerts={GpumapDwn}"), "no alert is called GpumapDwn"),
        (
            tuple(f"prometheusRule.{one}" for one in ("enabled=true", "alerts=false", "recording=false")),
            "nothing is left",
        ),
    ],
)
def test_values_that_cannot_be_had_together_are_refused(values: tuple[str, ...], said: str) -> None:
    """With the names of the values, and the reason."""
    assert said in refusal(*values)


def test_a_name_that_is_cut_short_is_refused() -> None:
    """Where the release's name leaves no room for gpumap, by which the alerts find their targets."""
    assert "Set fullnameOverride" in refusal(f"nameOverride={'a' * 57}gpumap", release="prod")
