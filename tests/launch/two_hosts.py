"""Two hosts on this machine: network namespaces with one link between them. Needs root."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.commands import command_environment

HIDDEN = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GLOO_SOCKET", "HCCL_IF", "TP_SOCKET", "HYPER_PARALLEL_")


def _ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True)


class TwoHosts:
    """Hosts 0 and 1 at 10.77.0.1 and 10.77.0.2; `refused` says why this machine cannot have them."""

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self):
        self._names = [f"hp{os.getpid()}{side}" for side in "ab"]
        self.links = [f"v{os.getpid()}{side}" for side in "ab"]
        self._started = []
        self.refused = None
        try:
            made = [_ip("netns", "add", name) for name in self._names]
            made.append(_ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1]))
        except FileNotFoundError:
            self.refused = "there is no command `ip`"
            return
        for name, link, address in zip(self._names, self.links, self.addresses, strict=True):
            made.append(_ip("link", "set", link, "netns", name))
            made.append(_ip("-n", name, "link", "set", "lo", "up"))
            made.append(_ip("-n", name, "addr", "add", f"{address}/24", "dev", link))
            made.append(_ip("-n", name, "link", "set", link, "up"))
        wrong = [done.stderr.strip() for done in made if done.returncode]
        if wrong:
            self.refused = f"`ip netns` is not permitted here: {wrong[0]}"

    def cut_link(self):
        """The cable is pulled: nothing is said to either side."""
        _ip("-n", self._names[0], "link", "set", self.links[0], "down")

    def start(self, host, *command, **variables):
        """A command on one of the hosts."""
        plain = {name: value for name, value in command_environment().items() if not name.startswith(HIDDEN)}
        plain["HYPER_PARALLEL_PLATFORM"] = os.environ["HYPER_PARALLEL_PLATFORM"]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._names[host], *command],
            env=plain | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def launch(self, host, script, *options, master=None, **variables):
        """`hyper-parallel launch` of this host's share of two."""
        where = master or f"{self.addresses[0]}:29511"
        command = [sys.executable, "-m", "hyper_parallel.cli", "launch", "--hosts", "2", "--host-rank", str(host)]
        return self.start(host, *command, "--master", where, *options, str(script), **variables)

    def close(self):
        """End what runs and take the hosts away."""
        for process in self._started:
            process.kill()
            process.communicate()
        for name in self._names:
            _ip("netns", "del", name)
        _ip("link", "del", self.links[0])
