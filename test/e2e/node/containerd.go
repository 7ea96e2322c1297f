// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"fmt"
	"os/exec"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
)

const (
	containerdConfig = "/etc/containerd/config.toml"
	containerdSocket = "/run/containerd/containerd.sock"
	// kubernetesImages is the namespace of containerd in which the kubelet finds images.
	kubernetesImages = "k8s.io"
	// RuntimeClass is the handler of pods that get a driver, as the GPU Operator's toolkit sets it up.
	RuntimeClass = "nvidia"
)

func containerdArguments() []string {
	return []string{"--config=" + containerdConfig, "--log-level=info"}
}

// network connects pods with the node and with nothing else.
const network = `{
  "cniVersion": "1.0.0",
  "name": "pods",
  "plugins": [{
    "type": "bridge",
    "bridge": "cni0",
    "isGateway": true,
    "ipam": {"type": "host-local", "ranges": [[{"subnet": "` + podRange + `"}]], "routes": [{"dst": "0.0.0.0/0"}]}
  }]
}
`

// containerdConfig is containerd's configuration. Set because of this machine: restrict_oom_score_adj, since lowering
// the score needs CAP_SYS_RESOURCE, which build machines lack; SystemdCgroup off, since systemd does not run here; a
// runc that shows containers the kernel of this machine. The runtime of NVIDIA's pods is what the container toolkit
// installs.
func (n *Node) containerdConfig() string {
	return fmt.Sprintf(`version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing"]

[grpc]
  address = %q

[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = %q

[plugins."io.containerd.cri.v1.images".registry]
  config_path = "/etc/containerd/certs.d"

[plugins."io.containerd.cri.v1.runtime"]
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
        SystemdCgroup = false
        BinaryName = %q
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.%s]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.%[4]s.options]
        SystemdCgroup = false
        BinaryName = %q
`, containerdSocket, n.options.PauseImage, n.program("machine-runtime"), RuntimeClass, driver.RuntimePath)
}

// containerdAnswers reports whether containerd serves.
func (n *Node) containerdAnswers(ctx context.Context) error {
	return n.ctr(ctx, "version")
}

// Import loads the images of an archive, so that no pod pulls any.
func (n *Node) Import(ctx context.Context, archive string) error {
	if err := n.ctr(ctx, "images", "import", "--local", "--snapshotter=overlayfs", archive); err != nil {
		return fmt.Errorf("importing %s: %w", archive, err)
	}
	return nil
}

func (n *Node) ctr(ctx context.Context, args ...string) error {
	args = append([]string{"--address=" + containerdSocket, "--namespace=" + kubernetesImages}, args...)
	if out, err := exec.CommandContext(ctx, n.program("ctr"), args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}
