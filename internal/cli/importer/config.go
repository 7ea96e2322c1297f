// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package importer

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// configuration is a configuration of NVIDIA's device plugin, `version: v1`, as far as it matters. It is read as the plugin reads it, by
// encoding/json, which takes the names of fields in any case, but for those of replicated and resource (api/config/v1/replicas.go).
type configuration struct {
	Version string         `json:"version"`
	Flags   map[string]any `json:"flags"`
	Sharing struct {
		TimeSlicing *replicated `json:"timeSlicing"`
		MPS         *replicated `json:"mps"`
	} `json:"sharing"`
	Resources map[string]any `json:"resources"`
	IMEX      map[string]any `json:"imex"`
}

// replicated is what of the resources of a node is advertised more than once.
type replicated struct {
	RenameByDefault            bool       `json:"renameByDefault"`
	FailRequestsGreaterThanOne *bool      `json:"failRequestsGreaterThanOne"`
	Resources                  []resource `json:"resources"`
}

type resource struct {
	Name     string `json:"name"`
	Rename   string `json:"rename"`
	Devices  any    `json:"devices"`
	Replicas int32  `json:"replicas"`
}

// UnmarshalJSON reads fields that are written exactly so, as the plugin does.
func (r *replicated) UnmarshalJSON(data []byte) error {
	type plain replicated
	return exactly(data, (*plain)(r), "renameByDefault", "failRequestsGreaterThanOne", "resources")
}

// UnmarshalJSON reads fields that are written exactly so, as the plugin does.
func (r *resource) UnmarshalJSON(data []byte) error {
	type plain resource
	return exactly(data, (*plain)(r), "name", "rename", "devices", "replicas")
}

func exactly(data []byte, into any, fields ...string) error {
	var all map[string]json.RawMessage
	if err := json.Unmarshal(data, &all); err != nil {
		return err
	}
	maps.DeleteFunc(all, func(name string, _ json.RawMessage) bool { return !slices.Contains(fields, name) })
	data, err := json.Marshal(all)
	if err != nil {
		return err
	}
	return json.Unmarshal(data, into)
}

func parse(data string) (configuration, error) {
	c := configuration{}
	if err := yaml.Unmarshal([]byte(data), &c); err != nil {
		return c, err
	}
	if c.Version != "" && c.Version != "v1" {
		return c, fmt.Errorf("version %q is not known", c.Version)
	}
	c.Flags = asNamed(c.Flags)
	for _, r := range []*replicated{c.Sharing.TimeSlicing, c.Sharing.MPS} {
		if err := r.check(); err != nil {
			return c, err
		}
	}
	return c, nil
}

// asNamed are the flags that matter under the names that NVIDIA's plugin gives them. Of several the last by name counts there.
func asNamed(flags map[string]any) map[string]any {
	named := map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(flags)) {
		value := flags[name]
		for _, known := range []string{flagMIGStrategy, flagMPSRoot} {
			if strings.EqualFold(name, known) {
				name = known
			}
		}
		named[name] = value
	}
	return named
}

// The flags of NVIDIA's plugin that policies replace.
const flagMIGStrategy, flagMPSRoot = "migStrategy", "mpsRoot"

// maxReplicas is the most replicas that a policy can ask for.
const maxReplicas = 256

// check refuses what the plugin does, and what no policy can ask for.
func (r *replicated) check() error {
	if r == nil {
		return nil
	}
	if len(r.Resources) == 0 {
		return errors.New("sharing has no resources")
	}
	for i := range r.Resources {
		if r.Resources[i].Replicas < 2 {
			return fmt.Errorf("%s has %d replicas, fewer than 2", r.Resources[i].Name, r.Resources[i].Replicas)
		}
		if r.Resources[i].Replicas > maxReplicas {
			return fmt.Errorf("%s has %d replicas, but a policy can ask for at most %d; write a policy with fewer",
				r.Resources[i].Name, r.Resources[i].Replicas, maxReplicas)
		}
		if !strings.Contains(r.Resources[i].Name, "/") {
			r.Resources[i].Name = "nvidia.com/" + r.Resources[i].Name
		}
	}
	return nil
}

// replicas are how many times a resource is advertised; 1 if sharing does not name it. Of several entries the largest
// counts.
func (r *replicated) replicas(name string) int32 {
	most := int32(1)
	if r == nil {
		return most
	}
	for _, one := range r.Resources {
		if one.Name == name {
			most = max(most, one.Replicas)
		}
	}
	return most
}

