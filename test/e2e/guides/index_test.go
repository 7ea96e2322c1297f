// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package guides_test

import (
	"fmt"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/guides"
)

// TestReadFindsWhatAReaderTypes, in both markup languages.
func TestReadFindsWhatAReaderTypes(t *testing.T) {
	for name, test := range map[string]struct {
		text string
		want []string
	}{
		"a command in fences":          {"Look:\n```bash\nkubectl get nodes\n```\n", []string{"3 command"}},
		"one that goes on":             {"```\nkubectl label node a \\\n  x=y\nkubectl get nodes\n```\n", []string{"2 command", "4 command"}},
		"with a prompt and its output": {"```\nme@host:~$ kubectl get pods\nNAME READY\noc  1/1\n```\n", []string{"2 command"}},
		"with an object":               {"```bash\ncat << EOF | kubectl apply -f -\n---\nkind: Pod\nEOF\nkubectl get pods\n```\n", []string{"2 command", "4 document", "6 command"}},
		"a document":                   {"- so:\n\n    ```yaml\n    kind: Pod\n    ```\n", []string{"4 document"}},
		"one without its language":     {"```\n# values\nmig:\n  strategy: mixed\n```\n", []string{"2 document"}},
		"one without fences":           {"text\napiVersion: v1\n\nkind: Pod\n\n- name: x\nThe end\n", []string{"2 document"}},
		"an output":                    {"```\n+-----+\n| GPU |\n```\n", []string{"2 output"}},
		"a directive":                  {"#. So:\n\n   .. code-block:: console\n      :emphasize-lines: 1\n\n      $ kubectl get \\\n          pods\n\n   text\n", []string{"6 command"}},
		"included files":               {".. literalinclude:: ./input/a.yaml\n   :language: yaml\n.. literalinclude:: ./output/a.txt\n", []string{"1 document", "3 output"}},
		"notes":                        {"> NOTE: x\n!!! warning\n    y\n.. note::\n\n    z\n", []string{"1 note", "2 note", "4 note"}},
		"nothing":                      {"Just text with `kubectl get nodes` in it.\n```\n\n```\n", nil},
	} {
		t.Run(name, func(t *testing.T) {
			var found []string
			for _, i := range guides.Read(test.text).Items {
				found = append(found, fmt.Sprintf("%d %s", i.Line, i.Kind))
			}
			NewWithT(t).Expect(found).To(Equal(test.want))
		})
	}
}

func TestMarksTellTextsApart(t *testing.T) {
	g := NewWithT(t)
	mark := func(text string) string { return guides.Read("```bash\n" + text + "\n```\n").Items[0].Mark }
	g.Expect(mark("kubectl get nodes")).To(Equal(mark("kubectl  get nodes ")))
	g.Expect(mark("kubectl get nodes")).NotTo(Equal(mark("kubectl get pods")))
}
