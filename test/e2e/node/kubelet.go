// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const kubeletConfig = etc + "/kubelet.yaml"

func (n *Node) startKubelet() error {
	if log, err := os.Stat(kubeletLog()); err == nil {
		n.kubeletBegan.Store(log.Size())
	}
	kubelet, err := n.run("kubelet",
		"--config="+kubeletConfig, "--kubeconfig="+etc+"/kubelet.conf",
		"--hostname-override="+n.options.Name, "--node-ip="+Address,
		"--root-dir=/var/lib/kubelet", "--cert-dir=/var/lib/kubelet/pki", "--v=2")
	if err != nil {
		return err
	}
	n.kubelet = kubelet
	return nil
}

// PublishEvery restarts the kubelet with another interval at which it publishes its status.
func (n *Node) PublishEvery(ctx context.Context, every time.Duration) error {
	n.options.StatusEvery = every
	if err := os.WriteFile(kubeletConfig, []byte(n.kubeletConfig()), 0o644); err != nil {
		return fmt.Errorf("writing the kubelet's configuration: %w", err)
	}
	return n.RestartKubelet(ctx)
}

// kubeletConfig is the kubelet's configuration. Set because of this machine: cgroupDriver, since systemd does not run
// here; failCgroupV1 and failSwapOn, since build machines have control groups of version 1 and may swap;
// localStorageCapacityIsolation and eviction, since the node's file systems lie in memory; oomScoreAdj, since lowering
// it needs CAP_SYS_RESOURCE. Set for speed: nodeStatusUpdateFrequency, whose default of 10s is the time that
// `make bench` measures with; what has not changed is published as often at most.
func (n *Node) kubeletConfig() string {
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: %s/ca.crt}
authorization: {mode: Webhook}
cgroupDriver: cgroupfs
containerRuntimeEndpoint: unix://%s
enableServer: true
evictionHard: {memory.available: 50Mi, nodefs.available: "0%%", nodefs.inodesFree: "0%%", imagefs.available: "0%%"}
failCgroupV1: false
failSwapOn: false
imageGCHighThresholdPercent: 100
localStorageCapacityIsolation: false
nodeStatusReportFrequency: %s
nodeStatusUpdateFrequency: %s
oomScoreAdj: 0
registerNode: true
resolvConf: %s/resolv.conf
rotateCertificates: false
shutdownGracePeriod: 0s
`, pki, containerdSocket, max(n.options.StatusEvery, time.Second), n.options.StatusEvery, etc)
}

// startControlPlane starts etcd, the API server, the controller manager and the scheduler.
func (n *Node) startControlPlane(ctx context.Context) error {
	if _, err := n.run("etcd", etcdArguments()...); err != nil {
		return err
	}
	apiserver, err := n.run("kube-apiserver", apiserverArguments()...)
	if err != nil {
		return err
	}
	if err := n.connect(); err != nil {
		return err
	}
	if err := n.waitFor(ctx, apiserver, "the API server", n.apiserverReady); err != nil {
		return err
	}
	for name, args := range map[string][]string{
		"kube-controller-manager": controllerManagerArguments(),
		"kube-scheduler":          schedulerArguments(),
	} {
		if _, err := n.run(name, args...); err != nil {
			return err
		}
	}
	return nil
}

// connect makes the administrator's client. Client-side throttling is off: the tests look often.
func (n *Node) connect() error {
	n.Config = &rest.Config{
		Host:            apiserverURL,
		TLSClientConfig: rest.TLSClientConfig{CAFile: pki + "/ca.crt", CertFile: pki + "/admin.crt", KeyFile: pki + "/admin.key"},
		QPS:             -1,
	}
	client, err := kubernetes.NewForConfig(n.Config)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	n.Client = client
	return nil
}

func (n *Node) apiserverReady(ctx context.Context) error {
	return n.Client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
}

func etcdArguments() []string {
	return []string{
		"--data-dir=/var/lib/etcd",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380",
		"--initial-cluster=default=http://127.0.0.1:2380",
		"--unsafe-no-fsync", // nothing here outlives the machine
	}
}

func apiserverArguments() []string {
	return []string{
		"--etcd-servers=http://127.0.0.1:2379",
		// The service kubernetes is reached without kube-proxy, because the API server listens on its address and port.
		"--secure-port=443", "--bind-address=0.0.0.0", "--advertise-address=" + Address,
		"--service-cluster-ip-range=" + serviceRange,
		"--tls-cert-file=" + pki + "/apiserver.crt", "--tls-private-key-file=" + pki + "/apiserver.key",
		"--client-ca-file=" + pki + "/ca.crt",
		"--kubelet-client-certificate=" + pki + "/apiserver-kubelet.crt", "--kubelet-client-key=" + pki + "/apiserver-kubelet.key",
		"--kubelet-preferred-address-types=InternalIP",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + pki + "/sa.pub", "--service-account-signing-key-file=" + pki + "/sa.key",
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--allow-privileged=true",
	}
}

func controllerManagerArguments() []string {
	return []string{
		"--kubeconfig=" + etc + "/controller-manager.conf",
		"--root-ca-file=" + pki + "/ca.crt", "--service-account-private-key-file=" + pki + "/sa.key",
		"--use-service-account-credentials=true",
		"--leader-elect=false", "--bind-address=127.0.0.1",
	}
}

func schedulerArguments() []string {
	return []string{"--kubeconfig=" + etc + "/scheduler.conf", "--leader-elect=false", "--bind-address=127.0.0.1"}
}

const (
	// logs is where programs and pods write.
	logs = "/var/log"
	// stopAfter is how long a program may take to stop.
	stopAfter = 5 * time.Second
	// upAfter is how long a program may take until it does its work; etcd and the API server need seconds on an idle
	// machine, and minutes are for one that is not.
	upAfter = 3 * time.Minute
	// poll is how often one looks.
	poll = 100 * time.Millisecond
	// tail is how much of a log is shown when a program fails.
	tail = 3000
)

var getOptions = metav1.GetOptions{}

// program is a running program that writes to a log of its own.
type program struct {
	name    string
	cmd     *exec.Cmd
	started time.Time
	ended   chan struct{}
}

// run starts a program of the node's.
func (n *Node) run(name string, args ...string) (*program, error) {
	log, err := os.OpenFile(filepath.Join(logs, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("opening the log of %s: %w", name, err)
	}
	defer log.Close() //nolint:errcheck // the program writes it
	cmd := exec.Command(n.program(name), args...)
	cmd.Stdout, cmd.Stderr = log, log
	// Containerd finds its shim, and the kubelet its tools, beside them.
	cmd.Env = append(os.Environ(), "PATH="+n.options.Bin+":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C comes to us, and we stop them in order
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	p := &program{name: name, cmd: cmd, started: time.Now(), ended: make(chan struct{})}
	go func() {
		_ = cmd.Wait() // how it ended stands in ProcessState
		close(p.ended)
	}()
	n.programs = append(n.programs, p)
	return p, nil
}

// runs reports whether a program has not ended.
func (p *program) runs() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

func (p *program) stop() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stopping %s: %w", p.name, err)
	}
	select {
	case <-p.ended:
		return nil
	case <-time.After(stopAfter):
	}
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("killing %s: %w", p.name, err)
	}
	<-p.ended
	return nil
}

// waitFor waits until a finding holds, as long as the program that must bring it about lives.
func (n *Node) waitFor(ctx context.Context, p *program, what string, finding func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, upAfter)
	defer cancel()
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		err := finding(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-p.ended:
			return fmt.Errorf("waiting for %s: %s has ended (%s); the end of its log:\n%s", what, p.name, p.cmd.ProcessState, p.logTail())
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w; the end of the log of %s:\n%s", what, err, p.name, p.logTail())
		}
	}
}

func (p *program) logTail() string {
	data, err := os.ReadFile(filepath.Join(logs, p.name+".log"))
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(data[max(0, len(data)-tail):]))
}
