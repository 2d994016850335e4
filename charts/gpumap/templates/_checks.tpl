{{/*
Combinations of values that cannot work. The schema cannot check them, or not with a plain message. Each group is about one
part of the values and stops at the first mistake, with one line.
*/}}
{{- define "gpumap.checks" -}}
{{- include "gpumap.checkImage" . -}}
{{- include "gpumap.checkName" . -}}
{{- include "gpumap.checkPod" . -}}
{{- include "gpumap.checkPaths" . -}}
{{- include "gpumap.checkNetwork" . -}}
{{- include "gpumap.checkWeb" . -}}
{{- if and .Values.serviceMonitor.enabled .Values.podMonitor.enabled }}
  {{- fail "serviceMonitor.enabled and podMonitor.enabled: each agent would be scraped twice, and every sum would double. Remove one." }}
{{- end }}
{{- if and .Values.serviceMonitor.enabled (not .Values.service.enabled) }}
  {{- fail "serviceMonitor.enabled: a ServiceMonitor finds the pods through the Service. Set service.enabled, or use podMonitor." }}
{{- end }}
{{- if and .Values.service.nodePort (eq .Values.service.type "ClusterIP") }}
  {{- fail "service.nodePort: a Service of type ClusterIP has no port on the nodes. Set service.type." }}
{{- end }}
{{- if and (eq .Values.service.clusterIP "None") (ne .Values.service.type "ClusterIP") }}
  {{- fail (printf "service.clusterIP is None: Kubernetes refuses that for a Service of type %s. Remove one." .Values.service.type) }}
{{- end }}
{{- range list "autoscaling" "opencost" }}
  {{- if and (index $.Values.prometheusRule .) (not $.Values.prometheusRule.enabled) }}
    {{- fail (printf "prometheusRule.%s is set, but prometheusRule.enabled is false: the chart would make no rules. Set prometheusRule.enabled." .) }}
  {{- end }}
{{- end }}
{{- range $name := list "serviceMonitor" "podMonitor" }}
  {{- if (index $.Values $name).enabled }}
    {{- include "gpumap.checkMonitor" (dict "name" $name "monitor" (index $.Values $name) "values" $.Values "namespace" (include "gpumap.namespace" $)) }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* An empty name would end as ImagePullBackOff on every node. */}}
{{- define "gpumap.checkImage" -}}
{{- if not .Values.image.repository }}
  {{- fail "image.repository is empty: set it to an image that the nodes can pull, such as registry.example.com/gpumap, which you build with `make image`." }}
{{- end }}
{{- end -}}

{{/* A Service's name is a DNS label that starts with a letter (RFC 1035). A release's name may be another one. */}}
{{- define "gpumap.checkName" -}}
{{- $name := include "gpumap.fullname" . }}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $name) }}
  {{- fail (printf "The release's full name is %s. A Service's name must have only small letters, digits and -, and start with a letter. Set fullnameOverride." $name) }}
{{- end }}
{{- end -}}

