{{/*
An endpoint of a ServiceMonitor or a PodMonitor, as `monitor` says, in `root`'s release; `slices`: whether its targets may
come from EndpointSlices. What the page says of a container has that container's namespace, pod and container; what it says
of a GPU must have none: the operator would put the agent's own there. `instance` is the node, so that a new pod on it goes
on with the series of the old one.
*/}}
{{- define "gpumap.endpoint" -}}
{{- with .monitor -}}
port: metrics
path: /metrics
interval: {{ .interval }}
{{- with .scrapeTimeout }}
scrapeTimeout: {{ . }}
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
  # EndpointSlices go on naming a pod that ends, Endpoints do not: a scrape that finds it dead would end its series.
  - sourceLabels: [__meta_kubernetes_endpointslice_endpoint_conditions_terminating]
    regex: "true"
    action: drop
  {{- end }}
  # The action is said although it is the default, which the API would write in: Argo CD takes that for a difference.
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: node
    action: replace
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: instance
    action: replace
  # The operator shards by it, if at all: by the pod's address a roll-out would move a node's series to another shard.
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

{{/*
How the server's certificate is checked. Targets are addresses of pods, which no certificate names: it is the Service's
name that it must have. The authority is ca.crt of the server's own Secret, where cert-manager puts it.
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
