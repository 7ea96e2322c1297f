// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// The services of the driver: where their sockets are, below the root that they run in.
const (
	PersistencedSocket   = "/var/run/nvidia-persistenced/socket"
	FabricManagerSocket  = "/var/run/nvidia-fabricmanager/socket"
	persistenced         = "nvidia-persistenced"
	fabricManager        = "nv-fabricmanager"
	PersistencedReleases = persistenced + " release" // the call that a fault names to make it keep a GPU at a reset
)

// foreground makes a service serve in the process that was started.
const foreground = "--foreground"

// serviceStart is how long a service may take to answer for the first time.
const serviceStart = 10 * time.Second

// RunService is the program of a service: it leaves a daemon behind that has the driver open, and that answers on a
// socket. With --foreground it is that daemon itself. answer answers a line of a connection; ended is told when that is
// over.
func RunService(socket string, what sim.Client, answer func(c *Client, connection *Connection, line string) string) error {
	d, err := Here()
	if err != nil {
		return err
	}
	path := filepath.Join(d.Root(), socket)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if !slices.Contains(os.Args[1:], foreground) {
		return leaveBehind(path)
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	client, err := d.ConnectAs(what)
	if err != nil {
		return err
	}
	listener, err := listen(path)
	if err != nil {
		return errors.Join(err, client.Disconnect())
	}
	go func() {
		<-ctx.Done()
		_ = listener.Close() // and so ends the loop
	}()
	for {
		c, err := listener.Accept()
		if err != nil {
			return client.Disconnect()
		}
		go serve(c, client, answer)
	}
}

// Connection is what a service knows about one connection.
type Connection struct{ AtEnd []func() }

func serve(c net.Conn, client *Client, answer func(*Client, *Connection, string) string) {
	defer c.Close() //nolint:errcheck // nothing more to say
	connection := &Connection{}
	defer func() {
		for _, f := range connection.AtEnd {
			f()
		}
	}()
	lines := bufio.NewScanner(c)
	for lines.Scan() {
		if _, err := fmt.Fprintln(c, answer(client, connection, lines.Text())); err != nil {
			return
		}
	}
}

// listen listens on a socket, which is named relative to its folder: an address has room for 107 bytes.
func listen(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if err := os.Chdir(filepath.Dir(path)); err != nil {
		return nil, err
	}
	return net.Listen("unix", filepath.Base(path))
}

// leaveBehind starts this program in a session of its own and returns once it answers.
func leaveBehind(socket string) error {
	self, err := ownFile()
	if err != nil {
		return err
	}
	daemon := exec.Command(self, append(os.Args[1:], foreground)...)
	daemon.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	fd, err := unix.MemfdCreate("output", unix.MFD_CLOEXEC)
	if err != nil {
		return err
	}
	output := os.NewFile(uintptr(fd), "output") // neither /dev/null, which a root may lack, nor what the caller waits for
	defer output.Close()                        //nolint:errcheck // the daemon has its own
	daemon.Stdin, daemon.Stdout, daemon.Stderr = output, output, output
	if err := daemon.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- daemon.Wait() }()
	deadline := time.After(serviceStart)
	for {
		if c, err := dialAt(socket); err == nil {
			return c.Close()
		}
		select {
		case err := <-ended:
			return cmp.Or(err, errors.New("the daemon ended at once"))
		case <-deadline:
			return errors.Join(errors.New("the daemon does not answer"), daemon.Process.Kill())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func dialAt(path string) (net.Conn, error) {
	if err := os.Chdir(filepath.Dir(path)); err != nil {
		return nil, err
	}
	return net.Dial("unix", filepath.Base(path))
}

// RunPersistenced is nvidia-persistenced: it has every GPU open, and lets one go when a program that reaches its socket
// asks for it. What is let go for a reset it takes back when that connection ends. It takes no GPU back on request but
// the first.
func RunPersistenced() error {
	d, err := Here()
	if err != nil {
		return err
	}
	return RunService(PersistencedSocket, sim.Client{Program: persistenced}, func(c *Client, connection *Connection, line string) string {
		verb, uuid, _ := strings.Cut(line, " ")
		take := func() error {
			return c.Change(func(what *sim.Client) {
				what.Except = slices.DeleteFunc(what.Except, func(other string) bool { return other == uuid })
			})
		}
		var err error
		switch verb {
		case "reset":
			if fault, _, taken := d.Take(PersistencedReleases, uuid); taken != nil || fault.Return != sim.Success {
				return "refused"
			}
			err = c.Change(func(what *sim.Client) { what.Except = append(what.Except, uuid) })
			connection.AtEnd = append(connection.AtEnd, func() { _ = take() }) // nobody is left to be told
		case "off":
			err = c.Change(func(what *sim.Client) { what.Except = append(what.Except, uuid) })
		case "on":
			n, failed := d.Node()
			if failed != nil || len(n.GPUs) == 0 || n.GPUs[0].UUID != uuid {
				return "refused"
			}
			err = take()
		}
		if err != nil {
			return "refused"
		}
		return "done"
	})
}

// RunFabricManager is the fabric manager, which has the NVSwitches open.
func RunFabricManager() error {
	return RunService(FabricManagerSocket, sim.Client{Program: fabricManager, Switches: true},
		func(*Client, *Connection, string) string { return "done" })
}

// Persistent reports whether nvidia-persistenced has a GPU open.
func (d clients) Persistent(uuid string) bool {
	clients, err := d.Connected()
	return err == nil && slices.ContainsFunc(clients, func(c sim.Client) bool { return c.Program == persistenced && c.Opens(uuid) })
}

// Persistenced is a connection to nvidia-persistenced, for nvidia-smi.
type Persistenced struct {
	conn    net.Conn
	answers *bufio.Reader
}

// DialPersistenced connects to nvidia-persistenced in the root in which this program runs. It reports false if it is
// not there.
func DialPersistenced() (*Persistenced, bool) {
	c, err := net.Dial("unix", PersistencedSocket)
	if err != nil {
		return nil, false
	}
	return &Persistenced{c, bufio.NewReader(c)}, true
}

// Ask asks for something: reset (let a GPU go until the connection ends), off or on.
func (p *Persistenced) Ask(verb, uuid string) bool {
	if _, err := fmt.Fprintln(p.conn, verb, uuid); err != nil {
		return false
	}
	answer, err := p.answers.ReadString('\n')
	return err == nil && answer == "done\n"
}

// Close ends the connection.
func (p *Persistenced) Close() error { return p.conn.Close() }
