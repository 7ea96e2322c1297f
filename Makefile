# GPU Sharing Operator. `make help` lists the targets.
SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

TOOL := go tool -modfile=hack/tools/go.mod
BIN  := bin
TESTFLAGS ?=
# They wait most of the time, so they begin first, the longest of them before the others.
SLOW_TESTS := ./test/autoscaling ./test/cluster ./internal/controller/gpusharingpolicy ./test/packaging ./internal/engine/rollout ./internal/cli
# So many packages are tested at a time: on two cores four, of which most wait. Each has an API server of 0.45 GB.
TESTED_AT_ONCE ?= $(shell echo $$((2 * $$(nproc))))
KUBECTL ?= kubectl
# The key with which make release signs, of cosign generate-key-pair.
KEY ?=
# The tag that make release releases, where the commit has several.
TAG ?=
CONTAINER_TOOL ?= docker
# Where docker-push puts the images and deploy takes them from, such as registry.example.com/gpu-sharing; and their tag.
REGISTRY ?=
VERSION ?= $(shell awk '/^appVersion:/ {print $$2}' config/helm/Chart.yaml)
CONTROLLER_IMG ?= $(addsuffix /,$(REGISTRY))gpu-sharing-controller:$(VERSION)
AGENT_IMG ?= $(addsuffix /,$(REGISTRY))gpu-sharing-agent:$(VERSION)
# What --version of the programs in the images prints.
BUILD_ARGS = --build-arg VERSION=$$(git describe --tags --match 'v*' --always --dirty) --build-arg COMMIT=$$(git rev-parse HEAD)
# What is empty leaves out of make e2e the specs of OLM.
OLM ?= 1
# Where make e2e leaves its report, and the logs if they are asked for.
E2E_LAST := $(abspath $(or $(GPUSHARING_E2E_LOGS),$(BIN)/e2e/last))
# NVIDIA's Go bindings bind deprecated functions too; what the C compiler says of them is not for our users.
export CGO_CFLAGS ?= -g -O2 -Wno-deprecated-declarations

##@ For everybody

.PHONY: help
help: ## This list.
	@awk 'BEGIN {FS = ":.*##"} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*##/ {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## Share the GPUs of simulated A100, H100 and T4 nodes by MIG, MPS and time-slicing, on a real API server. KEEP=1 leaves it running.
	@hack/demo.sh

.PHONY: test
test: kube ## Run every test of the operator's own module: pure, convergence, API and reconcilers on a real API server, beside the real Karpenter and Kueue. HISTORIES=100000 plays so many random histories instead of 800.
	@programs=$$(hack/shipped.sh); \
	{ hack/helm/build.sh && hack/helm3/build.sh && hack/prometheus/build.sh promtool && hack/karpenter/build.sh && hack/kueue/build.sh; } >/dev/null & \
	trap "kill $$! 2>/dev/null || true" EXIT; \
	HISTORIES="$${HISTORIES:-800}" GPUSHARING_PROGRAMS="$$programs" KUBEBUILDER_ASSETS="$$(hack/kube/build.sh)" \
		go test -vet=off -p $(TESTED_AT_ONCE) -timeout 40m $(TESTFLAGS) $(SLOW_TESTS) ./...

.PHONY: histories
histories: ## Play 20,000 random histories of clusters, on NVIDIA's device plugin and on its DRA driver. Ended, it goes on where it was. HISTORIES=1000000 FIRST=10000: so many, from that seed.
	@hack/histories.sh "$${HISTORIES:-20000}" "$${FIRST:-1}"

.PHONY: effects
effects: ## Compare what the controller writes in 5,350 recorded histories with the record: minutes. EFFECTS=record writes the record anew.
	EFFECTS="$${EFFECTS:-compare}" go test -count=1 -v -timeout 60m -run '^TestEffects$$' ./internal/engine/rollout

.PHONY: e2e
e2e: ## Test on real nodes: containerd, kubelet, NVIDIA's programs, our images and chart, on several machines side by side. As root; the first time longer. FOCUS=MPS: specs of that name. FAILED=1: what failed last. MACHINES=1: one machine. WITHIN=30m: leaves specs out, by name, for which that is too short; TURN=7: others. OLM=: without those of OLM, whose programs take longest to build.
	hack/e2e/build.sh previous $(if $(OLM),olm) >/dev/null
	@exec $(BIN)/e2e/machines -test=$(abspath $(BIN))/e2e/e2e.test -last=$(E2E_LAST) -focus="$${FOCUS:-}" $(if $(OLM),,-labels='!olm') $(if $(FAILED),-failed) \
		$(if $(MACHINES),-machines=$(MACHINES)) $(if $(WITHIN),-within=$(WITHIN)) $(if $(TURN),-turn=$(TURN)) $(if $(GPUSHARING_E2E_LOGS),-logs) $(if $(RECORD),-record=hack/e2e/seconds.json)

