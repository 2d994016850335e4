{{/*
The endpoint of the ServiceMonitor or PodMonitor `monitor` of `root`'s release. `slices`: its targets may come from
EndpointSlices. Series of a container keep its namespace, pod and container. Series of a GPU must have none of these labels,
and the operator would add the agent's own. `instance` is the node: a new pod on the node continues the series of the old one.
*/}}
{{- define "gpumap.endpoint" -}}
{{- with .monitor -}}
port: metrics
path: /metrics
interval: {{ .interval }}
{{- with .scrapeTimeout }}
scrapeTimeout: {{ . }}
{{- end }}
{{- with .proxyUrl }}
proxyUrl: {{ . | quote }}
{{- end }}
{{- if include "gpumap.tls" $.root }}
scheme: https
tlsConfig:
  {{- include "gpumap.tlsConfig" $ | nindent 2 }}
{{- end }}
{{- with .basicAuth }}
basicAuth:
  {{- toYaml . | nindent 2 }}
{{- end }}
honorLabels: true
relabelings:
  {{- if $.slices }}
  # EndpointSlices still list a pod that ends, Endpoints do not. A scrape of a dead agent would end its series.
  - sourceLabels: [__meta_kubernetes_endpointslice_endpoint_conditions_terminating]
    regex: "true"
    action: drop
  {{- end }}
  # The default action is explicit: the API would add it, and Argo CD would report a difference.
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: node
    action: replace
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: instance
    action: replace
  # The operator shards by this value. With the pod's address a roll-out would move a node's series to another shard.
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: __tmp_hash
    action: replace
  - targetLabel: job
    replacement: {{ $.root.Values.job | quote }}
    action: replace
  - action: labeldrop
    regex: namespace|pod|container|service
  {{- with .relabelings }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Fields of the monitor itself that have a value of the same name. */}}
{{- define "gpumap.monitorFields" -}}
{{- $fields := pick . "attachMetadata" "labelLimit" "podTargetLabels" "sampleLimit" -}}
{{- range $name, $value := $fields }}{{ if not $value }}{{ $_ := unset $fields $name }}{{ end }}{{ end -}}
{{- with $fields }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/*
How Prometheus checks the server's certificate. Targets are addresses of pods, which no certificate names, so it must have
the Service's name. The authority is ca.crt of the server's own Secret, as cert-manager writes it.
*/}}
{{- define "gpumap.tlsConfig" -}}
{{- $given := .monitor.tlsConfig | default dict -}}
{{- $config := dict "serverName" (printf "%s.%s.svc" (include "gpumap.fullname" .root) (include "gpumap.namespace" .root)) -}}
{{- $secret := .root.Values.tls.secretName -}}
{{- if and $secret (not $given.ca) (not $given.caFile) (not $given.insecureSkipVerify) -}}
{{- $_ := set $config "ca" (dict "secret" (dict "name" $secret "key" "ca.crt")) -}}
{{- end -}}
{{- mergeOverwrite $config $given | toYaml -}}
{{- end -}}
