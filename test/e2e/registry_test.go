// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/image"
)

const (
	// registryAddress is where distribution's registry serves what is installed, and registryFolder where in it.
	registryAddress, registryFolder = "127.0.0.1:5000", "/gpu-sharing"
	chartReference                  = "oci://" + registryAddress + registryFolder + "/charts/gpu-sharing-operator"

	// The operator's images. What is published has the version of the chart.
	controllerImage, agentImage = "example.com/gpu-sharing-controller:built", "example.com/gpu-sharing-agent:built"
)

// startRegistry starts a registry, which ends with the specs, or before.
func startRegistry(ctx context.Context, address string) (stop func()) {
	GinkgoHelper()
	folder, err := os.MkdirTemp("", "registry-")
	Expect(err).NotTo(HaveOccurred())
	serve := exec.Command(filepath.Join(bin, "registry"), address, folder)
	serve.Stdout, serve.Stderr = GinkgoWriter, GinkgoWriter
	Expect(serve.Start()).To(Succeed())
	apart = append(apart, serve.Process.Pid)
	stop = sync.OnceFunc(func() {
		_ = serve.Process.Kill()
		_ = serve.Wait() // it was killed
	})
	DeferCleanup(stop)
	Eventually(func() error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/v2/", http.NoBody)
		if err != nil {
			return err
		}
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			return err
		}
		return answer.Body.Close()
	}).WithContext(ctx).Should(Succeed())
	return stop
}

// publish pushes the chart of a folder with the operator's images, by the program of `make release`, which may get more
// flags; an empty version is that of the chart.
func publish(ctx context.Context, folder, version string, images []image.Image, flags ...string) {
	GinkgoHelper()
	began := time.Now()
	var archives []string
	for _, i := range images {
		name, _, _ := strings.Cut(filepath.Base(i.Name), ":")
		archives = append(archives, name+"="+write(i))
	}
	push := exec.CommandContext(ctx, filepath.Join(bin, "release"), append([]string{
		"-root=" + folder, "-registry=" + registryAddress + registryFolder,
		"-helm=" + filepath.Join(bin, "helm"), "-as=" + version, "-trial=" + strings.Join(archives, ","),
	}, flags...)...)
	out, err := push.CombinedOutput()
	Expect(err).NotTo(HaveOccurred(), "%s", out)
	GinkgoWriter.Printf("   published in %s:\n%s", time.Since(began).Round(100*time.Millisecond), out)
}
