// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// The attributes that a profile name can carry.
const (
	// MediaExtension is the attribute, after a plus, of the profile that has the media engines of a small instance;
	// after a minus, of one that has none.
	MediaExtension = "me"
	// AllMedia is the attribute of a profile that has every media engine of the GPU.
	AllMedia = "me.all"
	// Graphics is the attribute of a profile that can render.
	Graphics = "gfx"
)

// Name is the name of a MIG profile, taken apart:
//
//	[<compute>c.]<slices>g[.<memory>gb][+<attribute>[,<attribute>]][-<attribute>]
//
// The grammar is that of NVIDIA's tools (NVIDIA/go-nvlib, pkg/nvlib/device/mig_profile.go), and a name without its
// memory, which stands for the smallest profile of that many slices.
type Name struct {
	Compute  int      // compute slices of a compute instance smaller than its GPU instance; 0 if it spans it
	Slices   int      // compute slices of the GPU instance
	MemoryGB int      // 0 in a name by slices
	With     []string // attributes after the plus
	Without  []string // attributes after the minus
}

var grammar = regexp.MustCompile(
	`^(?:([1-9][0-9]?)c\.)?([1-9][0-9]?)g(?:\.([1-9][0-9]{0,3})gb)?(?:\+([a-z.]+(?:,[a-z.]+)*))?(?:-([a-z.]+(?:,[a-z.]+)*))?$`)

// ParseName takes the name of a MIG profile apart. Errors: a text that is not such a name.
func ParseName(s string) (Name, error) {
	m := grammar.FindStringSubmatch(s)
	if m == nil {
		return Name{}, fmt.Errorf("%q is not the name of a MIG profile, such as 1g.10gb, 1g.10gb+me or 3g", s)
	}
	n := Name{Compute: number(m[1]), Slices: number(m[2]), MemoryGB: number(m[3]), With: list(m[4]), Without: list(m[5])}
	if n.Compute > n.Slices {
		return Name{}, fmt.Errorf("%q names a compute instance larger than its GPU instance", s)
	}
	if n.Compute == n.Slices {
		n.Compute = 0
	}
	return n, nil
}

// String is the name as NVIDIA's tools write it.
func (n Name) String() string {
	var b strings.Builder
	if n.Compute != 0 {
		fmt.Fprintf(&b, "%dc.", n.Compute)
	}
	fmt.Fprintf(&b, "%dg", n.Slices)
	if n.MemoryGB != 0 {
		fmt.Fprintf(&b, ".%dgb", n.MemoryGB)
	}
	if len(n.With) > 0 {
		b.WriteString("+" + strings.Join(n.With, ","))
	}
	if len(n.Without) > 0 {
		b.WriteString("-" + strings.Join(n.Without, ","))
	}
	return b.String()
}

// SameAttributes reports whether two names ask for the same engines.
func (n Name) SameAttributes(o Name) bool {
	return slices.Equal(n.With, o.With) && slices.Equal(n.Without, o.Without)
}

// number reads what the grammar has let through; nothing is 0.
func number(digits string) int {
	n, _ := strconv.Atoi(digits)
	return n
}

func list(attributes string) []string {
	if attributes == "" {
		return nil
	}
	l := strings.Split(attributes, ",")
	slices.Sort(l)
	return l
}
