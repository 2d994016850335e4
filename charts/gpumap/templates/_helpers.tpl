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
The release's name, with the alias of gpumap in a parent chart, if it has one. Two aliases in one release must not select each
other's pods. No release's name contains a "_".
*/}}
{{- define "gpumap.instance" -}}
{{- if eq .Chart.Name "gpumap" -}}
{{ .Release.Name }}
{{- else -}}
{{ printf "%s_%s" .Release.Name .Chart.Name | trunc 63 | trimAll "-_" }}
{{- end -}}
{{- end -}}

{{/* The name is always gpumap, also with nameOverride or an alias: `kubectl gpumap` selects by it. */}}
{{- define "gpumap.selectorLabels" -}}
app.kubernetes.io/name: gpumap
app.kubernetes.io/instance: {{ include "gpumap.instance" . | quote }}
{{- end -}}

{{/*
Only the ServiceMonitor selects its Service by this label: Argo CD rewrites app.kubernetes.io/instance on the objects that it
tracks by label, but not on the pods.
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

{{/* commonLabels cannot replace the chart's own labels, because selectors use them. */}}
{{- define "gpumap.labels" -}}
{{- $common := deepCopy (.Values.commonLabels | default dict) -}}
{{ include "gpumap.ownLabels" . | fromYaml | mergeOverwrite $common | toYaml }}
{{- end -}}

{{/* `labels` of `root`'s release, and labels and additionalLabels of the values `of`, which cannot overwrite them. */}}
{{- define "gpumap.labelsWith" -}}
{{- $more := mergeOverwrite dict (.of.labels | default dict) (.of.additionalLabels | default dict) -}}
{{- include "gpumap.labels" .root | fromYaml | mergeOverwrite $more | toYaml -}}
{{- end -}}

{{/* The annotations of an object, as YAML: `own` and commonAnnotations of `root`, which cannot overwrite them. Or empty. */}}
{{- define "gpumap.annotations" -}}
{{- with mergeOverwrite (deepCopy (.root.Values.commonAnnotations | default dict)) (.own | default dict) }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* Without the chart's version, so a new chart with the same pods does not replace them. */}}
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
{{- with $.Values.global.imageRegistry | default .registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end -}}

{{/* Pull secrets of a pod, as YAML or empty: each is a name, or an object with a name. */}}
{{- define "gpumap.imagePullSecrets" -}}
{{- $secrets := list -}}
{{- range concat (.Values.global.imagePullSecrets | default list) (.Values.imagePullSecrets | default list) -}}
{{- $secrets = kindIs "string" . | ternary (dict "name" .) . | append $secrets -}}
{{- end -}}
{{- with $secrets }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/*
Where the sources are, if not at gpumap's defaults: a list of variables in YAML. They are not flags of `serve`, because
`kubectl exec … gpumap doctor` needs them too.
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
{{- if .Values.privileges.gpuFractioning }}
- name: GPUMAP_GPU_FRACTIONING_MAP
  value: /var/run/gpu-fractioning/map
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
The container's variables, as a list in YAML. An entry of extraEnv replaces the chart's own of the same name: with
server-side apply, the API server permits each name only once.
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

{{/*
Commands in the agent's pod ask the agent of GPUMAP_URL. With TLS or a password they read the node themselves.
The last two make NVIDIA's runtime show every GPU and bring NVML. The scheduler loses no GPU.
*/}}
{{- define "gpumap.ownEnvironment" -}}
{{ include "gpumap.places" . | trim }}
{{- if not (or (include "gpumap.webConfigSecret" .) (regexMatch "--web-config" (join " " .Values.extraArgs))) }}
- name: GPUMAP_URL
  value: http://127.0.0.1:{{ .Values.port }}
{{- end }}
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

{{/* A duration that fits the schema, in milliseconds. */}}
{{- define "gpumap.milliseconds" -}}
{{- $units := dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000 "d" 86400000 "w" 604800000 "y" 31536000000 -}}
{{- $sum := 0 -}}
{{- range regexFindAll "[0-9]+[a-z]+" (. | default "") -1 -}}
{{- $sum = add $sum (mul (regexFind "[0-9]+" . | atoi) (index $units (regexFind "[a-z]+" .))) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}

{{/*
How old data may be, if two collections take longer than gpumap's default of 60 s, else empty. With less than one interval
the agent does not start. With less than two, one late collection would end every series.
*/}}
{{- define "gpumap.staleAfter" -}}
{{- $two := include "gpumap.milliseconds" .Values.interval | atoi | mul 2 -}}
{{- if gt $two 60000 -}}
{{ div (add $two 999) 1000 }}s
{{- end -}}
{{- end -}}

{{/*
The node's directories that the agent reads, each at its own path: {"name": {"path": …, "type": …}}.
They are directories, never the socket: a restarted kubelet makes a new socket. Only the first one must exist, so a pod with a
wrong root waits. A missing directory of an optional step must not keep the agent from starting.
Kubelets keep the checkpoint in /var/lib/kubelet, also with another root.
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
{{- if .Values.privileges.gpuFractioning }}
gpu-fractioning: {path: /var/run/gpu-fractioning/map, type: DirectoryOrCreate}
{{- end }}
{{- if .Values.privileges.podLogs }}
pod-logs: {path: /var/log/pods, type: DirectoryOrCreate}
container-logs: {path: /var/log/containers, type: DirectoryOrCreate}
{{- end }}
{{- end -}}

{{/*
The pod's security context: the chart's own, and podSecurityContext over it. The kubelet's socket and checkpoint open to
uid 0 only; no capability is needed. OpenShift's policy forbids the type container_t to connect to the kubelet's sockets;
spc_t is the type for containers that manage the node (container-selinux).
*/}}
{{- define "gpumap.podSecurityContext" -}}
{{- $context := dict "runAsUser" 0 "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- if .Values.openshift.securityContextConstraints -}}
{{- $_ := set $context "seLinuxOptions" (dict "type" "spc_t") -}}
{{- end -}}
{{- mergeOverwrite $context (.Values.podSecurityContext | default dict) | toYaml -}}
{{- end -}}

{{/* The container's: the chart's own, and securityContext over it. */}}
{{- define "gpumap.securityContext" -}}
{{- $context := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true -}}
{{- $_ := set $context "capabilities" (dict "drop" (list "ALL")) -}}
{{- mergeOverwrite $context (.Values.securityContext | default dict) | toYaml -}}
{{- end -}}
