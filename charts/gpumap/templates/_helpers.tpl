{{- define "gpumap.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "gpumap.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "gpumap.labels" -}}
{{ include "gpumap.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
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

{{/* The flags of `gpumap serve` that differ from its defaults, as a list in YAML. */}}
{{- define "gpumap.args" -}}
- serve
{{- if ne .Values.kubelet.rootDir "/var/lib/kubelet" }}
- {{ printf "--kubelet-root=%s" .Values.kubelet.rootDir | quote }}
{{- end }}
{{- with .Values.nvml }}
{{- if and .hostPath (not (hasPrefix "/" .library)) }}
- {{ printf "--nvml-library=/nvml/%s" (.library | default "libnvidia-ml.so.1") | quote }}
{{- else if .library }}
- {{ printf "--nvml-library=%s" .library | quote }}
{{- end }}
{{- end }}
{{- with .Values.extraArgs }}
{{ toYaml . }}
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
{{- if .Values.privileges.podLogs }}
pod-logs: {path: /var/log/pods, type: DirectoryOrCreate}
container-logs: {path: /var/log/containers, type: DirectoryOrCreate}
{{- end }}
{{- end -}}
