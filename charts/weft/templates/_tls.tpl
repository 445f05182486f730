{{/* Roles with a certificate, and where its Secret has to be. */}}
{{- define "weft.tlsRoles" -}}
gateway scheduler predictor supervisor batch depot operator admin runner
{{- end -}}

{{/*
(dict "root" $ "role" "depot", of a runner also "namespace" ns) -> DNS names: the role, then where the process is found.
A runner's says whose pools it may speak for.
*/}}
{{- define "weft.tlsNames" -}}
{{- $service := printf "%s-%s" (include "weft.fullname" .root) .role -}}
{{- $inside := printf "%s.%s" $service .root.Release.Namespace -}}
{{- $names := list (printf "%s.weft.internal" .role) -}}
{{- if eq .role "runner" -}}
{{- $names = append $names (printf "%s.runner.weft.internal" .namespace) -}}
{{- else if ne .role "admin" -}}
{{- $names = concat $names (list $service $inside (printf "%s.svc" $inside)) -}}
{{- end -}}
{{- join "," $names -}}
{{- end -}}

{{/* (dict "root" $ "role" "depot") -> namespaces that need the role's Secret */}}
{{- define "weft.tlsNamespaces" -}}
{{- eq .role "runner" | ternary (include "weft.poolNamespaces" .root) .root.Release.Namespace -}}
{{- end -}}

{{/* Of what Helm signs itself. An upgrade in the last third of them makes a certificate anew. */}}
{{- define "weft.validityDays" -}}
3650
{{- end -}}

{{/*
A Secret with tls.crt, tls.key and ca.crt; what the cluster has is kept while it is right: of the same CA, for the same
names, and in the first two thirds of its life.

(dict "root" $ "role" "depot" "namespace" ns "names" "a,b" "ca" certificate)
*/}}
{{- define "weft.tlsSecret" -}}
{{- $days := include "weft.validityDays" . | int -}}
{{- $names := concat (splitList "," .names) (list) -}}
{{- $now := now | unixEpoch | int64 -}}
{{- $renew := add $now (mul $days 57600) | toString -}}
{{- $ca := b64enc .ca.Cert -}}
{{- $found := lookup "v1" "Secret" .namespace (printf "%s-%s-tls" (include "weft.fullname" .root) .role) | default dict -}}
{{- $data := $found.data | default dict -}}
{{- $notes := ($found.metadata | default dict).annotations | default dict -}}
{{- $current := int64 (index $notes "serving.weft.dev/renew-after" | default "0") -}}
{{- if and (eq (index $data "ca.crt" | default "") $ca) (eq (index $notes "serving.weft.dev/names" | default "") .names) (gt $current $now) -}}
{{- $renew = toString $current -}}
{{- else -}}
{{- $made := genSignedCertWithKey (first $names) nil $names $days .ca (genPrivateKey "ecdsa") -}}
{{- $data = dict "ca.crt" $ca "tls.crt" (b64enc $made.Cert) "tls.key" (b64enc $made.Key) -}}
{{- end -}}
apiVersion: v1
kind: Secret
metadata:
  {{- include "weft.metadata" (dict "root" .root "component" (eq .role "webhook" | ternary "operator" .role) "name" (printf "%s-tls" .role) "namespace" .namespace) | nindent 2 }}
  annotations:
    serving.weft.dev/names: {{ .names }}
    serving.weft.dev/renew-after: {{ $renew | quote }}
type: kubernetes.io/tls
data:
  ca.crt: {{ index $data "ca.crt" }}
  tls.crt: {{ index $data "tls.crt" }}
  tls.key: {{ index $data "tls.key" }}
{{- end -}}

{{/* The CA in a Secret of this name, or a new one: {"Cert": PEM, "Key": PEM} as YAML. (dict "root" $ "name" "ca") */}}
{{- define "weft.storedCa" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace (printf "%s-%s" (include "weft.fullname" .root) .name) | default dict -}}
{{- if $found.data -}}
{{- toYaml (dict "crt" (index $found.data "tls.crt") "key" (index $found.data "tls.key")) -}}
{{- else -}}
{{- $made := genCAWithKey (printf "%s-%s" (include "weft.fullname" .root) .name) (include "weft.validityDays" . | int) (genPrivateKey "ecdsa") -}}
{{- toYaml (dict "crt" (b64enc $made.Cert) "key" (b64enc $made.Key)) -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "name" "ca" "stored" {crt, key}) -> the Secret that keeps a CA */}}
{{- define "weft.caSecret" -}}
apiVersion: v1
kind: Secret
metadata:
  {{- include "weft.metadata" (dict "root" .root "component" "ca" "name" .name) | nindent 2 }}
type: kubernetes.io/tls
data:
  tls.crt: {{ .stored.crt }}
  tls.key: {{ .stored.key }}
{{- end -}}

{{/* (dict "root" $ "role" .. "namespace" .. "names" ..) -> a Certificate that cert-manager makes and renews */}}
{{- define "weft.certificate" -}}
{{- $with := .root.Values.tls.certManager -}}
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  {{- include "weft.metadata" (dict "root" .root "component" (eq .role "webhook" | ternary "operator" .role) "name" (printf "%s-tls" .role) "namespace" .namespace) | nindent 2 }}
spec:
  secretName: {{ include "weft.fullname" .root }}-{{ .role }}-tls
  commonName: {{ first (splitList "," .names) }}
  dnsNames:
    {{- range splitList "," .names }}
    - {{ . }}
    {{- end }}
  duration: 2160h
  privateKey: {algorithm: ECDSA, size: 256, encoding: PKCS8, rotationPolicy: Always}
  usages: [digital signature, server auth, client auth]
  issuerRef:
    {{- if $with.issuerRef.name }}
    {{- toYaml (merge (dict "group" "cert-manager.io") $with.issuerRef) | nindent 4 }}
    {{- else }}
    {name: {{ include "weft.fullname" .root }}-ca, kind: Issuer, group: cert-manager.io}
    {{- end }}
{{- end -}}
