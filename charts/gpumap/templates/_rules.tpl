{{/* The alert `rule` of the files with the settings `values` of prometheusRule, as YAML. */}}
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
{{- range $values.disabledAlerts -}}
  {{- if not (has . $alerts) -}}
    {{- fail (printf "prometheusRule.disabledAlerts: no alert is called %s. Known alerts: %s." . (join ", " $alerts)) -}}
  {{- end -}}
{{- end -}}
{{- if not $groups -}}
  {{- fail "prometheusRule.enabled is set, but alerts, recording, autoscaling and opencost are all off: nothing is left. Turn one on." -}}
{{- end -}}
{{- toYaml $groups -}}
{{- end -}}
