// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"regexp"
	"strings"

	. "github.com/onsi/gomega"
	"github.com/onsi/gomega/types"
)

// matching is a text in which … stands for a hash, with or without a time.
func matching(text string) types.GomegaMatcher {
	return MatchRegexp("^" + strings.ReplaceAll(regexp.QuoteMeta(text), "…", `[0-9a-f@]+`) + "$")
}
