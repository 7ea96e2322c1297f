{{/* The labels of every object. */}}
{{- define "gpusharing.labels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{ include "gpusharing.labelsOfAnyVersion" . }}
{{- end }}

{{- define "gpusharing.labelsOfAnyVersion" -}}
app.kubernetes.io/part-of: gpu-sharing-operator
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The version of an image as a label, by which kubectl gpusharing doctor knows it where the image has a digest: its tag, or the version of the
chart. No label for another digest without a tag, or a tag that cannot be a label. */}}
{{- define "gpusharing.versionLabel" -}}
{{- $image := index .root.Values.images .name -}}
{{- $version := $image.tag | default (empty $image.digest | ternary .root.Chart.AppVersion "") -}}
{{- if regexMatch "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$" $version -}}
app.kubernetes.io/version: {{ $version | quote }}
{{- end -}}
{{- end }}

{{/*
An image by the digest or else the tag that the values have. Without both the image of the release, by the digest that make release notes in Chart.yaml:
were it a value, an upgrade with --reuse-values would keep the former one. An image from another repository, by the version of the chart: a copy
may have another digest.
*/}}
{{- define "gpusharing.image" -}}
{{- $image := index .root.Values.images .name -}}
{{- $released := index .root.Chart.Annotations (printf "gpusharing.io/%s-image" .name) -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else if and (not $image.tag) (hasPrefix (print $image.repository "@") $released) -}}
{{ $released }}
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
{{- if hasKey (.metadata.annotations | default dict) "gpusharing.io/namespace" }}{{ $_ := set .metadata.annotations "gpusharing.io/namespace" $root.Release.Namespace }}{{ end }}
{{- if .metadata.namespace }}{{ $_ := set .metadata "namespace" $root.Release.Namespace }}{{ end }}
{{- range .subjects }}{{ $_ := set . "namespace" $root.Release.Namespace }}{{ end }}
{{- with (.spec).paramRef }}{{ if .namespace }}{{ $_ := set . "namespace" $root.Release.Namespace }}{{ end }}{{ end }}
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

{{/* What the pods of a node have in common. */}}
{{- define "gpusharing.ofNodePods" -}}
{{- with .Values.gpuNodes.tolerations }}
tolerations:
{{- toYaml . | nindent 0 }}
{{- end }}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}

{{/*
Not empty if one of tolerations tolerates whatever former does, and no less long, as Kubernetes compares a toleration with a taint:
https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/. The admission policy gpu-sharing-mps-nodes does the same.
*/}}
{{- define "gpusharing.tolerate" -}}
{{- $former := .former -}}
{{- range .tolerations -}}
{{- $key := or (not .key) (eq .key ($former.key | default "")) -}}
{{- $effect := or (not .effect) (eq .effect ($former.effect | default "")) -}}
{{- $operator := .operator | default "Equal" -}}
{{- $same := and (eq $operator ($former.operator | default "Equal")) (eq (.value | default "") ($former.value | default "")) -}}
{{- $forever := not (hasKey . "tolerationSeconds") -}}
{{- $long := or $forever (and (hasKey $former "tolerationSeconds") (ge (int64 .tolerationSeconds) (int64 $former.tolerationSeconds))) -}}
{{- if and $key $effect (or (eq $operator "Exists") $same) $long -}}
true
{{- end -}}
{{- end -}}
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
away for a while, unless the GPU Operator runs one instead. `helm template` and Argo CD know no cluster.
*/}}
{{- define "gpusharing.devicePlugin" -}}
{{- $found := dict "namespace" .Values.devicePlugin.namespace "configMap" .Values.devicePlugin.configMap -}}
{{- if not $found.namespace -}}
{{- $found = include "gpusharing.devicePluginBefore" . | fromJson -}}
{{- $readers := include "gpusharing.standAlonePlugins" . | fromJsonArray -}}
{{- if include "gpusharing.ofGPUOperator" . -}}
{{- if not (has $found $readers) }}{{ $found = dict "namespace" "" "configMap" "" }}{{ end -}}
{{- else if eq (len $readers) 1 }}{{ $found = first $readers }}{{ end -}}
{{- end -}}
{{ toJson $found }}
{{- end }}

{{/* true if NVIDIA's GPU Operator runs the device plugin. */}}
{{- define "gpusharing.ofGPUOperator" -}}
{{- if .Capabilities.APIVersions.Has "nvidia.com/v1/ClusterPolicy" -}}
{{- range (lookup "nvidia.com/v1" "ClusterPolicy" "" "").items -}}
{{- if dig "spec" "devicePlugin" "enabled" true . }}true{{ end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/*
Each ConfigMap that a device plugin of NVIDIA's chart reads, as it names the volume for its config-manager. It mounts the kubelet's folder for plugins
and has pods: every user of a namespace may make a DaemonSet like that, but Pod Security baseline, or OpenShift's restricted, lets none of its pods be.
*/}}
{{- define "gpusharing.standAlonePlugins" -}}
{{- $found := list -}}
{{- range $set := (lookup "apps/v1" "DaemonSet" "" "").items -}}
{{- $commands := list -}}
{{- range $set.spec.template.spec.containers }}{{ $commands = concat $commands (.command | default list) }}{{ end -}}
{{- $serves := false -}}
{{- range $set.spec.template.spec.volumes -}}
{{- if hasSuffix "/device-plugins" (dig "hostPath" "path" "" .) }}{{ $serves = true }}{{ end -}}
{{- end -}}
{{- $serves = and $serves (gt (int (dig "status" "currentNumberScheduled" 0 $set)) 0) -}}
{{- range $set.spec.template.spec.volumes -}}
{{- if and $serves (eq .name "available-configs") .configMap (has "nvidia-device-plugin" $commands) -}}
{{- $found = append $found (dict "namespace" $set.metadata.namespace "configMap" .configMap.name) -}}
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
