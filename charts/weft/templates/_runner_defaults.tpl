{{/* What the operator gives every runner pod: the fields of weft_operator.core.runner_defaults.RunnerDefaults in camelCase. */}}
{{- define "weft.runnerDefaults" -}}
{{- $runner := .Values.runner -}}
{{- $common := .Values.common -}}
{{- $defaults := dict
  "image" (include "weft.image" (dict "root" $ "image" $runner.image))
  "imagePullPolicy" $runner.image.pullPolicy
  "imagePullSecrets" (list)
  "supervisor" (include "weft.address" (dict "root" $ "component" "supervisor"))
  "depot" (include "weft.depotUrl" $)
  "env" (concat (include "weft.tracingEnv" $ | fromYamlArray) $common.extraEnv $runner.extraEnv | default list)
  "volumes" (concat $common.extraVolumes $runner.extraVolumes | default list)
  "volumeMounts" (concat $common.extraVolumeMounts $runner.extraVolumeMounts | default list)
  "resources" $runner.resources
  "securityContexts" (dict "pod" $runner.podSecurityContext "container" $runner.securityContext)
  "podLabels" (mergeOverwrite (dict) $common.podLabels $runner.podLabels)
  "podAnnotations" (mergeOverwrite (dict) $common.podAnnotations $runner.podAnnotations)
  "poolsAtATime" $runner.poolsAtATime
  "logLevel" .Values.logLevel
  "logFormat" "json" -}}
{{- range .Values.imagePullSecrets -}}
{{- $_ := set $defaults "imagePullSecrets" (append $defaults.imagePullSecrets .name) -}}
{{- end -}}
{{- if .Values.networkPolicy.enabled -}}
{{- $_ := set $defaults "networkPolicies" true -}}
{{- end -}}
{{- with $runner.command -}}
{{- $_ := set $defaults "command" . -}}
{{- end -}}
{{- if ne .Values.tls.mode "none" -}}
{{- $_ := set $defaults "tlsSecret" (printf "%s-runner-tls" (include "weft.fullname" $)) -}}
{{- end -}}
{{- toYaml $defaults -}}
{{- end -}}
