"""Mistakes in the chart's values: what stops an installation, and what helm then prints."""

import re

import pytest

from gpumap.model.formatting import parse_duration
from tests.deploy.chart import refusal, render

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
    "nvml.library": "lib/libnvidia-ml.so.1",
    "global.imageRegistry": "https://mirror.example.com",
    "global.imagePullSecrets": "registry",
    "image.registry": "https://registry.example.com",
    "image.digest": "latest",
    "image.repository": "gpumap:0.1.0",
    "image.tag": "not a tag",
    "image.pullPolicy": "Sometimes",
    "imagePullSecrets[0].Name": "registry",
    "nameOverride": "Agents",
    "fullnameOverride": "Gpumap",
    "namespaceOverride": "Gpu",
    "commonAnnotations.note": "true",
    "job": ".*gpumap.*",
    "serviceAccount.created": "true",
    "serviceAccount.name": "Agent",
    "podSecurityContext.runAsuser": "0",
    "podSecurityContext.runAsUser": "root",
    "securityContext.capabilities.drop": "ALL",
    "securityContext.capabilities.add[0]": "SYS_ADMIN",
    "securityContext.privileged": "true",
    "securityContext.seccompProfile.type": "runtime/default",
    "revisionHistoryLimit": "-1",
    "livenessProbe.httpGet.path": "/",
    "livenessProbe.successThreshold": "2",
    "readinessProbe.periodSeconds": "0",
    "initContainers[0].image": "busybox",
    "extraContainers[0].image": "busybox",
    "dnsConfig.options[0].value": "1",
    "extraObjects[0].kind": "ConfigMap",
    "extraManifests[0].kind": "ConfigMap",
    "port": "metrics",
    "hostPort": "true",
    "hostNetwork": "yes",
    "service.enabled": "no",
    "service.nodePort": "70000",
    "service.clusterIP": "none",
    "service.internalTrafficPolicy": "local",
    "serviceMonitor.namespace": "a.b",
    "podMonitor.namespaces": "a",
    "dashboards.namespace": "Grafana",
    "gpuNodesOnly": "yes",
    "gpuOperator.followDCGMExporter": "true",
    "nodeSelector.pool": "5",
    "affinity.nodeaffinity.a": "b",
    "tolerations[0].efect": "NoSchedule",
    "tolerations[0].operator": "Exist",
    "runtimeClassName": "NVIDIA",
    "resourceClaims[0].name": "gpus",
    "podSecurityContext.seLinuxOptions.Type": "spc_t",
    "openshift.scc": "true",
    "resources.request.cpu": "1",
    "resources.requests.cpu": "1 core",
    "updateStrategy.type": "Recreate",
    "updateStrategy.rollingUpdate.maxUnavailable": "ten",
    "minReadySeconds": "10s",
    "interval": "10",
    "dialects[0]": "dcgm-exporter",
    "dialects": "dcgm",
    "native": "no",
    "collect[0]": "gpu",
    "extraArgs": "--interval=10s",
    "extraArgs[0]": "interval=10s",
    "extraEnv[0].value": "json",
    "extraEnv[0].Name": "A",
    "extraVolumes": "more",
    "extraVolumeMounts[0].name": "more",
    "podLabels.team": "true",
    "service.port": "0",
    "service.type": "ExternalName",
    "serviceMonitor.additionalLabels.team": "true",
    "serviceMonitor.podTargetLabels": "team",
    "serviceMonitor.attachMetadata.nodes": "true",
    "serviceMonitor.sampleLimit": "-1",
    "serviceMonitor.labelLimit": "many",
    "serviceMonitor.proxyUrl": "proxy:3128",
    "serviceMonitor.intervall": "30s",
    "serviceMonitor.interval": "30",
    "serviceMonitor.scrapeTimeout": "10",
    "serviceMonitor.relabelings[0].source_labels[0]": "pod",
    "serviceMonitor.relabelings[0].action": "delete",
    "serviceMonitor.tlsConfig.insecure_skip_verify": "true",
    "serviceMonitor.basicAuth.username": "prometheus",
    "podMonitor.tlsConfig.caFile": "/etc/ca.crt",
    "prometheusRule.disabledAlert[0]": "GpumapDown",
    "prometheusRule.for.GpumapGpuIdle": "4",
    "prometheusRule.thresholds.idleSeconds": "1h",
    "prometheusRule.thresholds.busyRatio": "95",
    "prometheusRule.thresholds.memoryRatio": "95%",
    "prometheusRule.thresholds.temperatureCelsius": "hot",
    "prometheusRule.ignoredXids[0]": "XID 13",
    "prometheusRule.runbookUrl": "docs/runbooks",
    "dashboards.label.grafana_dashboard": "1",
    "networkPolicy.from[0].podselector.a": "b",
    "tls.minVersion": "TLS1.3",
    "tls.secret": "certificate",
    "basicAuth.users.prometheus": "12",
    "webConfig.secretname": "own",
}
TERMS = "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
SHAPES = (
    *(("interval", value) for value in ("0s", "1s1m", "15s15s", "1.5s", "-5s", "5 s")),
    *((f"{one}.interval", value) for one in MONITORS for value in ("", "0", "0s", "1s1m", "1m1m", "1m 1s")),
    *((f"{one}.scrapeTimeout", "1ms1s") for one in MONITORS),
    *(("fullnameOverride", value) for value in ("-gpumap", "gpumap-", "9gpumap", "gpumap.a")),
    ("nameOverride", "gpumap-"),
    *(("updateStrategy.rollingUpdate.maxUnavailable", value) for value in ("0", "0%", "00%", "101%")),
    ("prometheusRule.alertLabels.bad-label", "platform"),
    ("serviceMonitor.serviceDiscoveryRole", "endpointslice"),
    *((name, "/opt/lib\n- evil") for name in ("nvml.hostPath", "kubelet.rootDir")),
    (TERMS, "a"),
    (f"{TERMS}[0]", "a"),
    (f"{TERMS}[0].matchExpressions", "a"),
    (f"{TERMS}[0].matchExpressions[0]", "a"),
    (f"{TERMS}[0].matchLabels.pool", "a"),
)
"""More values of the wrong shape, of names that are above or not."""
MONITOR_MISTAKES: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (("interval=15s", "scrapeTimeout=20s"), (), "scrapeTimeout 20s is longer than"),
    (("interval=1m", "scrapeTimeout=1m1ms"), (), "scrapeTimeout 1m1ms is longer than"),
    (
        ("tlsConfig.cert.secret.name=a", "tlsConfig.cert.secret.key=b"),
        (),
        "tlsConfig has a certificate without its key",
    ),
    (("tlsConfig.keySecret.name=a", "tlsConfig.keySecret.key=b"), (), "tlsConfig has a certificate without its key"),
    ((), (*OWN_CONFIG, "webConfig.tls=true"), "tlsConfig has no ca"),
    ((), (f"basicAuth.users.me={HASH}",), "basicAuth is missing"),
    ((), (*TLS, "tls.clientCaSecretName=a"), "tlsConfig has no cert"),
)
"""The monitor's own values, others beside them, and what is said of both."""
CA = tuple(f"serviceMonitor.tlsConfig.ca.{one}.{key}=a" for one in ("secret", "configMap") for key in ("name", "key"))