.PHONY: e2e-upgrade
e2e-upgrade: ## Of make e2e, the upgrade from the previous version, which is built from its commit and published, with live policies. As root, minutes.
	@$(MAKE) --no-print-directory e2e FOCUS='An upgrade from the previous version'

.PHONY: e2e-killed
e2e-killed: ## End make e2e at several moments and in several ways, and compare what the machine holds before and after.
	hack/e2e/killed.sh

.PHONY: autoscaling
autoscaling: kube ## Of make test, what runs beside the real Karpenter and Kueue. A few minutes; the first time longer.
	GPUSHARING_PROGRAMS="$$(hack/shipped.sh)" KUBEBUILDER_ASSETS="$$(hack/kube/build.sh)" go test -count=1 -v -timeout 30m $(TESTFLAGS) ./test/autoscaling

.PHONY: browser-test
browser-test: kube ## Test the page of kubectl gpusharing dashboard in Chromium: one that is installed, or Debian's, which apt-get downloads into the cache. PICTURES=FOLDER makes pictures of it.
	@chromium=$$(hack/chromium/build.sh) && axe=$$(hack/axe/build.sh) && assets=$$(hack/kube/build.sh) && pictures="$(if $(PICTURES),$(abspath $(PICTURES)))" && \
		cd test/browser && PICTURES="$$pictures" AXE="$$axe" CHROMIUM="$$chromium" KUBEBUILDER_ASSETS="$$assets" go test -count=1 -v -timeout 20m $(TESTFLAGS) ./...

.PHONY: olm-test
olm-test: ## Install, upgrade and uninstall by the real Operator Lifecycle Managers v0 and v1, in every order, as docs/install.md says: four tests at once, which mostly wait. Needs no root; the first time longer. FOCUS=v1: those with that in the name.
	@programs=$$(hack/olm/build.sh) && assets=$$(hack/kube/build.sh etcd kube-apiserver kubectl kube-controller-manager) && \
		export GPUSHARING_OLM="$$programs" KUBEBUILDER_ASSETS="$$assets" && go test -c -o "$$programs/olm.test" ./test/olm && cd test/olm && \
		"$$programs/olm.test" -test.list '$(or $(FOCUS),.)' | xargs -P 4 -I% sh -c '"$$GPUSHARING_OLM/olm.test" -test.v -test.timeout 30m -test.run "^%\$$" $(TESTFLAGS) >"$$GPUSHARING_OLM/%.log" 2>&1; passed=$$?; \
			cat "$$GPUSHARING_OLM/%.log"; exit $$passed'

.PHONY: bench
bench: kube ## Measure planning, packing, the API writes of a rollout, MIG beside NVIDIA's mig-parted, what sampling costs, and a real node (as root; half an hour).
	go test -run '^$$' -bench . -benchtime 1s ./internal/... ./test/bench/...
	MIG_BENCH=1 KUBEBUILDER_ASSETS="$$(hack/kube/build.sh)" go test -count=1 -v -timeout 30m -run '^TestMIGBesideMIGParted$$' ./test/bench
	SAMPLING_BENCH=1 KUBEBUILDER_ASSETS="$$(hack/kube/build.sh)" go test -count=1 -v -timeout 30m -run '^TestSampling$$' ./test/bench
	$(MAKE) --keep-going bench-reconcile bench-scale bench-node

.PHONY: bench-reconcile
bench-reconcile: kube ## Measure the CPU time of one reconcile at 100 and 5,000 nodes beside 10,000 pending pods and 20 policies. RECONCILE=100 is shorter.
	RECONCILE="$${RECONCILE:-100,5000}" KUBEBUILDER_ASSETS="$$(hack/kube/build.sh)" go test -count=1 -v -timeout 30m -run '^TestReconcile$$' ./test/bench

