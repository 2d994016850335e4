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

{{- define "gpumap.namespace" -}}
{{ .Values.namespaceOverride | default .Release.Namespace }}
{{- end -}}

{{- define "gpumap.serviceAccountName" -}}
{{ .Values.serviceAccount.name | default (ternary (include "gpumap.fullname" .) "default" .Values.serviceAccount.create) }}
{{- end -}}

{{/*
`text` of a file of rules or of a board, for the job of `root`'s targets. The files read every job with gpumap in its name.
With another name in `job`, the objects read this job only.
*/}}
{{- define "gpumap.ofJob" -}}
{{- $job := .root.Values.job -}}
{{ ternary .text (.text | replace ".*gpumap.*" $job) (contains "gpumap" $job) }}
{{- end -}}

{{/*
The release; with the alias under which a parent chart has gpumap, if it has one: two of them in one release must not
select each other's pods. No release's name has a "_" in it.
*/}}
{{- define "gpumap.instance" -}}
{{- if eq .Chart.Name "gpumap" -}}
{{ .Release.Name }}
{{- else -}}
{{ printf "%s_%s" .Release.Name .Chart.Name | trunc 63 | trimAll "-_" }}
{{- end -}}
{{- end -}}

{{/* The name is gpumap, whatever nameOverride or an alias says: `kubectl gpumap` looks for it. */}}
{{- define "gpumap.selectorLabels" -}}
app.kubernetes.io/name: gpumap
app.kubernetes.io/instance: {{ include "gpumap.instance" . | quote }}
{{- end -}}

{{/*
By it a ServiceMonitor finds its Service, and nothing else does: Argo CD rewrites app.kubernetes.io/instance on the objects
that it tracks by label, though not on the pods.
*/}}
{{- define "gpumap.serviceLabel" -}}
gpumap/release: {{ include "gpumap.fullname" . }}
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

{{/* The annotations of an object, as YAML: `own` and commonAnnotations of `root`, which cannot overwrite them. Or empty. */}}
{{- define "gpumap.annotations" -}}
{{- with mergeOverwrite (deepCopy (.root.Values.commonAnnotations | default dict)) (.own | default dict) }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* Without the chart's version: a chart that changes nothing in the pods does not replace them. */}}
{{- define "gpumap.podLabels" -}}
{{- $own := include "gpumap.ownLabels" . | fromYaml -}}
{{- $_ := unset $own "helm.sh/chart" -}}
{{- mergeOverwrite (deepCopy (.Values.commonLabels | default dict)) (.Values.podLabels | default dict) $own | toYaml -}}
{{- end -}}

{{- define "gpumap.podAnnotations" -}}
{{- $annotations := dict "kubectl.kubernetes.io/default-container" "gpumap" -}}
{{- mergeOverwrite $annotations (.Values.podAnnotations | default dict) | toYaml -}}
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
The container's variables, as a list in YAML. One of extraEnv takes the place of the chart's own of its name: a name may
stand in the list once alone, says the API server to whoever applies on its side.
*/}}
{{- define "gpumap.environment" -}}
{{- $given := .Values.extraEnv | default list -}}
{{- $names := list -}}
{{- range $given }}{{ $names = append $names .name }}{{ end -}}
{{- $all := list -}}
{{- range include "gpumap.ownEnvironment" . | fromYamlArray -}}
{{- if not (has .name $names) }}{{ $all = append $all . }}{{ end -}}
{{- end -}}
{{- concat $all $given | toYaml -}}
{{- end -}}

{{/* The last two tell NVIDIA's runtime to show every GPU and to bring NVML. No GPU is taken from the scheduler. */}}
{{- define "gpumap.ownEnvironment" -}}
{{ include "gpumap.places" . | trim }}
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: NODE_IP
  valueFrom:
    fieldRef:
      fieldPath: status.hostIP
- name: NVIDIA_VISIBLE_DEVICES
  value: all
- name: NVIDIA_DRIVER_CAPABILITIES
  value: utility
{{- end -}}

{{/* A duration that the schema lets in, in milliseconds. */}}
{{- define "gpumap.milliseconds" -}}
{{- $units := dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000 "d" 86400000 "w" 604800000 "y" 31536000000 -}}
{{- $sum := 0 -}}
{{- range regexFindAll "[0-9]+[a-z]+" (. | default "") -1 -}}
{{- $sum = add $sum (mul (regexFind "[0-9]+" . | atoi) (index $units (regexFind "[a-z]+" .))) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}

{{/*
How old data may be, where two collections take longer than gpumap's own 60 s; else empty. With less than the interval
the agent does not start; with less than two, one that comes late would end every series.
*/}}
{{- define "gpumap.staleAfter" -}}
{{- $two := include "gpumap.milliseconds" .Values.interval | atoi | mul 2 -}}
{{- if gt $two 60000 -}}
{{ div (add $two 999) 1000 }}s
{{- end -}}
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

{{/* The pod's security context: the chart's own, and podSecurityContext over it. */}}
{{- define "gpumap.podSecurityContext" -}}
{{- /* The kubelet's socket and checkpoint open to uid 0 only; no capability is needed. */ -}}
{{- $context := dict "runAsUser" 0 "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- with include "gpumap.seLinuxOptions" . | fromYaml -}}
{{- $_ := set $context "seLinuxOptions" . -}}
{{- end -}}
{{- mergeOverwrite $context (.Values.podSecurityContext | default dict) | toYaml -}}
{{- end -}}

{{/* The container's: the chart's own, and securityContext over it. */}}
{{- define "gpumap.securityContext" -}}
{{- $context := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true -}}
{{- $_ := set $context "capabilities" (dict "drop" (list "ALL")) -}}
{{- mergeOverwrite $context (.Values.securityContext | default dict) | toYaml -}}
{{- end -}}
