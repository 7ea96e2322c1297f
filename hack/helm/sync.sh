#!/usr/bin/env bash
# Copies what is generated or written elsewhere into the chart, byte for byte: Helm reads nothing outside a chart. The
# chart's templates add labels and the namespace, and change nothing else.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."

files=config/helm/files
rm -rf "$files"/{crd,rbac,admission,openshift}
mkdir -p "$files"/{crd,rbac/stand-alone,rbac/autoscaling,rbac/metrics,admission,openshift}
cp config/crd/gpusharing.io_*.yaml "$files/crd/"
cp config/rbac/role.yaml "$files/rbac/controller-role.yaml"
cp config/manager/rbac.yaml "$files/rbac/controller.yaml"
cp config/rbac/users.yaml "$files/rbac/users.yaml"
cp config/agent/rbac.yaml "$files/rbac/agent.yaml"
cp config/stand-alone/rbac.yaml "$files/rbac/stand-alone/"
cp config/autoscaling/rbac.yaml "$files/rbac/autoscaling/"
cp config/metrics/rbac.yaml "$files/rbac/metrics/"
cp config/agent/admission.yaml "$files/admission/agent.yaml"
cp config/manager/admission.yaml "$files/admission/controller.yaml"
cp config/manager/installer.yaml "$files/admission/"
cp config/openshift/scc.yaml "$files/openshift/"
