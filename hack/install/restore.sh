#!/usr/bin/env bash
# Deletes all policies, and waits until every node is as it was before the operator and NVIDIA's ClusterPolicy too. Ends with
# what is left, by name, if that takes longer than RESTORE_TIMEOUT seconds (default 1800).
set -euo pipefail

KUBECTL=${KUBECTL:-kubectl}
timeout=${RESTORE_TIMEOUT:-1800}

kube() { "$KUBECTL" "$@"; }

fail() {
	printf 'restore: %s\n' "$@" >&2
	exit 1
}

if ! kube get crd gpunodes.gpusharing.io gpusharingpolicies.gpusharing.io >/dev/null 2>&1; then
	kube version >/dev/null || fail "the cluster does not answer; name it with KUBECONFIG"
	echo "restore: the operator's kinds are not installed, so there is nothing to put back"
	exit 0
fi

# Nodes whose policy says Retain keep their label and their instances: that is no undo, so somebody has to say so.
retained() {
	kube get gpusharingpolicies -o go-template='{{range .items}}{{if eq .spec.deletionPolicy "Retain"}}policy {{.metadata.name}}
{{end}}{{end}}'
	kube get gpunodes -o go-template='{{range .items}}{{$n := .metadata.name}}{{with .spec}}{{if and .baseline (not .policy)}}{{with .release}}{{if eq .deletionPolicy "Retain"}}node {{$n}}
{{end}}{{end}}{{end}}{{end}}{{end}}'
}
kept=$(retained)
if [ -n "$kept" ]; then
	fail "these say deletionPolicy Retain, so their nodes would stay as they are, with the operator's label and key:" "$kept" \
		"set deletionPolicy Restore in the policies; put a retained node under a policy with Restore first"
fi

running=$(kube get deployments -A -l app.kubernetes.io/name=gpu-sharing-controller \
	-o go-template='{{range .items}}{{if .status.availableReplicas}}x{{end}}{{end}}')

# What is not as it was, a line for each.
left() {
	kube get gpusharingpolicies -o go-template='{{range .items}}policy {{.metadata.name}} still exists
{{end}}'
	kube get gpunodes -o go-template='{{range .items}}{{$n := .metadata.name}}{{$status := .status}}{{with .spec}}{{if or .policy .baseline}}node {{$n}} is on its way back{{with $status}}{{range .conditions}}{{if and (eq .type "Ready") (ne .status "True")}}: {{.message}}{{end}}{{end}}{{end}}
{{end}}{{end}}{{end}}'
	kube get nodes -o go-template='{{range .items}}{{$n := .metadata.name}}{{range $key, $value := .metadata.labels}}node {{$n}} has the label {{$key}}
{{end}}{{range $key, $value := .metadata.annotations}}node {{$n}} has the annotation {{$key}}
{{end}}{{range .spec.taints}}node {{$n}} has the taint {{.key}}
{{end}}{{end}}' | grep ' gpusharing\.io/' | grep -v ' gpusharing\.io/client$' || true # that stays while agents run
	kube get configmaps -A --field-selector metadata.name=gpu-sharing-device-plugin -l app.kubernetes.io/managed-by=gpu-sharing-operator \
		-o go-template='{{range .items}}ConfigMap {{.metadata.namespace}}/{{.metadata.name}} is still mounted by a pod of NVIDIA'"'"'s
{{end}}'
	if kube get crd clusterpolicies.nvidia.com >/dev/null 2>&1; then
		kube get clusterpolicies.nvidia.com -o go-template='{{range .items}}{{$n := .metadata.name}}{{range $key, $value := .metadata.annotations}}ClusterPolicy {{$n}} has the annotation {{$key}}
{{end}}{{end}}' | grep ' gpusharing\.io/' || true
	fi
}

if [ -z "$running" ] && [ -n "$(left)" ]; then
	fail "no controller of the operator runs, and nobody else puts the nodes back; start it (deployment gpu-sharing-controller):" "$(left)"
fi
kube delete gpusharingpolicies --all --wait=false

told=
until rest=$(left) && [ -z "$rest" ]; do
	if [ "$SECONDS" -ge "$timeout" ]; then
		fail "not as before within ${timeout}s:" "$rest" "the controller's log says more; run this again to wait on"
	fi
	if [ "$rest" != "$told" ]; then
		printf 'restore: waiting\n%s\n' "$rest"
		told=$rest
	fi
	sleep 1
done
echo "restore: every node, and the ClusterPolicy, is as it was before the operator"
