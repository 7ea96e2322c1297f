{{/* The labels of every object. Of pods, only the agent's have the version, by which kubectl gpusharing doctor knows it where the image has a
digest: a changed label replaces the pods, and an agent's image changes with the version anyhow. */}}
{{- define "gpusharing.labels" -}}
app.kubernetes.io/part-of: gpu-sharing-operator
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* An image by digest if it has one, else by tag, else by the version of the chart. */}}
{{- define "gpusharing.image" -}}
{{- $image := index .root.Values.images .name -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/*
Every object of a file that was generated elsewhere, as it is there, with the labels of the chart and in the namespace of
the release. Those whose names are in keep stay when the release is uninstalled.
*/}}
{{- define "gpusharing.generated" -}}
{{- $root := .root -}}
{{- $keep := .keep | default list -}}
{{- range $text := regexSplit "(?m)^---$" ($root.Files.Get .file | required (printf "the chart lacks %s: run make manifests" .file)) -1 }}
{{- with fromYaml $text }}
{{- if .Error }}{{ fail .Error }}{{ end }}
{{- $labels := include "gpusharing.labels" $root | fromYaml }}
{{- $_ := set .metadata "labels" (merge (.metadata.labels | default dict) (dict "app.kubernetes.io/name" .metadata.name) $labels) }}
{{- if has .metadata.name $keep }}
{{- $_ := set .metadata "annotations" (merge (.metadata.annotations | default dict) (dict "helm.sh/resource-policy" "keep")) }}
{{- end }}
{{- if .metadata.namespace }}{{ $_ := set .metadata "namespace" $root.Release.Namespace }}{{ end }}
{{- range .subjects }}{{ $_ := set . "namespace" $root.Release.Namespace }}{{ end }}
---
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}

{{/*
How the pods of a node see it: its root, below which the driver is looked for at each use, since NVIDIA's driver container
comes, goes and is replaced, and a run of their own, in which the sockets of the driver's daemons are linked.
*/}}
{{- define "gpusharing.hostMounts" -}}
- name: host
  mountPath: /host
  mountPropagation: HostToContainer
  readOnly: true
- name: run
  mountPath: /run
{{- end }}

{{- define "gpusharing.hostVolumes" -}}
- name: host
  hostPath: {path: /, type: Directory}
- name: run
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end }}

{{/* Where the MPS pods run. */}}
{{- define "gpusharing.onGPUNodes" -}}
nodeSelector:
  {{- toYaml .Values.gpuNodes.selector | nindent 2 }}
{{ include "gpusharing.ofNodePods" . }}
{{- end }}

{{/* Where the agents run. NVIDIA's k8s-driver-manager and mig-manager pause the label, and wait for the pods that select it
here (they do not look at affinity). A k8s-driver-manager before v0.12 does not know it, but pauses the other label. */}}
{{- define "gpusharing.whereClientsRun" -}}
nodeSelector:
  {{- toYaml .Values.gpuNodes.selector | nindent 2 }}
  nvidia.com/gpu.deploy.client: "true"
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
      - matchExpressions:
        - {key: nvidia.com/gpu.deploy.container-toolkit, operator: NotIn, values: [paused-for-driver-upgrade]}
{{ include "gpusharing.ofNodePods" . }}
{{- end }}

{{/* What the pods of a node have in common. */}}
{{- define "gpusharing.ofNodePods" -}}
tolerations:
{{- toYaml .Values.gpuNodes.tolerations | nindent 0 }}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}

{{/* gpuNodes.selector as kubectl writes it: a=b,c=d. */}}
{{- define "gpusharing.nodeSelector" -}}
{{- $pairs := list -}}
{{- range $key, $value := .Values.gpuNodes.selector -}}
{{- $pairs = append $pairs (printf "%s=%s" $key $value) -}}
{{- end -}}
{{- join "," $pairs -}}
{{- end }}

{{/* true if the namespace needs a quota for the system priority classes: on GKE, where versions of Kubernetes are such as v1.34.1-gke.2037001. */}}
{{- define "gpusharing.needsQuota" -}}
{{- $enabled := toString .Values.priorityClassQuota.enabled -}}
{{- if or (eq $enabled "true") (and (eq $enabled "auto") (contains "-gke." .Capabilities.KubeVersion.Version)) -}}
true
{{- end -}}
{{- end }}

{{/*
The namespace of NVIDIA's device plugin and the ConfigMap that it reads, where no GPU Operator runs it, as JSON; empty: there is none, or it is
not known. A value counts before the plugin that NVIDIA's chart has installed, and that before what the last upgrade found: the plugin may be
away for a while. `helm template` and Argo CD know no cluster.
*/}}
{{- define "gpusharing.devicePlugin" -}}
{{- $found := dict "namespace" .Values.devicePlugin.namespace "configMap" .Values.devicePlugin.configMap -}}
{{- if not $found.namespace -}}
{{- $readers := include "gpusharing.standAlonePlugins" . | fromJsonArray -}}
{{- $found = include "gpusharing.devicePluginBefore" . | fromJson -}}
{{- if eq (len $readers) 1 }}{{ $found = first $readers }}{{ end -}}
{{- end -}}
{{ toJson $found }}
{{- end }}

{{/* Each ConfigMap that a device plugin of NVIDIA's chart reads, as it names the volume for its config-manager. None where the GPU Operator runs one. */}}
{{- define "gpusharing.standAlonePlugins" -}}
{{- $found := list -}}
{{- $ofOperator := false -}}
{{- if .Capabilities.APIVersions.Has "nvidia.com/v1/ClusterPolicy" -}}
{{- range (lookup "nvidia.com/v1" "ClusterPolicy" "" "").items -}}
{{- if dig "spec" "devicePlugin" "enabled" true . }}{{ $ofOperator = true }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if not $ofOperator -}}
{{- range $set := (lookup "apps/v1" "DaemonSet" "" "").items -}}
{{- $commands := list -}}
{{- range $set.spec.template.spec.containers }}{{ $commands = concat $commands (.command | default list) }}{{ end -}}
{{- range $set.spec.template.spec.volumes -}}
{{- if and (eq .name "available-configs") .configMap (has "nvidia-device-plugin" $commands) -}}
{{- $found = append $found (dict "namespace" $set.metadata.namespace "configMap" .configMap.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ uniq $found | toJson }}
{{- end }}

{{/* What the controller that is installed was told, as long as the namespace is there. */}}
{{- define "gpusharing.devicePluginBefore" -}}
{{- $found := dict "namespace" "" "configMap" "" -}}
{{- $spec := (lookup "apps/v1" "Deployment" .Release.Namespace "gpu-sharing-controller").spec | default dict -}}
{{- range dig "template" "spec" "containers" list $spec -}}
{{- range .args -}}
{{- if hasPrefix "--device-plugin-namespace=" . }}{{ $_ := set $found "namespace" (trimPrefix "--device-plugin-namespace=" .) }}{{ end -}}
{{- if hasPrefix "--device-plugin-configmap=" . }}{{ $_ := set $found "configMap" (trimPrefix "--device-plugin-configmap=" .) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if and $found.namespace (not (lookup "v1" "Namespace" "" $found.namespace)) }}{{ $found = dict "namespace" "" "configMap" "" }}{{ end -}}
{{ toJson $found }}
{{- end }}