{{- define "gpumap.checkPod" -}}
{{- with .Values }}
  {{- $surge := dig "rollingUpdate" "maxSurge" 0 (.updateStrategy | default dict) | toString }}
  {{- if not (has $surge (list "0" "0%")) }}
    {{- fail (printf "updateStrategy.rollingUpdate.maxSurge is %s: two agents on one node would export the counters of two processes under one name, and a bill would count them twice. Set it to 0." $surge) }}
  {{- end }}
  {{- if and .hostNetwork .hostPort (ne (int .hostPort) (int .port)) }}
    {{- fail (printf "hostPort is %d and port is %d: with hostNetwork both are the same port. Set port, and leave hostPort 0." (int .hostPort) (int .port)) }}
  {{- end }}
  {{- if and .interval (lt (include "gpumap.milliseconds" .interval | atoi) 100) }}
    {{- fail (printf "interval is %s: the agent would only collect. Set at least 100ms." .interval) }}
  {{- end }}
  {{- range $place := list "podSecurityContext" "securityContext" }}
    {{- $context := index $.Values $place | default dict }}
    {{- if or (ne (int64 (get $context "runAsUser" | default 0)) 0) (get $context "runAsNonRoot") }}
      {{- fail (printf "%s: another user than 0 cannot read the kubelet's socket and files. Remove runAsUser and runAsNonRoot." $place) }}
    {{- end }}
  {{- end }}
  {{- if and (has "none" .dialects) (gt (len .dialects) 1) }}
    {{- fail "dialects: none cannot be combined with other names." }}
  {{- end }}
  {{- range list "dcgm" "all" }}
    {{- if and (has . $.Values.dialects) (has "dcgm49" $.Values.dialects) }}
      {{- fail (printf "dialects: %s and dcgm49 share metric names. Select only one." .) }}
    {{- end }}
  {{- end }}
  {{- $values := dict "no-native" "native" "dialect" "dialects" "listen" "port" }}
  {{- $given := dict }}
  {{- range .extraArgs }}{{ $_ := set $given . (printf "extraArgs: %s" .) }}{{ end }}
  {{- range .extraEnv }}{{ $_ := set $given .name (printf "extraEnv: %s" .name) }}{{ end }}
  {{- range $one, $place := $given }}
    {{- $flag := regexFind "^(--|GPUMAP_)[^=]+" $one | trimPrefix "--" | trimPrefix "GPUMAP_" | lower | replace "_" "-" }}
    {{- with get $values $flag }}
      {{- fail (printf "%s: set %s instead, so that the chart knows of it." $place .) }}
    {{- end }}
  {{- end }}
  {{- if not .native }}
    {{- if has "native" .dialects }}
      {{- fail "native is false, and dialects names native. Leave one out." }}
    {{- end }}
    {{- if or (has "none" .dialects) (not .dialects) }}
      {{- fail "native is false, and dialects names no other metrics to serve. Name a dialect, such as dcgm." }}
    {{- end }}
    {{- if .prometheusRule.enabled }}
      {{- fail "prometheusRule.enabled: every alert and rule reads the native metrics, so it needs native: true." }}
    {{- end }}
    {{- if .dashboards.enabled }}
      {{- fail "dashboards.enabled: the boards read the native metrics, so they need native: true." }}
    {{- end }}
  {{- end }}
  {{- $folders := include "gpumap.hostFolders" $ | fromYaml | keys }}
  {{- $own := concat $folders (include "gpumap.webSecrets" $ | fromYaml | keys) (list "tmp" "nvml") }}
  {{- range $value := list "initContainers" "extraContainers" }}
    {{- range index $.Values $value }}
      {{- if eq .name "gpumap" }}
        {{- fail (printf "%s: gpumap is the name of the chart's own container. Take another name." $value) }}
      {{- end }}
    {{- end }}
  {{- end }}
  {{- range .extraVolumes }}
    {{- if has .name $own }}
      {{- fail (printf "extraVolumes: the chart has a volume called %s. Take another name." .name) }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Kubernetes refuses such paths only when it makes the DaemonSet, or the runtime when a pod starts. */}}
{{- define "gpumap.checkPaths" -}}
{{- $paths := dict "kubelet.rootDir" .Values.kubelet.rootDir "nvml.hostPath" .Values.nvml.hostPath "nvml.library" .Values.nvml.library }}
{{- range .Values.extraVolumes }}
  {{- with .hostPath }}
    {{- $name := printf "extraVolumes: the hostPath %v" .path }}
    {{- if not (hasPrefix "/" (toString .path)) }}
      {{- fail (printf "%s is not absolute. Write the whole path on the node." $name) }}
    {{- end }}
    {{- $_ := set $paths $name .path }}
  {{- end }}
{{- end }}
{{- range $name, $path := $paths }}
  {{- if regexMatch "(^|/)\\.\\.?(/|$)" (toString $path) }}
    {{- fail (printf "%s has . or .. as a part of the path. Write the path without it." $name) }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Values that seem to close the port, and do not. */}}
{{- define "gpumap.checkNetwork" -}}
{{- if and .Values.networkPolicy.enabled .Values.hostNetwork }}
  {{- fail "networkPolicy.enabled does nothing with hostNetwork: a NetworkPolicy does not apply to pods on the node's network. Remove one. With hostNetwork, protect the port by basicAuth, tls.clientCaSecretName or a firewall." }}
{{- end }}
{{- if and .Values.networkPolicy.from (not .Values.networkPolicy.enabled) }}
  {{- fail "networkPolicy.from is set, but networkPolicy.enabled is false: every pod can connect. Set networkPolicy.enabled." }}
{{- end }}
{{- end -}}