@pytest.mark.parametrize(("name", "value"), [*MISTAKES.items(), *SHAPES])
def test_a_mistake_in_the_values_is_refused(name: str, value: str) -> None:
    """A value that is misspelt or of the wrong shape stops the installation, and is named."""
    said = refusal(f"{name}={value}")
    assert "schema" in said, said
    *_, parent, last = ("", *re.findall(r"[A-Za-z_]+", name))
    # An unknown parent hides what is in it; what lacks its name is named by its place.
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
        *(((f"interval={value}",), f"interval is {value}") for value in ("1ms", "99ms")),
        *(
            ((f"{context}.{value}",), f"{context}: another user than 0 cannot read")
            for context in ("podSecurityContext", "securityContext")
            for value in ("runAsUser=1000", "runAsUser=1000660000", "runAsNonRoot=true")
        ),
        (("dialects={none,native}",), "dialects: none"),
        (("dialects={dcgm,dcgm49}",), "dialects: dcgm and dcgm49 share metric names"),
        (("dialects={dcgm49,all}",), "dialects: all and dcgm49 share metric names"),
        (("extraArgs={--no-native}",), "extraArgs: --no-native: set native instead"),
        (("dialects={none}", "extraArgs={--dialect=dcgm}"), "extraArgs: --dialect=dcgm: set dialects instead"),
        *(
            ((f"extraEnv[0].name={name}", "extraEnv[0].value=x", *others), f"extraEnv: {name}: set {value} instead")
            for name, value in (("GPUMAP_NO_NATIVE", "native"), ("GPUMAP_DIALECT", "dialects"))
            for others in ((), ("prometheusRule.enabled=true",))
        ),
        (("native=false",), "native is false, and dialects names no other"),
        (("native=false", "dialects={none}"), "native is false, and dialects names no other"),
        (("native=false", "dialects={native}"), "native is false, and dialects names native"),
        (("native=false", "dialects={native,dcgm}"), "native is false, and dialects names native"),
        *(
            (
                ("native=false", "dialects={dcgm}", "prometheusRule.enabled=true", *off),
                "prometheusRule.enabled: every alert and rule reads",
            )
            for off in ((), ("prometheusRule.recording=false",), ("prometheusRule.alerts=false",))
        ),
        (("native=false", "dialects={dcgm}", "dashboards.enabled=true"), "dashboards.enabled: the boards read"),
        *(
            ((f"{monitor}.enabled=true", *beside, *(f"{monitor}.{value}" for value in own)), f"{monitor}.{said}")
            for monitor in MONITORS
            for own, beside, said in MONITOR_MISTAKES
        ),
        (("serviceMonitor.enabled=true", *CA[:2], "serviceMonitor.tlsConfig.caFile=a"), "tlsConfig has ca and caFile"),
        (("serviceMonitor.enabled=true", "serviceMonitor.tlsConfig.certFile=a"), "a certificate without its key"),
        (("serviceMonitor.enabled=true", *CA), "serviceMonitor/tlsConfig/ca"),
        *(
            (
                (*TLS, f"{monitor}.enabled=true", f"{monitor}.namespace=elsewhere"),
                f"{monitor}.tlsConfig has no ca: Secret certificate is in namespace default",
            )
            for monitor in MONITORS
        ),
        (("service.enabled=false", "serviceMonitor.enabled=true"), "Set service.enabled, or use podMonitor"),
        (("service.nodePort=30401",), "service.nodePort: a Service of type ClusterIP has no port on the nodes"),
        (("service.clusterIP=None", "service.type=NodePort"), "Kubernetes refuses that for a Service of type NodePort"),
        (("hostNetwork=true", "hostPort=9500"), "hostPort is 9500 and port is 9401"),
        (("hostNetwork=true", "networkPolicy.enabled=true"), "networkPolicy.enabled does nothing with hostNetwork"),
        (("networkPolicy.from[0].ipBlock.cidr=10.0.0.0/8",), "networkPolicy.enabled is false: every pod can connect"),
        *(
            ((f"{name}={path}",), f"{name} has . or .. as a part of the path")
            for name, path in (
                ("kubelet.rootDir", "/var/lib/../lib/kubelet"),
                ("kubelet.rootDir", "/var/lib/kubelet/.."),
                ("nvml.hostPath", "/usr/./lib"),
                ("nvml.library", ".."),
            )
        ),
        *(
            (("extraVolumes[0].name=more", f"extraVolumes[0].hostPath.path={path}"), f"the hostPath {path} {fault}")
            for path, fault in (("/dev/../etc", "has . or .. as"), ("dev/null", "is not absolute"))
        ),
        *(
            ((f"{value}[0].name=gpumap",), f"{value}: gpumap is the name")
            for value in ("initContainers", "extraContainers")
        ),
        (("extraArgs={--listen=:9500}",), "extraArgs: --listen=:9500: set port"),
        (("extraEnv[0].name=GPUMAP_LISTEN", "extraEnv[0].value=:9500"), "extraEnv: GPUMAP_LISTEN: set port"),
        *(((*TLS, f"extraVolumes[0].name={name}"), f"a volume called {name}") for name in ("tmp", "tls")),
        (("prometheusRule.enabled=true", "prometheusRule.disabledAlerts={GpumapDwn}"), "no alert is called GpumapDwn"),
        (("prometheusRule.enabled=true", "prometheusRule.for.GpumapDwn=1h"), "for: no alert is called GpumapDwn"),
        *(
            ((f"prometheusRule.{one}=true",), f"prometheusRule.{one} is set, but prometheusRule.enabled is false")
            for one in ("autoscaling", "opencost")
        ),
        (
            tuple(f"prometheusRule.{one}" for one in ("enabled=true", "alerts=false", "recording=false")),
            "nothing is left",
        ),
    ],
)
def test_values_that_cannot_be_had_together_are_refused(values: tuple[str, ...], said: str) -> None:
    assert said in refusal(*values)


@pytest.mark.parametrize("release", ["my.gpumap", "1gpumap"])
def test_a_release_that_no_service_can_be_called_by_is_refused(release: str) -> None:
    """A release's name may have dots and begin with a digit, a Service's may not; another full name helps."""
    said = refusal(release=release)
    assert release in said
    assert "Set fullnameOverride" in said
    assert render("fullnameOverride=gpumap", release=release)["Service"]["metadata"]["name"] == "gpumap"


def test_a_password_is_not_shown() -> None:
    """A password in the place of its hash is an error that does not print the password."""
    said = refusal("basicAuth.users.prometheus=open-sesame")
    assert "basicAuth.users.prometheus is not a bcrypt hash" in said
    assert "open-sesame" not in said


@pytest.mark.parametrize("value", ["1m30s", "1h1ms", "100ms", "90s"])
def test_gpumap_and_prometheus_take_the_durations_that_the_schema_takes(value: str) -> None:
    render(f"interval={value}", "serviceMonitor.enabled=true", f"serviceMonitor.interval={value}")
    assert parse_duration(value) > 0
