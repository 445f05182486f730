{{/* Admitted under the standard `restricted`. Data directories and /tmp are volumes, so the root may be read-only. */}}
{{- define "weft.securityContexts" -}}
spec:
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    fsGroup: 65532
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
container:
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
{{- end -}}

{{/*
A list in which each value of a key is there once: the last item counts, at the place of the first. With two of a name
an API server refuses a server-side apply, and a client-side merge keeps either. (list "mountPath" $items)
*/}}
{{- define "weft.byKey" -}}
{{- $key := first . -}}
{{- $last := dict -}}
{{- $values := list -}}
{{- range last . -}}
{{- $values = append $values (get . $key) -}}
{{- $_ := set $last (get . $key) . -}}
{{- end -}}
{{- $items := list -}}
{{- range uniq $values -}}
{{- $items = append $items (get $last .) -}}
{{- end -}}
{{- toYaml $items -}}
{{- end -}}

{{/*
What `common.pod` and the component's `pod` lay over its pod: maps are merged, lists of many things come after each
other, joined by their key where they have one. (dict "root" $ "component" "scheduler")
*/}}
{{- define "weft.overlay" -}}
{{- $default := include "weft.securityContexts" . | fromYaml -}}
{{- $common := .root.Values.common.pod -}}
{{- $own := (index .root.Values .component).pod | default dict -}}
{{- $merged := mergeOverwrite (dict "metadata" dict) $default (deepCopy $common) (deepCopy $own) -}}
{{- $container := dict "env" "name" "envFrom" "" "volumeMounts" "mountPath" -}}
{{- range $part, $keys := dict "spec" (dict "tolerations" "" "volumes" "name") "container" $container -}}
{{- range $name, $key := $keys -}}
{{- with concat (dig $part $name list $common) (dig $part $name list $own) -}}
{{- $_ := set (index $merged $part) $name (empty $key | ternary . (include "weft.byKey" (list $key .) | fromYamlArray)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $merged -}}
{{- end -}}

{{/*
The pod of a component of the control plane.

(dict "root" $ "component" "scheduler" "module" "weft_scheduler" "args" (list ...) "ports" (list (dict "name" .. "port" ..)) "probes" "port name"
 "graceSeconds" 30, and where there is a reason: "data" "emptyDir" | "claim" | "existing" | "none", "token" true, "env" (list), "volumes" (list),
 "mounts" (list), "annotations" (dict), "preStopSeconds" 5)
*/}}
{{- define "weft.pod" -}}
{{- $values := index .root.Values .component -}}
{{- $pod := include "weft.overlay" . | fromYaml -}}
metadata:
  labels:
    {{- include "weft.selector" . | nindent 4 }}
    app.kubernetes.io/part-of: weft
    {{- with $pod.metadata.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with mergeOverwrite (dict) (default (dict) .annotations) ($pod.metadata.annotations | default dict) }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "weft.serviceAccountName" . }}
  automountServiceAccountToken: {{ default false .token }}
  enableServiceLinks: false
  # Process 1 ignores signals that it has no handler for yet. Here the pod's sandbox is process 1, so that a process
  # that is deleted while it starts ends at once.
  shareProcessNamespace: true
  terminationGracePeriodSeconds: {{ .graceSeconds }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with omit $pod.spec "serviceAccountName" "volumes" }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if and (or (include "weft.several" .) (include "weft.elects" .)) (not $pod.spec.topologySpreadConstraints) }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "weft.selector" . | nindent 10 }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "weft.image" (dict "root" .root "image" .root.Values.image) }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command: {{ $pod.container.command | default (list "python" "-m" .module) | toJson }}
      args:
        {{- range .args }}
        - {{ . | quote }}
        {{- end }}
        - "--log-level={{ .root.Values.logLevel }}"
        - "--log-format=json"
        {{- range $name, $value := $values.settings }}
        {{- range concat $.args (list "--log-level=" "--log-format=") }}
        {{- if has (. | splitList "=" | first) (list (printf "--%s" $name) (printf "--no-%s" $name)) }}
        {{- fail (printf "%s.settings: the chart itself says %s" $.component (. | splitList "=" | first)) }}
        {{- end }}
        {{- end }}
        {{- $whole := and (kindIs "float64" $value) (eq (floor $value) $value) }}{{- /* Helm writes 8388608 as 8.388608e+06 */}}
        - {{ printf "--%s=%v" $name ($whole | ternary (int64 $value) $value) | quote }}
        {{- end }}
      env:
        {{- $home := list (dict "name" "HOME" "value" "/tmp") }}
        {{- $tracing := include "weft.tracingEnv" .root | fromYamlArray }}
        {{- include "weft.byKey" (list "name" (concat $home (default list .env) $tracing (default list $pod.container.env))) | nindent 8 }}
      ports:
        {{- range .ports }}
        - {name: {{ .name }}, containerPort: {{ .port }}}
        {{- end }}
      startupProbe:
        httpGet: {path: /healthz, port: {{ .probes }}}
        periodSeconds: 1
        timeoutSeconds: 2
        failureThreshold: 120
      livenessProbe:
        httpGet: {path: /healthz, port: {{ .probes }}}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      readinessProbe:
        httpGet: {path: /readyz, port: {{ .probes }}}
        periodSeconds: 2
        timeoutSeconds: 5
        failureThreshold: 5  # a process that is slow for seconds serves still: without it a lone gateway leaves its Service
      {{- with .preStopSeconds }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ . }}}
      {{- end }}
      {{- with $values.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with omit $pod.container "command" "env" "volumeMounts" }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
      volumeMounts:
        {{- $mounts := list (dict "name" "tmp" "mountPath" "/tmp") }}
        {{- $volumes := list (dict "name" "tmp" "emptyDir" dict) }}
        {{- if ne .data "none" }}
        {{- $mounts = append $mounts (dict "name" "data" "mountPath" "/data") }}
        {{- end }}
        {{- if eq .data "emptyDir" }}
        {{- $volumes = append $volumes (dict "name" "data" "emptyDir" dict) }}
        {{- else if eq .data "existing" }}
        {{- $volumes = append $volumes (dict "name" "data" "persistentVolumeClaim" (dict "claimName" $values.persistence.existingClaim)) }}
        {{- end }}
        {{- if ne .root.Values.tls.mode "none" }}
        {{- $mounts = append $mounts (dict "name" "tls" "mountPath" "/etc/weft/tls" "readOnly" true) }}
        {{- $secret := printf "%s-%s-tls" (include "weft.fullname" .root) .component }}
        {{- $volumes = append $volumes (dict "name" "tls" "secret" (dict "secretName" $secret)) }}
        {{- end }}
        {{- include "weft.byKey" (list "mountPath" (concat $mounts (default list .mounts) (default list $pod.container.volumeMounts))) | nindent 8 }}
  volumes:
    {{- include "weft.byKey" (list "name" (concat $volumes (default list .volumes) (default list $pod.spec.volumes))) | nindent 4 }}
{{- end -}}

{{/* A StatefulSet: of one name at most one pod runs at any time. Takes what weft.pod takes. */}}
{{- define "weft.statefulSet" -}}
{{- $values := index .root.Values .component -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  {{- include "weft.metadata" . | nindent 2 }}
spec:
  serviceName: {{ include "weft.fullname" .root }}-{{ .component }}
  replicas: {{ default 1 $values.replicas }}
  {{- if include "weft.standby" . }}
  minReadySeconds: 10 # until its address is known everywhere
  {{- end }}
  podManagementPolicy: Parallel
  selector:
    matchLabels:
      {{- include "weft.selector" . | nindent 6 }}
  template:
    {{- include "weft.pod" . | nindent 4 }}
  {{- if eq .data "claim" }}
  volumeClaimTemplates:
    - metadata:
        name: data
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .root.Values.common.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ $values.persistence.size }}
  {{- end }}
{{- end -}}

{{/* The Service where peers find a component on 7400; with "metrics" true, what reads its metrics finds them on 7401. */}}
{{- define "weft.peerService" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "weft.metadata" . | nindent 2 }}
spec:
  # Ready tells whether all it needs is there; its peers have to reach it before that, and while its database is away.
  publishNotReadyAddresses: {{ default false .beforeReady }}
  selector:
    {{- include "weft.selector" . | nindent 4 }}
  ports:
    - {name: {{ .portName }}, port: 7400, targetPort: {{ .portName }}}
{{- if .metrics }}
    - {name: probes, port: 7401, targetPort: probes}
{{- end }}
{{- if has .component (splitList " " (include "weft.singletons" .)) }}
---
# The addresses of all pods: peers ask for the one that acts.
apiVersion: v1
kind: Service
metadata:
  {{- include "weft.metadata" (merge (dict "name" (printf "%s-pods" .component)) .) | nindent 2 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "weft.selector" . | nindent 4 }}
  ports:
    - {name: {{ .portName }}, port: 7400, targetPort: {{ .portName }}}
{{- end }}
{{- end -}}

{{/* Of a component, behind a separator; nothing for one pod, which no drain may wait for. */}}
{{- define "weft.disruptionBudget" -}}
{{- if include "weft.several" . }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "weft.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .root.Values.common.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "weft.selector" . | nindent 6 }}
{{- end -}}
{{- end -}}