{{- define "gpumap.checkWeb" -}}
{{- with .Values }}
  {{- $own := .webConfig.secretName }}
  {{- if and $own (or .tls.secretName .tls.clientCaSecretName .tls.minVersion .basicAuth.users) }}
    {{- fail "webConfig.secretName is a whole web-config.yml of your own, instead of tls and basicAuth. Remove one." }}
  {{- end }}
  {{- if and .webConfig.tls (not $own) }}
    {{- fail "webConfig.tls describes the web-config.yml in webConfig.secretName, which is empty. For TLS without a file of your own, set tls.secretName." }}
  {{- end }}
  {{- if and (or .tls.clientCaSecretName .tls.minVersion) (not .tls.secretName) }}
    {{- fail (printf "tls.%s is set, and there is no TLS without tls.secretName." (ternary "clientCaSecretName" "minVersion" (not (empty .tls.clientCaSecretName)))) }}
  {{- end }}
  {{- /* Not the schema's: it would show the password. */}}
  {{- range $name, $hash := .basicAuth.users }}
    {{- if not (regexMatch "^\\$2[aby]\\$(0[4-9]|1[0-8])\\$[./A-Za-z0-9]{53}$" $hash) }}
      {{- fail (printf "basicAuth.users.%s is not a bcrypt hash with a cost of 4 to 18. Never write the password itself: htpasswd -nBC 10 %s asks for it and gives the hash." $name $name) }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* What Prometheus, its operator or the agents would refuse in `monitor`, which is switched on and called `name`. */}}
{{- define "gpumap.checkMonitor" -}}
{{- $tls := .monitor.tlsConfig | default dict }}
{{- with .monitor }}
  {{- if gt (include "gpumap.milliseconds" .scrapeTimeout | atoi) (include "gpumap.milliseconds" .interval | atoi) }}
    {{- fail (printf "%s.scrapeTimeout %s is longer than %s.interval %s, which Prometheus refuses." $.name .scrapeTimeout $.name .interval) }}
  {{- end }}
{{- end }}
{{- range list (list "ca" "caFile") (list "cert" "certFile") (list "keySecret" "keyFile") }}
  {{- if and (index $tls (first .)) (index $tls (last .)) }}
    {{- fail (printf "%s.tlsConfig has %s and %s. Remove one." $.name (first .) (last .)) }}
  {{- end }}
{{- end }}
{{- $elsewhere := and .monitor.namespace (ne .monitor.namespace .namespace) }}
{{- if and $elsewhere .values.tls.secretName (not (or $tls.ca $tls.caFile $tls.insecureSkipVerify)) }}
  {{- fail (printf "%s.tlsConfig has no ca: Secret %s is in namespace %s, and the monitor in %s can read only Secrets of its own. Copy ca.crt there and name it in ca." .name .values.tls.secretName .namespace .monitor.namespace) }}
{{- end }}
{{- $certificate := or $tls.cert $tls.certFile }}
{{- if ne (empty $certificate) (empty (or $tls.keySecret $tls.keyFile)) }}
  {{- fail (printf "%s.tlsConfig has a certificate without its key, or a key without its certificate: cert and keySecret%s go together." $.name (ternary ", or certFile and keyFile," "" (eq $.name "serviceMonitor"))) }}
{{- end }}
{{- if and .values.basicAuth.users (not .monitor.basicAuth) }}
  {{- fail (printf "%s.basicAuth is missing: basicAuth.users requires a password, and the agents would answer Prometheus with 401. Name a Secret with it." .name) }}
{{- end }}
{{- if and .values.tls.clientCaSecretName (not $certificate) }}
  {{- fail (printf "%s.tlsConfig has no cert and keySecret: tls.clientCaSecretName requires a client certificate, and Prometheus has none." .name) }}
{{- end }}
{{- if and .values.webConfig.tls (not (or $tls.ca $tls.caFile $tls.insecureSkipVerify $tls.serverName)) }}
  {{- fail (printf "%s.tlsConfig has no ca: with webConfig.tls the chart does not know the authority of the agents' certificate, and Prometheus would not trust it. Set ca, or serverName for a public authority." .name) }}
{{- end }}
{{- end -}}
