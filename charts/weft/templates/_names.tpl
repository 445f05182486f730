{{- define "weft.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 40 characters: names of components and Secrets are made of it. */}}
{{- define "weft.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "weft.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "weft.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "component" "gateway") -> labels that never change */}}
{{- define "weft.selector" -}}
app.kubernetes.io/name: {{ include "weft.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "weft.labels" -}}
{{ include "weft.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: weft
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* (dict "root" $ "component" c "name" suffix? "namespace" ns?) -> metadata of an object */}}
{{- define "weft.metadata" -}}
name: {{ include "weft.fullname" .root }}-{{ default .component .name }}
namespace: {{ default .root.Release.Namespace .namespace | quote }}
labels:
  {{- include "weft.labels" . | nindent 2 }}
{{- end -}}

{{/* (dict "root" $ "image" .Values.image) */}}
{{- define "weft.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "weft.poolNamespaces" -}}
{{- .Values.poolNamespaces | default (list .Release.Namespace) | uniq | join "," -}}
{{- end -}}

{{/* (dict "root" $ "component" "depot") -> the ServiceAccount of its pods, the chart's own where none is named */}}
{{- define "weft.serviceAccountName" -}}
{{- dig "spec" "serviceAccountName" "" ((index .root.Values .component).pod | default dict) | default (printf "%s-%s" (include "weft.fullname" .root) .component) -}}
{{- end -}}

{{/* (dict "root" $ "component" "gateway") -> "true" where it has several pods */}}
{{- define "weft.several" -}}
{{- $values := index .root.Values .component -}}
{{- if or (gt (int (default 1 $values.replicas)) 1) ($values.autoscaling | default dict).enabled -}}
true
{{- end -}}
{{- end -}}

{{/* Components of which one pod acts. */}}
{{- define "weft.singletons" -}}
scheduler predictor depot
{{- end -}}

{{/* (dict "root" $ "component" "scheduler") -> "true" where one of its pods acts and the others stand by */}}
{{- define "weft.standby" -}}
{{- if and (has .component (splitList " " (include "weft.singletons" .))) (gt (int (default 1 (index .root.Values .component).replicas)) 1) -}}
true
{{- end -}}
{{- end -}}

{{/*
(dict "root" $ "component" "scheduler") -> "true" where a Lease says which of its pods acts. A scheduler always has one:
its pods are the same whatever `replicas` is, so that the one that acts runs on when another comes or goes.
*/}}
{{- define "weft.elects" -}}
{{- if or (eq .component "scheduler") (include "weft.standby" .) -}}
true
{{- end -}}
{{- end -}}

{{/*
(dict "root" $ "component" "scheduler") -> where its peers find it. Of the pods of a singleton the one that acts
listens: their names lead to the addresses of all, ready or not, and a client takes the one that answers. So it is with
one pod, too: peers keep the address, and run on, when `replicas` changes.
*/}}
{{- define "weft.address" -}}
{{ include "weft.fullname" .root }}-{{ .component }}{{ has .component (splitList " " (include "weft.singletons" .)) | ternary "-pods" "" }}.{{ .root.Release.Namespace }}.svc:7400
{{- end -}}

{{/* (dict "root" $ "component" "gateway" "suffix" "-pods") -> JSON list: the names of a Service in the cluster's DNS */}}
{{- define "weft.serviceHosts" -}}
{{- $name := printf "%s-%s%s" (include "weft.fullname" .root) .component (default "" .suffix) -}}
{{- $ns := .root.Release.Namespace -}}
{{- list $name (printf "%s.%s" $name $ns) (printf "%s.%s.svc" $name $ns) (printf "%s.%s.svc.%s" $name $ns .root.Values.clusterDomain) | toJson -}}
{{- end -}}

{{- define "weft.depotUrl" -}}
{{ eq .Values.tls.mode "none" | ternary "http" "https" }}://{{ include "weft.address" (dict "root" . "component" "depot") }}
{{- end -}}
