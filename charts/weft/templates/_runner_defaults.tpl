{{/* What the operator gives every runner pod: the fields of weft_operator.core.runner_defaults.RunnerDefaults in camelCase. */}}
{{- define "weft.runnerDefaults" -}}
{{- $runner := .Values.runner -}}
{{- $pod := include "weft.overlay" (dict "root" $ "component" "runner") | fromYaml -}}
{{- $defaults := dict
  "image" (include "weft.image" (dict "root" $ "image" $runner.image))
  "imagePullPolicy" $.Values.image.pullPolicy
  "imagePullSecrets" (list)
  "supervisor" (include "weft.address" (dict "root" $ "component" "supervisor"))
  "depot" (include "weft.depotUrl" $)
  "env" (include "weft.byKey" (list "name" (concat (include "weft.tracingEnv" $ | fromYamlArray) (default list $pod.container.env))) | fromYamlArray)
  "volumes" (default (list) $pod.spec.volumes)
  "volumeMounts" (default (list) $pod.container.volumeMounts)
  "resources" $runner.resources
  "securityContexts" (dict "pod" $pod.spec.securityContext "container" $pod.container.securityContext)
  "podLabels" (default (dict) $pod.metadata.labels)
  "podAnnotations" (default (dict) $pod.metadata.annotations)
  "poolsAtATime" $runner.poolsAtATime
  "logLevel" .Values.logLevel
  "logFormat" "json" -}}
{{- range .Values.imagePullSecrets -}}
{{- $_ := set $defaults "imagePullSecrets" (append $defaults.imagePullSecrets .name) -}}
{{- end -}}
{{- if .Values.networkPolicy.enabled -}}
{{- $_ := set $defaults "networkPolicies" true -}}
{{- end -}}
{{- with $pod.container.command -}}
{{- $_ := set $defaults "command" . -}}
{{- end -}}
{{- if ne .Values.tls.mode "none" -}}
{{- $_ := set $defaults "tlsSecret" (printf "%s-runner-tls" (include "weft.fullname" $)) -}}
{{- end -}}
{{- toYaml $defaults -}}
{{- end -}}
