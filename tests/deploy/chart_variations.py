"""Values to try the chart with: a name for each set of `--set`, such as a user might write it."""

from collections.abc import Iterable

EVERYTHING = (
    "serviceMonitor.enabled=true",
    "prometheusRule.enabled=true",
    "prometheusRule.autoscaling=true",
    "prometheusRule.opencost=true",
    "dashboards.enabled=true",
    "networkPolicy.enabled=true",
    "openshift.securityContextConstraints=true",
)
"""Each object that is off until asked for."""
POD_MONITOR = ("podMonitor.enabled=true",)
"""Instead of a ServiceMonitor."""
CERTIFICATE_SHOWN = (
    "tlsConfig.cert.secret.name=prometheus",
    "tlsConfig.cert.secret.key=tls.crt",
    "tlsConfig.keySecret.name=prometheus",
    "tlsConfig.keySecret.key=tls.key",
)
"""By a monitor: its client certificate. Such values are below the monitor that `of` puts before them."""
PASSWORD_SENT = (
    "basicAuth.username.name=prometheus",
    "basicAuth.username.key=user",
    "basicAuth.password.name=prometheus",
    "basicAuth.password.key=password",
)
"""By a monitor."""
MONITORED = (
    "interval=30s",
    "scrapeTimeout=10s",
    "labels.release=prometheus",
    "additionalLabels.team=ml",
    "podTargetLabels={team}",
    "attachMetadata.node=true",
    "sampleLimit=50000",
    "labelLimit=40",
    "proxyUrl=http://proxy.example.com:3128",
    "relabelings[0].action=labeldrop",
    "relabelings[0].regex=endpoint",
    "metricRelabelings[0].action=drop",
    "metricRelabelings[0].sourceLabels={namespace}",
    "metricRelabelings[0].regex=kube-system",
    "tlsConfig.serverName=gpumap",
    *CERTIFICATE_SHOWN,
    *PASSWORD_SENT,
)


def of(monitor: str, values: Iterable[str]) -> tuple[str, ...]:
    """The values of a serviceMonitor or a podMonitor."""
    return tuple(f"{monitor}.{value}" for value in values)


