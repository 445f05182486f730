{{- define "weft.runnerLabels" -}}
app.kubernetes.io/managed-by: weft-operator
app.kubernetes.io/component: runner
{{- end -}}

{{/* (dict "root" $ "components" (list ...) "runners" bool) -> peers: these components of the release, and runners */}}
{{- define "weft.peers" -}}
{{- $peers := list -}}
{{- range $component := .components -}}
{{- $labels := include "weft.selector" (dict "root" $.root "component" $component) | fromYaml -}}
{{- $peers = append $peers (dict "in" $.root.Release.Namespace "labels" $labels) -}}
{{- end -}}
{{- if .runners -}}
{{- range $namespace := splitList "," (include "weft.poolNamespaces" .root) -}}
{{- $peers = append $peers (dict "in" $namespace "labels" (include "weft.runnerLabels" $ | fromYaml)) -}}
{{- end -}}
{{- end -}}
{{- range $i, $peer := $peers }}
{{- if $i }}
{{ end -}}
- namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: {{ quote $peer.in }}}}
  podSelector:
    matchLabels:
      {{- toYaml $peer.labels | nindent 6 }}
{{- end -}}
{{- end -}}

{{/*
Everything that is not named is denied, in both directions.

(dict "root" $ "component" "depot" "from" (list components) "fromRunners" bool "to" (list components) "toRunners" bool
 "ingress" "YAML of more rules" "egress" "YAML of more rules" "probes" bool: on 7401, "resolves" bool: asks DNS)
*/}}
{{- define "weft.networkPolicy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "weft.metadata" . | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "weft.selector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
  {{- $in := include "weft.ingressRules" . | trim }}
  ingress: {{- if $in }}{{ $in | nindent 4 }}{{ else }} []{{ end }}
  {{- $out := include "weft.egressRules" . | trim }}
  egress: {{- if $out }}{{ $out | nindent 4 }}{{ else }} []{{ end }}
{{- end -}}

{{- define "weft.ingressRules" -}}
{{- $policy := .root.Values.networkPolicy -}}
{{- if or .from .fromRunners }}
- ports: [{port: 7400}]
  from:
    {{- include "weft.peers" (dict "root" .root "components" .from "runners" .fromRunners) | nindent 4 }}
{{- end }}
{{- if and .probes $policy.metricsFrom }}
- ports: [{port: 7401}]
  from:
    {{- toYaml $policy.metricsFrom | nindent 4 }}
{{- end }}
{{- with .ingress }}
{{ . }}
{{- end }}
{{- end -}}

{{- define "weft.egressRules" -}}
{{- if .resolves }}
{{ include "weft.dnsRule" .root }}
{{- end }}
{{- if or .to .toRunners }}
- ports: [{port: 7400}]
  to:
    {{- include "weft.peers" (dict "root" .root "components" .to "runners" .toRunners) | nindent 4 }}
{{- end }}
{{- with .egress }}
{{ . }}
{{- end }}
{{- end -}}

{{- define "weft.dnsRule" -}}
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
  to:
    {{- toYaml (.Values.networkPolicy.dnsTo | default (list (dict
      "namespaceSelector" (dict "matchLabels" (dict "kubernetes.io/metadata.name" "kube-system"))
      "podSelector" (dict "matchLabels" (dict "k8s-app" "kube-dns"))))) | nindent 4 }}
{{- end -}}

{{/* The API server has no label: addresses, or any, on its ports. */}}
{{- define "weft.apiServerRule" -}}
- ports:
    {{- range .Values.networkPolicy.apiServer.ports }}
    - {port: {{ . }}}
    {{- end }}
  {{- with .Values.networkPolicy.apiServer.cidrs }}
  to:
    {{- range . }}
    - ipBlock: {cidr: {{ . | quote }}}
    {{- end }}
  {{- end }}
{{- end -}}

{{/* The way out of the cluster: everything but the addresses where clouds hand out credentials. */}}
{{- define "weft.outward" -}}
{{- if .Values.networkPolicy.depotTo -}}
{{- toYaml .Values.networkPolicy.depotTo -}}
{{- else -}}
- ipBlock: {cidr: 0.0.0.0/0, except: [169.254.0.0/16, 100.100.100.200/32]}
- ipBlock: {cidr: "::/0", except: ["fe80::/10", "fd00:ec2::254/128"]}
{{- end -}}
{{- end -}}
