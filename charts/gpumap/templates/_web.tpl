{{/* "true" if the page is served by TLS, else empty. */}}
{{- define "gpumap.tls" -}}
{{- if or .Values.tls.secretName .Values.webConfig.tls }}true{{ end -}}
{{- end -}}

{{/* The Secret with web-config.yml, or empty. */}}
{{- define "gpumap.webConfigSecret" -}}
{{- if .Values.webConfig.secretName -}}
{{ .Values.webConfig.secretName }}
{{- else if or .Values.tls.secretName .Values.basicAuth.users -}}
{{ include "gpumap.fullname" . }}-web-config
{{- end -}}
{{- end -}}

{{/* Prometheus' exporter-toolkit: docs/web-configuration.md. */}}
{{- define "gpumap.webConfig" -}}
{{- with .Values.tls }}
{{- if .secretName }}
tls_server_config:
  cert_file: /etc/gpumap/tls/tls.crt
  key_file: /etc/gpumap/tls/tls.key
  {{- with .minVersion }}
  min_version: {{ . }}
  {{- end }}
  {{- if .clientCaSecretName }}
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: /etc/gpumap/client-ca/ca.crt
  {{- end }}
{{- end }}
{{- end }}
{{- with .Values.basicAuth.users }}
basic_auth_users:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/*
The Secrets for serving the page, each mounted as a directory: {"name": {"secret": …, "path": …, "keys": […]}}. It is not a
subPath, because the kubelet renews certificates only in a directory.
*/}}
{{- define "gpumap.webSecrets" -}}
{{- with include "gpumap.webConfigSecret" . }}
web-config: {secret: {{ . | quote }}, path: /etc/gpumap/web-config, keys: []}
{{- end }}
{{- with .Values.tls }}
{{- with .secretName }}
tls: {secret: {{ . | quote }}, path: /etc/gpumap/tls, keys: [tls.crt, tls.key]}
{{- end }}
{{- with .clientCaSecretName }}
client-ca: {secret: {{ . | quote }}, path: /etc/gpumap/client-ca, keys: [ca.crt]}
{{- end }}
{{- end }}
{{- end -}}
