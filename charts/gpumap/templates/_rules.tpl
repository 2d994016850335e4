{{/* Where the expression of an alert has a number of prometheusRule.thresholds: at the end of a text. */}}
{{- define "gpumap.thresholds" -}}
GpumapGpuIdle: {"> 3600": idleSeconds}
GpumapGpuHeldIdle: {"> 3600": idleSeconds}
GpumapGpuMaybeIdle: {"> 7200": maybeIdleSeconds}
GpumapGpuBusy: {"> 0.95": busyRatio}
GpumapGpuMemoryNearlyFull: {"> 0.95": memoryRatio}
GpumapGpuTemperatureHigh: {'"gpu"}[5m])) > 85': temperatureCelsius, '"memory"}[5m])) > 95': memoryTemperatureCelsius}
{{- end -}}

{{/* The alert `rule` of the files with the settings `values` of prometheusRule, as YAML. */}}
{{- define "gpumap.alert" -}}
{{- $rule := deepCopy .rule -}}
{{- $_ := set $rule "labels" (mergeOverwrite ($rule.labels | default dict) (.values.alertLabels | default dict)) -}}
{{- range $text, $name := get (include "gpumap.thresholds" . | fromYaml) $rule.alert | default dict -}}
  {{- $own := regexReplaceAll "[0-9.]+$" $text (index $.values.thresholds $name | toJson | trimAll "\"") -}}
  {{- $_ := set $rule "expr" (replace $text $own $rule.expr) -}}
{{- end -}}
{{- if and .values.ignoredXids (has $rule.alert (list "GpumapGpuXid" "GpumapContainerXid")) -}}
  {{- $codes := join "|" .values.ignoredXids -}}
  {{- $expr := replace `reason=~"xid_.+"` (printf `reason=~"xid_.+",reason!~"xid_(%s)"` $codes) $rule.expr -}}
  {{- $_ := set $rule "expr" (replace "container_xid_errors_total{" (printf `container_xid_errors_total{xid!~"%s",` $codes) $expr) -}}
{{- end -}}
{{- with get (.values.for | default dict) $rule.alert -}}
  {{- $_ := set $rule "for" . -}}
{{- end -}}
{{- if .values.runbookUrl -}}
  {{- $page := trimPrefix "docs/runbooks/" $rule.annotations.runbook_url -}}
  {{- $_ := set $rule.annotations "runbook_url" (printf "%s/%s" (trimSuffix "/" .values.runbookUrl) $page) -}}
{{- else -}}
  {{- $_ := unset $rule.annotations "runbook_url" -}}
{{- end -}}
{{- toYaml $rule -}}
{{- end -}}

{{/*
The groups of rules/ that are switched on, as YAML. alerts.yaml, autoscaling.yaml and opencost.yaml have their own switches;
`recording` switches the others. The files are no templates of Helm: their braces are Prometheus's.
*/}}
{{- define "gpumap.ruleGroups" -}}
{{- $values := .Values.prometheusRule -}}
{{- $switches := dict "alerts.yaml" $values.alerts "autoscaling.yaml" $values.autoscaling "opencost.yaml" $values.opencost -}}
{{- $alerts := list -}}
{{- $groups := list -}}
{{- range $path, $_ := .Files.Glob "rules/*.yaml" -}}
  {{- range (include "gpumap.ofJob" (dict "root" $ "text" ($.Files.Get $path)) | fromYaml).groups -}}
    {{- $rules := list -}}
    {{- range .rules -}}
      {{- if not .alert -}}
        {{- $rules = append $rules . -}}
      {{- else -}}
        {{- $alerts = append $alerts .alert -}}
        {{- if not (has .alert $values.disabledAlerts) -}}
          {{- $rules = append $rules (include "gpumap.alert" (dict "rule" . "values" $values) | fromYaml) -}}
        {{- end -}}
      {{- end -}}
    {{- end -}}
    {{- if and $rules (dig (base $path) $values.recording $switches) -}}
      {{- $groups = append $groups (set . "rules" $rules) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- range $value, $names := dict "disabledAlerts" $values.disabledAlerts "for" (keys ($values.for | default dict)) -}}
  {{- range $names -}}
    {{- if not (has . $alerts) -}}
      {{- fail (printf "prometheusRule.%s: no alert is called %s. Known alerts: %s." $value . (join ", " $alerts)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if not $groups -}}
  {{- fail "prometheusRule.enabled is set, but alerts, recording, autoscaling and opencost are all off: nothing is left. Turn one on." -}}
{{- end -}}
{{- toYaml $groups -}}
{{- end -}}
