// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	spec "github.com/NVIDIA/k8s-device-plugin/api/config/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

const (
	appDevicePlugin     = "nvidia-device-plugin-daemonset"
	appFeatureDiscovery = "gpu-feature-discovery"
)

// plugin is NVIDIA's device plugin in a pod, with its config-manager beside it.
type plugin struct {
	started  bool
	key      string // of the configuration that is linked; empty: none
	config   *spec.Config
	strategy string
	retry    time.Time // when it tries again what failed

	resources map[string][]nvidia.Advertised // registered with the kubelet
	unhealthy []string                       // resources whose MPS daemon did not answer
}

// endpoint is what the kubelet knows of a resource: the devices of the plugin that registered it last. When the plugin
// goes, they stay in the capacity and are no longer allocatable.
type endpoint struct {
	by      *plugin
	devices []nvidia.Advertised
	gone    bool
	// failGreaterThanOne refuses a request for more than one replica (internal/rm/rm.go, ValidateRequest).
	failGreaterThanOne bool
}

// devicePlugin does what NVIDIA's device plugin and MPS DaemonSet do in their pods.
type devicePlugin struct{ *machine }

// runPlugin is one turn of the config-manager (cmd/config-manager) and of the plugin.
func (d devicePlugin) runPlugin(ctx context.Context, node *corev1.Node, state *podState) bool {
	if state.plugin == nil {
		state.plugin = &plugin{}
	}
	p := state.plugin
	key, content, err := state.selectConfig(node.Labels[labelConfig])
	if err != nil {
		d.missingKey(state, err)
		return false
	}
	now := d.Clock.Now()
	switch {
	case now.Before(state.restart): // a plugin that runs keeps what it had, and its config-manager reads nothing
		return false
	case !p.started, p.key != key:
		d.load(ctx, state, key, content)
	case len(p.unhealthy) > 0 && !now.Before(p.retry):
		d.load(ctx, state, key, content)
	default:
		state.waiting = "" // the key has become visible
	}
	return p.started
}

// selectConfig is config-manager, where the pod has one.
func (s *podState) selectConfig(label string) (key, content string, err error) {
	if len(s.volumes) == 0 {
		return "", "", nil
	}
	files := map[string]string{}
	for _, v := range s.volumes {
		maps.Copy(files, v.data)
	}
	key, err = nvidia.SelectConfig(label, s.env("DEFAULT_CONFIG"), files)
	return key, files[key], err
}

func (s *podState) env(name string) string {
	for _, c := range s.pod.Spec.Containers {
		for _, e := range c.Env {
			if e.Name == name {
				return e.Value
			}
		}
	}
	return ""
}

// missingKey: the config-manager exits and is started again; a plugin that runs keeps what it had, one that does not is
// stuck behind its init container.
func (d devicePlugin) missingKey(state *podState, err error) {
	state.waiting = err.Error()
	if d.Clock.Now().Before(state.restart) {
		return
	}
	d.crashed(state, err.Error())
	d.Tell("config-manager: %v; it exits and is started again", err)
}

// load is the plugin's start, or its restart on SIGHUP: it reads the configuration and looks at the GPUs.
func (d devicePlugin) load(ctx context.Context, state *podState, key, content string) {
	p := state.plugin
	d.unregister(p)
	config, resources, err := d.start(ctx, state, content)
	if err != nil { // the process exits and takes the node's GPUs with it
		p.started = false
		d.crashed(state, err.Error())
		d.Tell("device plugin: %v; it exits, and the node advertises no GPU", err)
		return
	}
	news := !p.started || p.key != key
	state.waiting = ""
	p.started, p.key, p.config, p.strategy = true, key, config, nvidia.MIGStrategy(config, state.environment())
	p.resources, p.unhealthy = resources, nil
	if config.Sharing.SharingStrategy() == spec.SharingStrategyMPS {
		d.dropUnanswered(ctx, p, news)
	}
	d.registerPlugin(p)
	if news {
		d.Tell("device plugin: loaded %s", configName(key))
	}
}

func configName(key string) string {
	if key == "" {
		return "its defaults"
	}
	return "configuration " + key
}

func (d devicePlugin) start(ctx context.Context, state *podState, content string) (*spec.Config, map[string][]nvidia.Advertised, error) {
	config, err := nvidia.Parse(content)
	if err != nil {
		return nil, nil, fmt.Errorf("unable to load config: %w", err)
	}
	if d.ToolkitMissing != nil && d.ToolkitMissing() {
		return nil, nil, errors.New("error getting devices: the container toolkit is not done")
	}
	inventory, err := d.Inventory(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("error getting devices: %w", err)
	}
	resources, err := nvidia.Advertise(config, state.environment(), inventory.Devices)
	return config, resources, err
}

func (s *podState) environment() nvidia.Environment {
	return nvidia.Environment{MIGStrategy: s.env("MIG_STRATEGY"), MPSRoot: s.env("MPS_ROOT")}
}

// dropUnanswered: the plugin registers a resource that is shared by MPS only once its daemon answers, and tries again.
func (d devicePlugin) dropUnanswered(ctx context.Context, p *plugin, tell bool) {
	for _, r := range slices.Sorted(maps.Keys(p.resources)) {
		if !isReplica(p.resources[r]) || d.MPSAnswers != nil && d.MPSAnswers(ctx, r) {
			continue
		}
		delete(p.resources, r)
		p.unhealthy = append(p.unhealthy, r)
	}
	p.retry = d.Clock.Now().Add(d.RetryDelay)
	if len(p.unhealthy) > 0 && tell {
		d.Tell("device plugin: error waiting for MPS daemon of %s; it tries again", strings.Join(p.unhealthy, ", "))
	}
}

func isReplica(devices []nvidia.Advertised) bool {
	return len(devices) > 0 && devices[0].ID != devices[0].UUID
}

// registerPlugin tells the kubelet of the plugin's resources.
func (d devicePlugin) registerPlugin(p *plugin) {
	sharing := p.config.Sharing.ReplicatedResources()
	for name, devices := range p.resources {
		d.endpoints[name] = &endpoint{
			by: p, devices: devices, failGreaterThanOne: isReplica(devices) && refusesMany(p.config, sharing),
		}
	}
}

// refusesMany: time-slicing refuses if it is told to, MPS always does (config.go, NewConfig).
func refusesMany(config *spec.Config, sharing *spec.ReplicatedResources) bool {
	return config.Sharing.MPS != nil || sharing != nil && sharing.FailRequestsGreaterThanOne
}

// unregister is what the kubelet sees when the plugin's sockets close. Another one may have registered since.
func (d devicePlugin) unregister(p *plugin) {
	for name := range p.resources {
		if e, ok := d.endpoints[name]; ok && e.by == p {
			e.gone = true
		}
	}
	p.resources = nil
}

// loaded is the configuration that the plugin of the node runs with.
func (m *machine) loaded() (*spec.Config, string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, state := range m.pods {
		if state.plugin != nil && state.plugin.started {
			return state.plugin.config, state.plugin.strategy
		}
	}
	return &spec.Config{}, spec.MigStrategyNone
}
