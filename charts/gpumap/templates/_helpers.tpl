{{- define "gpumap.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains $name .Release.Name -}}
{{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{/* The name is the chart's, whatever nameOverride says: `kubectl gpumap` looks for it. */}}
{{- define "gpumap.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "gpumap.ownLabels" -}}
{{ include "gpumap.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Whoever looks for the chart's objects finds them, whatever commonLabels say. */}}
{{- define "gpumap.labels" -}}
{{- $common := deepCopy (.Values.commonLabels | default dict) -}}
{{ include "gpumap.ownLabels" . | fromYaml | mergeOverwrite $common | toYaml }}
{{- end -}}

{{/* `labels` of `root`'s release and `more`, which cannot overwrite them. */}}
{{- define "gpumap.labelsWith" -}}
{{- include "gpumap.labels" .root | fromYaml | mergeOverwrite (deepCopy (.more | default dict)) | toYaml -}}
{{- end -}}

{{/* Without the chart's version: a chart that changes nothing in the pods does not replace them. */}}
{{- define "gpumap.podLabels" -}}
{{- $own := include "gpumap.ownLabels" . | fromYaml -}}
{{- $_ := unset $own "helm.sh/chart" -}}
{{- mergeOverwrite (deepCopy (.Values.commonLabels | default dict)) (.Values.podLabels | default dict) $own | toYaml -}}
{{- end -}}

{{- define "gpumap.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Where the sources are, if not where gpumap looks by itself, as a list of variables in YAML: not flags of `serve`, so that
`kubectl exec … gpumap doctor` and its like know it too.
*/}}
{{- define "gpumap.places" -}}
{{- if ne .Values.kubelet.rootDir "/var/lib/kubelet" }}
- name: GPUMAP_KUBELET_ROOT
  value: {{ .Values.kubelet.rootDir | quote }}
{{- end }}
{{- if .Values.privileges.podsApi }}
- name: GPUMAP_PODS_API_SOCKET
  value: {{ printf "%s/pods-api/pods-api.sock" .Values.kubelet.rootDir | quote }}
{{- end }}
{{- with .Values.nvml }}
{{- if or .library .hostPath }}
- name: GPUMAP_NVML_LIBRARY
{{- if and .hostPath (not (hasPrefix "/" .library)) }}
  value: {{ printf "/nvml/%s" (.library | default "libnvidia-ml.so.1") | quote }}
{{- else }}
  value: {{ .library | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/*
The node's folders that the agent reads, each at its own path: {"name": {"path": …, "type": …}}.
Folders, never the socket itself: a restarting kubelet makes a new one. Only the first must exist (a wrong root then
shows as a pod that waits); a missing folder of an optional step must not keep the agent from starting.
Kubelets keep the checkpoint in /var/lib/kubelet, whatever their root.
*/}}
{{- define "gpumap.hostFolders" -}}
{{- $root := .Values.kubelet.rootDir -}}
pod-resources: {path: {{ printf "%s/pod-resources" $root | quote }}, type: Directory}
{{- if .Values.privileges.checkpoint }}
device-plugins: {path: {{ printf "%s/device-plugins" $root | quote }}, type: DirectoryOrCreate}
{{- if ne $root "/var/lib/kubelet" }}
device-plugins-default: {path: /var/lib/kubelet/device-plugins, type: DirectoryOrCreate}
{{- end }}
{{- end }}
{{- if .Values.privileges.dra }}
dra-plugin: {path: {{ printf "%s/plugins/gpu.nvidia.com" $root | quote }}, type: DirectoryOrCreate}
{{- end }}
{{- if .Values.privileges.podsApi }}
pods-api: {path: {{ printf "%s/pods-api" $root | quote }}, type: DirectoryOrCreate}
{{- end }}
{{- if .Values.privileges.podLogs }}
pod-logs: {path: /var/log/pods, type: DirectoryOrCreate}
container-logs: {path: /var/log/containers, type: DirectoryOrCreate}
{{- end }}
{{- end -}}

{{/*
SELinux's label of the pod, as YAML; empty where the runtime chooses one. OpenShift's policy keeps the type container_t
from connecting to the kubelet's sockets; spc_t is its type for containers that manage the node (container-selinux).
*/}}
{{- define "gpumap.seLinuxOptions" -}}
{{- if .Values.seLinuxOptions -}}
{{ toYaml .Values.seLinuxOptions }}
{{- else if .Values.openshift.securityContextConstraints -}}
type: spc_t
{{- end -}}
{{- end -}}
