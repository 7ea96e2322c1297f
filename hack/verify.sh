#!/usr/bin/env bash
# Fails if a generated file, go.mod or go.sum is not as it would be generated now. `make verify` generates first.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

generated=(api config/crd config/rbac config/helm/files config/bundle docs/reference.md docs/troubleshooting.md docs/api.md)

if ! go mod tidy -diff; then
	echo "verify: go.mod or go.sum differ from what the code needs; run 'go mod tidy' and commit the result" >&2
	exit 1
fi
if ! (cd test/browser && go mod tidy -diff); then
	echo "verify: go.mod or go.sum of test/browser differ from what its code and the operator need; run 'go mod tidy' there and commit the result" >&2
	exit 1
fi
if ! git diff --exit-code -- "${generated[@]}"; then
	echo "verify: the files above are not as their sources say; run 'make generate bundle' and commit the result" >&2
	exit 1
fi

missing=$(git ls-files '*.go' | grep -v -e zz_generated | xargs grep -L 'SPDX-License-Identifier: Apache-2.0' || true)
if [ -n "$missing" ]; then
	printf 'verify: without the licence header of hack/boilerplate.go.txt:\n%s\n' "$missing" >&2
	exit 1
fi
echo "verify: generated files, go.mod and licence headers are as they should be"
