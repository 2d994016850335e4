{{/* Values that cannot be had together, which the schema cannot say in plain words. */}}
{{- define "gpumap.checks" -}}
{{- $name := include "gpumap.fullname" . }}
{{- if not (contains "gpumap" $name) }}
  {{- fail (printf "The release's full name, cut to 63 characters, is %s, without gpumap in it, by which the alerts find gpumap's targets. Set fullnameOverride." $name) }}
{{- end }}
{{- with .Values }}
  {{- if and .serviceMonitor.enabled .podMonitor.enabled }}
    {{- fail "serviceMonitor.enabled and podMonitor.enabled: each agent would be scraped twice, and every sum be double. Leave one." }}
  {{- end }}
  {{- $own := .webConfig.secretName }}
  {{- if and $own (or .tls.secretName .tls.clientCaSecretName .tls.minVersion .basicAuth.users) }}
    {{- fail "webConfig.secretName is a whole web-config.yml of your own, instead of tls and basicAuth. Leave one." }}
  {{- end }}
  {{- if and .webConfig.tls (not $own) }}
    {{- fail "webConfig.tls says what the web-config.yml in webConfig.secretName does, and there is none. For TLS without a file of your own: tls.secretName." }}
  {{- end }}
  {{- if and (or .tls.clientCaSecretName .tls.minVersion) (not .tls.secretName) }}
    {{- fail (printf "tls.%s is set, and there is no TLS without tls.secretName." (ternary "clientCaSecretName" "minVersion" (not (empty .tls.clientCaSecretName)))) }}
  {{- end }}
  {{- range $name := list "serviceMonitor" "podMonitor" }}
    {{- $monitor := index $.Values $name }}
    {{- $tls := $monitor.tlsConfig | default dict }}
    {{- if $monitor.enabled }}
      {{- if and $.Values.basicAuth.users (not $monitor.basicAuth) }}
        {{- fail (printf "%s.basicAuth is missing: basicAuth.users wants a password, and Prometheus would be sent away (401). Name a Secret with it." $name) }}
      {{- end }}
      {{- if and $.Values.tls.clientCaSecretName (not (or (and $tls.cert $tls.keySecret) $tls.certFile)) }}
        {{- fail (printf "%s.tlsConfig has no cert and keySecret: tls.clientCaSecretName wants a client's certificate, and Prometheus has none." $name) }}
      {{- end }}
    {{- end }}
  {{- end }}
  {{- $surge := dig "rollingUpdate" "maxSurge" 0 (.updateStrategy | default dict) | toString }}
  {{- if not (has $surge (list "0" "0%")) }}
    {{- fail (printf "updateStrategy.rollingUpdate.maxSurge is %s: two agents of one node at once would tell two processes' counters under one name, and a bill would count them twice. Leave it 0." $surge) }}
  {{- end }}
  {{- if and (has "none" .dialects) (gt (len .dialects) 1) }}
    {{- fail "dialects: none cannot be combined with other names." }}
  {{- end }}
  {{- $root := printf "%s/" .kubelet.rootDir }}
  {{- $state := printf "%s/" .stateFile.hostPath }}
  {{- if and .stateFile.hostPath (or (hasPrefix $root $state) (hasPrefix $state $root)) }}
    {{- fail (printf "stateFile.hostPath %s lies in the kubelet's root, or holds it: gpumap would have write access to every pod's volumes. Take a folder of its own." .stateFile.hostPath) }}
  {{- end }}
{{- end }}
{{- end -}}
