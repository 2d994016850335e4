{{/* One alert of the files, `rule`, as the `values` of prometheusRule want it, as YAML. */}}
{{- define "gpumap.alert" -}}
{{- $rule := deepCopy .rule -}}
{{- $_ := set $rule "labels" (mergeOverwrite ($rule.labels | default dict) (.values.alertLabels | default dict)) -}}
{{- if .values.runbookUrl -}}
  {{- $page := trimPrefix "docs/runbooks/" $rule.annotations.runbook_url -}}
  {{- $_ := set $rule.annotations "runbook_url" (printf "%s/%s" (trimSuffix "/" .values.runbookUrl) $page) -}}
{{- end -}}
{{- toYaml $rule -}}
{{- end -}}

{{/*
The groups of rules/ that are switched on, as YAML: alerts.yaml and autoscaling.yaml each by its own switch, every other
file by `recording`. They are read and never executed as templates: their braces are Prometheus'.
*/}}
{{- define "gpumap.ruleGroups" -}}
{{- $values := .Values.prometheusRule -}}
{{- $switches := dict "alerts.yaml" $values.alerts "autoscaling.yaml" $values.autoscaling -}}
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
{{- range $values.disabledAlerts -}}
  {{- if not (has . $alerts) -}}
    {{- fail (printf "prometheusRule.disabledAlerts: no alert is called %s; there are %s." . (join ", " $alerts)) -}}
  {{- end -}}
{{- end -}}
{{- if not $groups -}}
  {{- fail "prometheusRule.enabled is set, and alerts, recording and autoscaling are all off: nothing is left of it." -}}
{{- end -}}
{{- toYaml $groups -}}
{{- end -}}