.PHONY: bench-scale
bench-scale: kube ## Measure clusters of 100, 1,000 and 5,000 simulated nodes, beside the API calls of the hand procedure. SCALE=100 is shorter.
	SCALE="$${SCALE:-100,1000,5000}" KUBEBUILDER_ASSETS="$$(hack/kube/build.sh)" go test -count=1 -v -timeout 60m -run '^TestScale$$' ./test/bench

.PHONY: bench-demand
bench-demand: ## Simulate how much of what pods ask for MIG layouts serve that follow demand, beside static ones and other systems. TRACE=FILE.csv plays a trace (arrival, duration, slices), PICTURE=FILE.svg draws the result.
	DEMAND_BENCH=1 TRACE="$(if $(TRACE),$(abspath $(TRACE)))" PICTURE="$(if $(PICTURE),$(abspath $(PICTURE)))" go test -count=1 -v -timeout 60m -run '^TestDemand$$' ./test/bench/demand

.PHONY: bench-repartition
bench-repartition: ## Measure how soon a pod runs for which a GPU is repartitioned, and what is written for it. REPARTITIONS_EVERY=2s: whether the former one runs or not; REPARTITIONS_ON=dra.
	REPARTITIONS="$${REPARTITIONS:-200}" KUBEBUILDER_ASSETS="$$(hack/kube/build.sh etcd kube-apiserver kube-scheduler)" go test -count=1 -v -timeout 150m -run '^TestRepartition$$' ./test/cluster

.PHONY: bench-node
bench-node: ## Measure on a real node how soon a change is allocatable: by hand, as guides say, by policy. GPUSHARING_BENCH=a=5,b=3,c=2,d=5,edits=10,mig=2 is shorter.
	hack/e2e/build.sh >/dev/null
	@cd test/e2e && GPUSHARING_E2E=1 GPUSHARING_BENCH="$${GPUSHARING_BENCH:-1}" exec ../../bin/e2e/e2e.test -test.v -test.timeout=90m -ginkgo.no-color -ginkgo.label-filter=bench -ginkgo.timeout=85m

.PHONY: docker-build
docker-build: ## Build the images of controller and agent. REGISTRY=registry.example.com/gpu-sharing names them for it.
	$(CONTAINER_TOOL) build $(BUILD_ARGS) --target controller --tag $(CONTROLLER_IMG) .
	$(CONTAINER_TOOL) build $(BUILD_ARGS) --target agent --tag $(AGENT_IMG) .

.PHONY: docker-push
docker-push: ## Push these images to REGISTRY.
	@[ -n '$(REGISTRY)' ] || { echo "docker-push: say where to: make docker-push REGISTRY=registry.example.com/gpu-sharing" >&2; exit 1; }
	$(CONTAINER_TOOL) push $(CONTROLLER_IMG)
	$(CONTAINER_TOOL) push $(AGENT_IMG)

.PHONY: publish
publish: ## Build the images of this commit without Docker, for this machine's architecture, and push them and the chart to REGISTRY=registry.example.com/gpu-sharing, from which helm install takes them. Linux with glibc 2.36 or older, such as Debian 12.
	cd hack/release && go run . -local -registry='$(REGISTRY)' -tag='$(TAG)'

.PHONY: install
install: ## Install only the kinds into the cluster of KUBECONFIG.
	$(KUBECTL) apply --server-side -k config/crd

.PHONY: uninstall
uninstall: ## Delete the kinds, once no policy is left and every node is restored.
	@KUBECTL="$(KUBECTL)" hack/install/uninstall.sh

.PHONY: deploy
deploy: ## Install the operator into the cluster of KUBECONFIG: kubectl apply -k config/default. With REGISTRY: with the images there.
	@KUBECTL="$(KUBECTL)" REGISTRY="$(REGISTRY)" CONTROLLER_IMG="$(CONTROLLER_IMG)" AGENT_IMG="$(AGENT_IMG)" hack/install/deploy.sh

.PHONY: restore
restore: ## Delete all policies and wait until every node, and NVIDIA's ClusterPolicy, is as it was before the operator (kubectl gpusharing restore).
	@go run ./cmd/kubectl-gpusharing restore --yes --timeout=$${RESTORE_TIMEOUT:-1800}s

.PHONY: undeploy
undeploy: ## Restore, then remove the operator, its kinds and its namespace. Nothing of ours stays.
	@KUBECTL="$(KUBECTL)" hack/install/undeploy.sh

##@ For developers