func (c configuration) migStrategy() string {
	if s, is := c.Flags[flagMIGStrategy].(string); is && s != "" {
		return s
	}
	return "none"
}

// shared is the sharing that counts: MPS before time-slicing, when both are there.
func (c configuration) shared() (r *replicated, mps bool) {
	if c.Sharing.MPS != nil {
		return c.Sharing.MPS, true
	}
	return c.Sharing.TimeSlicing, false
}

// lost is what of a configuration no policy can say, apart from its sharing.
func (c configuration) lost() []string {
	var notes []string
	names := c.set()
	delete(names, "flags."+flagMIGStrategy)
	delete(names, "flags."+flagMPSRoot)
	if len(names) > 0 {
		notes = append(notes, fmt.Sprintf("%s: a policy cannot say this, so it is lost where the GPU Operator does not set it; "+
			"it sets most flags by the environment, which counts more than the key", strings.Join(slices.Sorted(maps.Keys(names)), ", ")))
	}
	if len(c.Resources) > 0 {
		notes = append(notes, "resources: NVIDIA's device plugin does not heed it, and neither does the policy")
	}
	r, mps := c.shared()
	if r == nil {
		return notes
	}
	if mps && c.Sharing.TimeSlicing != nil {
		notes = append(notes, "sharing.timeSlicing: NVIDIA's device plugin does not heed it beside sharing.mps, so the policy leaves it out")
	}
	return append(notes, r.neutral()...)
}

// neutral is what the plugin reads and does not heed.
func (r *replicated) neutral() []string {
	var notes []string
	for _, one := range r.Resources {
		if one.Rename != "" && (!r.RenameByDefault || one.Rename != one.Name+".shared") {
			notes = append(notes, fmt.Sprintf("rename %s of %s: NVIDIA's device plugin does not heed it, and neither does the policy",
				one.Rename, one.Name))
		}
		if one.Devices != nil && one.Devices != "all" {
			notes = append(notes, fmt.Sprintf("devices %v of %s: NVIDIA's device plugin shares all GPUs of a node alike, and so does the policy",
				one.Devices, one.Name))
		}
	}
	return notes
}

// set is what the key sets beside sharing, by name.
func (c configuration) set() map[string]any {
	names := map[string]any{}
	flatten("flags", c.Flags, names)
	flatten("imex", c.IMEX, names)
	return names
}

// gives is what decides how a container gets the GPUs that it is given, with the values that NVIDIA's plugin has without a key
// (cmd/nvidia-device-plugin/main.go).
var gives = map[string]string{
	"flags.nvidiadriverroot": "/", "flags.nvidiadevroot": "/", "flags.gdrcopyenabled": "false", "flags.gdsenabled": "false", "flags.mofedenabled": "false",
	"flags.devicediscoverystrategy": "auto", "flags.plugin.passdevicespecs": "false", "flags.plugin.deviceliststrategy": "envvar",
	"flags.plugin.deviceidstrategy": "uuid", "flags.plugin.cdiannotationprefix": "cdi.k8s.io/", "flags.plugin.nvidiactkpath": "/usr/bin/nvidia-ctk",
	"flags.plugin.containerdriverroot": "/driver-root", "imex.channelids": "", "imex.required": "false",
}

// given says what of that the key sets another way: a policy would take it from the pods that start after it; empty: nothing.
func (c configuration) given() string {
	var others []string
	for name, value := range c.set() {
		is := strings.Trim(fmt.Sprint(value), "[]") // a list of one counts as that one
		if usual, known := gives[strings.ToLower(name)]; known && is != usual {
			others = append(others, name+" "+is)
		}
	}
	if len(others) == 0 {
		return ""
	}
	slices.Sort(others)
	return fmt.Sprintf("its key sets %s, which no policy can say, and pods that start later would not get their GPUs so. Set it by the environment of NVIDIA's "+
		"device plugin (GPU Operator: devicePlugin.env of the ClusterPolicy), remove it from the key, and import again", strings.Join(others, " and "))
}

// flatten collects the names of what is set.
func flatten(prefix string, set map[string]any, names map[string]any) {
	for name, value := range set {
		if inner, is := value.(map[string]any); is {
			flatten(prefix+"."+name, inner, names)
			continue
		}
		if value != nil {
			names[prefix+"."+name] = value
		}
	}
}
