# The images of the GPU Sharing Operator:
#
#	docker build --target controller -t gpu-sharing-controller .
#	docker build --target agent      -t gpu-sharing-agent .
#
# The controller is one static program. The agent loads NVIDIA's driver library, which needs glibc, and so does its build.
ARG GO_VERSION=1.26
ARG DEBIAN=bookworm

FROM golang:${GO_VERSION}-${DEBIAN} AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY api api
COPY cmd cmd
COPY internal internal
# What --version prints: .git is not here.
ARG VERSION
ARG COMMIT
RUN symbols=github.com/gpusharing/gpu-sharing-operator/internal/version && \
    flags="-s -w -X $symbols.version=$VERSION -X $symbols.commit=$COMMIT" && \
    CGO_ENABLED=0 go build -trimpath -ldflags="$flags" -o /out/controller ./cmd/controller && \
    CGO_ENABLED=1 go build -trimpath -ldflags="$flags" -o /out/agent ./cmd/agent

# The certificates that a static program needs, and nothing else.
FROM scratch AS controller
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /out/controller /controller
USER 65532:65532
ENTRYPOINT ["/controller"]

FROM debian:${DEBIAN}-slim AS agent
COPY --from=build /out/agent /usr/bin/gpu-sharing-agent
# It changes hardware and starts daemons: docs/security.md says what it needs.
USER 0:0
ENTRYPOINT ["/usr/bin/gpu-sharing-agent"]