REQUIRED = "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].preference"
VARIATIONS: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "everything": EVERYTHING,
    "more nodes than Endpoints name": (*EVERYTHING, "serviceMonitor.serviceDiscoveryRole=EndpointSlice"),
    "pods monitored without the Service": (
        *POD_MONITOR,
        *of("podMonitor", MONITORED),
    ),
    "no step of the ladder": tuple(f"privileges.{step}=false" for step in ("checkpoint", "podLogs", "hostPID")),
    "every step of the ladder": tuple(
        f"privileges.{step}=true" for step in ("checkpoint", "podLogs", "hostPID", "dra", "podsApi", "gpuFractioning")
    ),
    "another kubelet root": (
        "kubelet.rootDir=/var/lib/k0s/kubelet",
        "privileges.dra=true",
        "privileges.podsApi=true",
    ),
    "the library from the node": ("nvml.hostPath=/home/kubernetes/bin/nvidia/lib64", "nvml.library=libnvidia-ml.so.1"),
    "seldom": ("interval=1m30s",),
    "an image of one's own": (
        "image.repository=registry.example.com:5000/team/gpumap",
        "image.tag=v1",
        "image.pullPolicy=Always",
    ),
    "names": (
        "nameOverride=my-gpumap",
        "commonLabels.team=ml",
        "podLabels.tier=node",
        "podAnnotations.note=hello",
        "image.tag=1.2",
        "image.digest=sha256:" + 64 * "a",
        "tolerations[0].operator=Exists",
        "imagePullSecrets={registry}",
        *EVERYTHING,
    ),
    "one name for all": ("fullnameOverride=gpumap-2", *EVERYTHING),
    "a name without gpumap": ("fullnameOverride=agents", "job=gpu-agents", *EVERYTHING),
    "annotated": (
        "commonAnnotations.note=hello",
        "service.annotations.note=own",
        "dashboards.annotations.folder=GPU",
        "tls.secretName=gpumap-tls",
        *EVERYTHING,
    ),
    "namespaces of one's own": (
        "namespaceOverride=gpu",
        "serviceMonitor.namespace=observability",
        "prometheusRule.namespace=observability",
        "dashboards.namespace=grafana",
        *EVERYTHING,
    ),
    "pods monitored from another namespace": ("podMonitor.namespace=observability", *POD_MONITOR),
    "another's ServiceAccount": (
        "serviceAccount.create=false",
        "serviceAccount.name=agent",
        "openshift.securityContextConstraints=true",
    ),
    "an annotated ServiceAccount": ("serviceAccount.annotations.note=hello",),
    "security contexts": (
        "podSecurityContext.runAsGroup=0",
        "podSecurityContext.fsGroup=1000660000",
        "securityContext.readOnlyRootFilesystem=false",
        "openshift.securityContextConstraints=true",
        "podSecurityContext.supplementalGroups={44}",
        "podSecurityContext.seLinuxOptions.type=spc_t",
        "securityContext.seccompProfile.type=Localhost",
        "securityContext.seccompProfile.localhostProfile=gpumap.json",
        "securityContext.capabilities.add={SYS_PTRACE}",
    ),
    "slow probes": (
        "livenessProbe.initialDelaySeconds=30",
        "livenessProbe.failureThreshold=5",
        "readinessProbe.periodSeconds=30",
        "revisionHistoryLimit=2",
    ),
    "no Service": ("service.enabled=false", *POD_MONITOR),
    "more of one's own": (
        "initContainers[0].name=before",
        "initContainers[0].image=busybox",
        "extraContainers[0].name=beside",
        "extraContainers[0].image=busybox",
        "dnsConfig.options[0].name=edns0",
        "extraObjects[0].apiVersion=v1",
        "extraObjects[0].kind=ConfigMap",
        "extraObjects[0].metadata.name=more",
        "extraObjects[0].metadata.namespace=monitoring",
        "extraManifests[0].apiVersion=v1",
        "extraManifests[0].kind=ConfigMap",
        "extraManifests[0].metadata.name=even-more",
        "extraManifests[0].metadata.namespace=monitoring",
    ),
    "the node's network": ("hostNetwork=true", "port=9500", "openshift.securityContextConstraints=true"),
    "a port of the node": ("port=9500", "hostPort=9501", "openshift.securityContextConstraints=true"),
    "images of a parent chart": (
        "imagePullSecrets={own}",
        "image.registry=docker.io/",
        "global.imageRegistry=mirror.example.com/hub",
        "global.imagePullSecrets={mirror}",
        "global.storageClass=of another chart",
    ),
    "every node": ("gpuNodesOnly=false", "gpuOperator.followClient=false", "tolerations[0].operator=Exists"),
    "beside the GPU operator": ("gpuOperator.followDcgmExporter=true", "runtimeClassName=nvidia"),
    "beside the GPU operator, on chosen nodes": (
        "gpuOperator.followDcgmExporter=true",
        "nodeSelector.accelerator=nvidia",
        f"{REQUIRED}.nodeSelectorTerms[0].matchExpressions[0].key=gpu",
        f"{REQUIRED}.nodeSelectorTerms[0].matchExpressions[0].operator=Exists",
        "priorityClassName=system-node-critical",
    ),
    "OpenShift": ("openshift.securityContextConstraints=true", "podSecurityContext.seLinuxOptions.type=container_t"),
    "rather on some nodes": (
        "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight=1",
        f"{PREFERRED}.matchExpressions[0].key=pool",
        f"{PREFERRED}.matchExpressions[0].operator=Exists",
    ),
    "SELinux": ("podSecurityContext.seLinuxOptions.type=spc_t", "podSecurityContext.seLinuxOptions.level=s0"),
    "claims": ("resourceClaims[0].name=gpus", "resourceClaims[0].resourceClaimTemplateName=all-gpus"),
    "rolled out by hand": (
        "updateStrategy.type=OnDelete",
        "updateStrategy.rollingUpdate=null",
        "minReadySeconds=0",
        "terminationGracePeriodSeconds=30",
    ),
    "extras": (
        "extraArgs={--process-metrics}",
        "dialects={dcgm}",
        "collect={allocation,use}",
        "extraEnv[0].name=GPUMAP_LOG_FORMAT",
        "extraEnv[0].value=json",
        "extraEnv[1].name=NVIDIA_VISIBLE_DEVICES",
        "extraEnv[1].value=void",
        "extraVolumes[0].name=more",
        "extraVolumes[0].configMap.name=more",
        "extraVolumeMounts[0].name=more",
        "extraVolumeMounts[0].mountPath=/etc/more",
        "resources.limits.memory=1Gi",
        "podLabels.tier=node",
        "podAnnotations.note=hello",
        "extraEnv[2].name=NODE_NAME",
        "extraEnv[2].value=a",
    ),
    "dialects alone": ("native=false", "dialects={dcgm,dcgm-join}", "serviceMonitor.enabled=true"),
    "a Service of one's own": (
        "service.type=NodePort",
        "service.port=9500",
        "service.nodePort=30401",
        "service.clusterIP=10.96.0.40",
        "service.internalTrafficPolicy=Local",
        "service.annotations.note=hello",
        "service.labels.team=ml",
    ),
    "TLS": ("tls.secretName=gpumap-tls", "tls.minVersion=TLS13", *EVERYTHING),
    "TLS, client certificates and passwords": (
        "tls.secretName=gpumap-tls",
        "tls.clientCaSecretName=clients",
        "basicAuth.users.prometheus=$2y$10$" + 53 * "a",
        *EVERYTHING,
        *of("serviceMonitor", MONITORED),
    ),
    "TLS, client certificates and passwords, without the Service": (
        "tls.secretName=gpumap-tls",
        "tls.clientCaSecretName=clients",
        "basicAuth.users.prometheus=$2y$10$" + 53 * "a",
        *POD_MONITOR,
        *of("podMonitor", MONITORED),
    ),
    "a web configuration of one's own": (
        "webConfig.secretName=web",
        "webConfig.tls=true",
        "serviceMonitor.tlsConfig.insecureSkipVerify=true",
        *EVERYTHING,
    ),
    "few rules": (
        "prometheusRule.enabled=true",
        "prometheusRule.disabledAlerts={GpumapGpuBusy}",
        "prometheusRule.runbookUrl=https://git.example.com/runbooks",
        "prometheusRule.recording=false",
        "prometheusRule.alertLabels.team=platform",
        "prometheusRule.labels.release=prometheus",
        "prometheusRule.additionalLabels.team=ml",
        "prometheusRule.for.GpumapGpuIdle=4h",
        "prometheusRule.thresholds.idleSeconds=10000000",
        "prometheusRule.thresholds.maybeIdleSeconds=10000000",
        "prometheusRule.thresholds.busyRatio=0.99",
        "prometheusRule.thresholds.memoryRatio=0.9",
        "prometheusRule.thresholds.temperatureCelsius=95",
        "prometheusRule.thresholds.memoryTemperatureCelsius=100",
        "prometheusRule.ignoredXids={13,31}",
    ),
    "recorded alone": ("prometheusRule.enabled=true", "prometheusRule.alerts=false"),
    "boards in a folder": (
        "dashboards.enabled=true",
        "dashboards.labels.grafana_dashboard=yes",
        "dashboards.annotations.grafana_folder=GPU",
    ),
    "a network policy for Prometheus": (
        "networkPolicy.enabled=true",
        r"networkPolicy.from[0].namespaceSelector.matchLabels.kubernetes\.io/metadata\.name=monitoring",
    ),
    "pods monitored by Azure": (*POD_MONITOR, "podMonitor.apiVersion=azmonitoring.coreos.com/v1"),
    "no test": (
        "tests.enabled=false",
        "networkPolicy.enabled=true",
        "networkPolicy.from[0].podSelector.matchLabels.app=prometheus",
    ),
    "nothing set": tuple(
        f"{value}=null"
        for value in (
            "nodeSelector",
            "affinity",
            "tolerations",
            "resources",
            "podLabels",
            "podAnnotations",
            "extraArgs",
        )
    ),
}
RENDERED = (
    "defaults",
    "no step of the ladder",
    "every step of the ladder",
    "another kubelet root",
    "the library from the node",
    "names",
    "annotated",
    "namespaces of one's own",
    "pods monitored from another namespace",
    "pods monitored without the Service",
    "security contexts",
    "a port of the node",
    "images of a parent chart",
    "OpenShift",
    "claims",
    "extras",
    "a Service of one's own",
    "TLS, client certificates and passwords",
    "a web configuration of one's own",
    "a network policy for Prometheus",
    "no test",
)
"""What tests/deploy/rendered keeps as files."""