.PHONY: build
build: ## Build controller, agent and kubectl plugin into bin/. The agent needs a C compiler, the others do not.
	CGO_ENABLED=0 go build -trimpath -o $(BIN)/controller ./cmd/controller
	CGO_ENABLED=0 go build -trimpath -o $(BIN)/kubectl-gpusharing ./cmd/kubectl-gpusharing
	CGO_ENABLED=1 go build -trimpath -tags grpcnotrace -o $(BIN)/agent ./cmd/agent

.PHONY: run
run: ## Run the controller on this machine against the cluster of KUBECONFIG, without agents, once make install was run there. Its lease is in POD_NAMESPACE.
	@namespace="$${POD_NAMESPACE:-gpu-sharing-operator}" && \
		{ $(KUBECTL) get namespace "$$namespace" >/dev/null 2>&1 || $(KUBECTL) create namespace "$$namespace"; } && \
		echo "In another terminal: kubectl gpusharing status --namespace $$namespace" && POD_NAMESPACE="$$namespace" go run ./cmd/controller

.PHONY: generate
generate: ## Generate deep copies and apply configurations from api/.
	$(TOOL) controller-gen object:headerFile=hack/boilerplate.go.txt paths=./api/v1alpha1
	$(TOOL) controller-gen applyconfiguration:headerFile=hack/boilerplate.go.txt paths=./api/v1alpha1

.PHONY: manifests
manifests: ## Generate CRDs, RBAC, docs/api.md, docs/reference.md and the table of docs/troubleshooting.md from the code, and copy into the Helm chart what it needs.
	$(TOOL) controller-gen crd paths=./api/v1alpha1 output:crd:dir=config/crd
	go run ./hack/apidoc docs/api.md config/crd/gpusharing.io_gpusharingpolicies.yaml config/crd/gpusharing.io_gpunodes.yaml
	$(TOOL) controller-gen rbac:roleName=gpu-sharing-controller paths="{./cmd/controller,./internal/...}" output:rbac:dir=config/rbac
	hack/helm/sync.sh
	go run ./hack/reference docs/reference.md docs/troubleshooting.md

.PHONY: bundle
bundle: manifests ## Generate the OLM bundle into config/bundle and check it with the operator-framework's validation library.
	cd hack/bundle && go run . generate
	cd hack/bundle && go run . validate

.PHONY: helm
helm: manifests ## Lint the Helm chart and package it into dist/.
	"$$(hack/helm/build.sh)" lint --strict config/helm
	"$$(hack/helm/build.sh)" package config/helm --destination dist

.PHONY: release
release: ## Make everything that a release is from the commit that is checked out, into dist/. REGISTRY=registry.example.com/gpu-sharing KEY=cosign.key pushes, signs and verifies it.
	cd hack/release && go run . -registry='$(REGISTRY)' -tag='$(TAG)' -key='$(abspath $(KEY))' $(if $(KEYLESS),-keyless) $(if $(UNSIGNED),-unsigned)

.PHONY: release-test
release-test: ## Test make release against a real registry on this machine, with small programs instead of ours. FULL=1: with ours, built twice. As root it installs the C compiler for arm64 if that is missing.
	@command -v aarch64-linux-gnu-gcc >/dev/null || hack/apt.sh gcc-aarch64-linux-gnu libc6-dev-arm64-cross
	hack/helm/build.sh >/dev/null
	cd hack/release && FULL='$(FULL)' go test -timeout 60m $(TESTFLAGS) ./...

.PHONY: fmt
fmt: ## Format the code.
	$(TOOL) golangci-lint fmt

.PHONY: house
house: ## Count what the product weighs and how its packages hang together, with a bound for each figure.
	go run ./hack/house

.PHONY: lint
lint: ## Find the words that docs/dev/language.md replaces, run the linters, which also hold the import rules of docs/architecture.md, and compile what needs a real GPU.
	git ls-files --cached --others --exclude-standard | go run ./hack/words
	$(TOOL) golangci-lint run --allow-serial-runners
	$(TOOL) golangci-lint-kube-api-linter run --config .golangci-api.yml --allow-serial-runners ./api/v1alpha1
	go vet -tags hardware ./...

.PHONY: verify
verify: generate manifests bundle ## Fail if anything generated, or go.mod, is not as it would be generated now.
	@hack/verify.sh

.PHONY: kube
kube: ## Build the Kubernetes programs that test and demo need, once, into a cache outside the repository.
	@hack/kube/build.sh >/dev/null

.PHONY: clean
clean: ## Remove what was built here. The cache of Kubernetes programs stays.
	rm -rf $(BIN) dist
