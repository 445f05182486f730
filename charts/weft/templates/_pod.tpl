{{/*
The pod of a component of the control plane.

(dict "root" $ "component" "scheduler" "module" "weft_scheduler" "args" (list ...) "ports" (list (dict "name" .. "port" ..)) "probes" "port name"
 "graceSeconds" 30, and where there is a reason: "data" "emptyDir" | "claim" | "existing" | "none", "token" true, "env" (list), "volumes" (list),
 "mounts" (list), "annotations" (dict), "preStopSeconds" 5)
*/}}
{{- define "weft.pod" -}}
{{- $values := index .root.Values .component -}}
{{- $common := .root.Values.common -}}
metadata:
  labels:
    {{- include "weft.selector" . | nindent 4 }}
    app.kubernetes.io/part-of: weft
    {{- with mergeOverwrite (dict) $common.podLabels $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with mergeOverwrite (dict) (default (dict) .annotations) $common.podAnnotations $values.podAnnotations }}
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
  {{- with default $common.priorityClassName $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with mergeOverwrite (dict) $common.nodeSelector $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with concat $common.tolerations $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml $values.topologySpreadConstraints | nindent 4 }}
  {{- else if or (gt (int (default 1 $values.replicas)) 1) ($values.autoscaling | default dict).enabled }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "weft.selector" . | nindent 10 }}
  {{- end }}
  securityContext:
    {{- toYaml .root.Values.podSecurityContext | nindent 4 }}
  containers:
    - name: {{ .component }}
      image: {{ include "weft.image" (dict "root" .root "image" .root.Values.image) }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command: {{ $values.command | default (list "python" "-m" .module) | toJson }}
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
        - {name: HOME, value: /tmp}
        {{- range concat (default (list) .env) (include "weft.tracingEnv" .root | fromYamlArray) $common.extraEnv $values.extraEnv }}
        - {{ toJson . }}
        {{- end }}
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
      securityContext:
        {{- toYaml .root.Values.securityContext | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if ne .data "none" }}
        - {name: data, mountPath: /data}
        {{- end }}
        {{- if ne .root.Values.tls.mode "none" }}
        - {name: tls, mountPath: /etc/weft/tls, readOnly: true}
        {{- end }}
        {{- range concat (default (list) .mounts) $common.extraVolumeMounts $values.extraVolumeMounts }}
        - {{ toJson . }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- if eq .data "emptyDir" }}
    - name: data
      emptyDir: {}
    {{- else if eq .data "existing" }}
    - name: data
      persistentVolumeClaim: {claimName: {{ $values.persistence.existingClaim }}}
    {{- end }}
    {{- if ne .root.Values.tls.mode "none" }}
    - name: tls
      secret: {secretName: {{ include "weft.fullname" .root }}-{{ .component }}-tls}
    {{- end }}
    {{- range concat (default (list) .volumes) $common.extraVolumes $values.extraVolumes }}
    - {{ toJson . }}
    {{- end }}
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
        accessModes: {{ toJson $values.persistence.accessModes }}
        {{- with $values.persistence.storageClassName }}
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

{{/* Of a component, behind a separator; nothing where it is off. */}}
{{- define "weft.disruptionBudget" -}}
{{- $budget := (index .root.Values .component).podDisruptionBudget -}}
{{- if $budget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "weft.metadata" . | nindent 2 }}
spec:
  {{- if kindIs "invalid" $budget.minAvailable | not }}
  minAvailable: {{ $budget.minAvailable }}
  {{- else }}
  maxUnavailable: {{ $budget.maxUnavailable }}
  {{- end }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "weft.selector" . | nindent 6 }}
{{- end -}}
{{- end -}}
