// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/test/mps/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// endOfAnswer ends what the daemon answers to one command.
const endOfAnswer = 0

// watchTime is how often the daemon looks whether it still has a place to be.
const watchTime = 500 * time.Millisecond

// daemon is an MPS control daemon. Its limits and servers live and die with it.
type daemon struct {
	driver *simdriver.Driver
	self   string // this program
	pipe   string
	logs   string
	boot   int
	end    context.CancelFunc

	mu          sync.Mutex
	model       *sim.Daemon
	servers     map[int]server
	connections map[int]*connection // of clients, by PID
}

// serve is the daemon, in the foreground.
func serve(self string, driver *simdriver.Driver, pipe, logs string, multiUser bool) error {
	if err := os.Chdir(pipe); err != nil {
		return err
	}
	held, err := claim()
	if err != nil {
		return err
	}
	defer held.Close() //nolint:errcheck // with the process
	state, err := driver.Read()
	if err != nil {
		return err
	}
	if err := driver.EndMPS(pipe); err != nil { // what a daemon that was killed has left
		return err
	}
	listener, err := net.Listen("unix", socketName)
	if err != nil {
		return err
	}
	ctx, end := context.WithCancel(context.Background())
	d := &daemon{
		driver: driver, self: self, pipe: pipe, logs: logs, boot: state.Node.Boot, end: end,
		servers: map[int]server{}, connections: map[int]*connection{},
	}
	d.model = sim.New(d, multiUser)
	if err := os.Chmod(socketName, 0o777); err != nil { // clients of any user
		return err
	}
	if err := os.WriteFile(pidName, fmt.Appendf(nil, "%d\n", os.Getpid()), 0o644); err != nil {
		return err
	}
	d.log("Starting control daemon using socket %s", filepath.Join(pipe, socketName))
	go d.watch()
	go d.accept(listener)
	<-ctx.Done()
	d.mu.Lock()
	d.model.Close()
	d.mu.Unlock()
	d.log("Exit")
	return errors.Join(driver.EndMPS(pipe), listener.Close(), ignoreGone(os.Remove(pidName)), ignoreGone(os.Remove(lockName)))
}

// claim takes the pipe directory's lock and removes what a daemon that was killed has left.
func claim() (*os.File, error) {
	f, err := os.OpenFile(lockName, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(errRunning, f.Close())
	}
	return f, ignoreGone(os.Remove(socketName))
}

func ignoreGone(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

func (d *daemon) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go d.listen(c)
	}
}

// listen answers one client. It ends the daemon only after the answer is out.
func (d *daemon) listen(c net.Conn) {
	defer c.Close() //nolint:errcheck // nothing is lost
	commands := bufio.NewScanner(c)
	for commands.Scan() {
		line := strings.TrimSpace(commands.Text())
		if hello, is := isHello(line); is {
			d.connect(c, hello)
			return
		}
		if d.quitting() {
			return
		}
		d.log("Received command: %s", line)
		answer, quit := d.answer(line)
		if answer != "" && !strings.HasSuffix(answer, "\n") {
			answer += "\n"
		}
		if quit { // before the answer, so that a new daemon may start once the client has returned
			_ = ignoreGone(os.Remove(socketName))
		}
		_, _ = fmt.Fprintf(c, "%s%c", answer, endOfAnswer)
		if quit {
			d.end()
			return
		}
	}
}

func (d *daemon) quitting() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.model.Quitting
}

// watch ends the daemon when its pipe directory is gone or the node has rebooted.
func (d *daemon) watch() {
	for {
		time.Sleep(watchTime)
		state, err := d.driver.Read()
		if _, gone := os.Stat(filepath.Join(d.pipe, lockName)); gone != nil || err == nil && state.Node.Boot != d.boot {
			d.end()
			return
		}
	}
}

func (d *daemon) log(format string, args ...any) {
	if os.MkdirAll(d.logs, 0o755) != nil {
		return
	}
	now := time.Now().Format("2006-01-02 15:04:05.000")
	logTo(filepath.Join(d.logs, "control.log"), "[%s Control %5d] %s", now, os.Getpid(), fmt.Sprintf(format, args...))
}
