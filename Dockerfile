# The images of the GPU Sharing Operator:
#
#	docker build --target controller -t gpu-sharing-controller .
#	docker build --target agent      -t gpu-sharing-agent .
#
# The controller is one static program. The agent loads NVIDIA's driver library, which needs glibc, and so does its build.
# make release makes the same images without Docker, for all architectures and the same for the same commit.
ARG GO_VERSION=1.26
ARG DEBIAN=bookworm

FROM golang:${GO_VERSION}-${DEBIAN} AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY api api
COPY cmd cmd
COPY internal internal
# What --version prints: .git is not here. With the tag gRPC does not link html/template, for which the linker would keep every method of
# Kubernetes' API: the agent, and what it takes of the memory, would be larger by 10 MB.
ARG VERSION
ARG COMMIT
RUN symbols=github.com/gpusharing/gpu-sharing-operator/internal/kube/version && \
    flags="-s -w -X $symbols.version=$VERSION -X $symbols.commit=$COMMIT" && \
    CGO_ENABLED=0 go build -trimpath -ldflags="$flags" -o /out/controller ./cmd/controller && \
    CGO_ENABLED=1 go build -trimpath -tags grpcnotrace -ldflags="$flags" -o /out/agent ./cmd/agent

# What the agent needs besides itself: Debian's C library.
FROM golang:${GO_VERSION}-${DEBIAN} AS root
COPY hack/release/debian.sh hack/release/debian.txt /release/
RUN /release/debian.sh "$(dpkg --print-architecture)" /root-of-agent

# It speaks to the API server only, whose certificate authority comes with its service account.
FROM scratch AS controller
COPY LICENSE /licenses/LICENSE
COPY --from=build /out/controller /controller
USER 65532:65532
ENTRYPOINT ["/controller"]

FROM scratch AS agent
COPY --from=root /root-of-agent /
COPY LICENSE /licenses/LICENSE
COPY --from=build /out/agent /usr/bin/gpu-sharing-agent
ENV PATH=/usr/bin:/bin
# It changes hardware and starts daemons: docs/security.md says what it needs.
USER 0:0
ENTRYPOINT ["/usr/bin/gpu-sharing-agent"]
