// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package env

import (
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
)

// keeper is the process that outlives a process with tests. It holds the reading end of a pipe, which closes when the
// tests end, however they end: also when they are killed or time out.
var keeper struct {
	sync.Mutex

	pipe *os.File
}

// keeping reads folders, one a line, until its input closes. Then it ends the programs that an argument names such a
// folder to, and removes the folders.
const keeping = `folders=
while IFS= read -r folder; do folders="$folders=$folder/
"; done
for found in $(printf %s "$folders" | grep -lsaF -f - /proc/[0-9]*/cmdline); do
	pid=${found#/proc/}
	kill -KILL "${pid%/cmdline}"
done
printf %s "$folders" | while IFS= read -r folder; do rm -rf "${folder#=}"; done`

// endWithProcess makes the API server and etcd of a folder end with this process, and the folder with them.
func endWithProcess(folder string) error {
	keeper.Lock()
	defer keeper.Unlock()
	if keeper.pipe == nil {
		reader, writer, err := os.Pipe()
		if err != nil {
			return fmt.Errorf("starting the process that ends API servers: %w", err)
		}
		defer reader.Close() //nolint:errcheck // the keeper has its own
		cmd := exec.Command("/bin/sh", "-c", keeping)
		cmd.Stdin = reader
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C is not for it
		if err := cmd.Start(); err != nil {
			return fmt.Errorf("starting the process that ends API servers: %w", err)
		}
		keeper.pipe = writer
	}
	if _, err := fmt.Fprintln(keeper.pipe, folder); err != nil {
		return fmt.Errorf("telling the process that ends API servers of %s: %w", folder, err)
	}
	return nil
}
