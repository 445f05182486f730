{{/* What OpenTelemetry's SDK reads; an empty list where spans are off. */}}
{{- define "weft.tracingEnv" -}}
{{- $env := list -}}
{{- with .Values.tracing -}}
{{- if .endpoint -}}
{{- $env = list
  (dict "name" "OTEL_EXPORTER_OTLP_ENDPOINT" "value" .endpoint)
  (dict "name" "OTEL_EXPORTER_OTLP_PROTOCOL" "value" .protocol)
  (dict "name" "OTEL_TRACES_SAMPLER" "value" "parentbased_traceidratio")
  (dict "name" "OTEL_TRACES_SAMPLER_ARG" "value" (toString .ratio)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $env -}}
{{- end -}}

{{/* The way to the collector, as a rule of a NetworkPolicy; nothing where spans are off. */}}
{{- define "weft.tracingRule" -}}
{{- with .Values.tracing.endpoint -}}
- ports: [{port: {{ splitList ":" . | last }}}]
{{- with $.Values.networkPolicy.tracingTo }}
  to:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- end -}}
{{- end -}}
