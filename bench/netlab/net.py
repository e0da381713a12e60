"""Hosts as network namespaces, joined by veth pairs and bridges with tc limits, which are always removed again.

Everything is in namespaces whose names start with ``paselab-``: the machine's own network is not changed. What a killed
run left behind is removed when the next one starts; a lock prevents two runs at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

__all__ = ["LabError", "Network", "Topology", "clean", "interruptible", "unavailable"]

PREFIX = "paselab-"
LOCK = Path("/run/paselab.lock")
ETC = Path("/etc/netns")
BURST, QUEUE = "96kb", "4mb"


class LabError(RuntimeError):
    """The laboratory could not be set up, or a program in it failed; the message has the reason."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A simulated network. racks: the number of hosts in each. host_mbit: the rate of every host's link in both
    directions; 0: unlimited. uplink_mbit: that of each rack's link to the others. hosts_a_core: this many hosts share a
    core of this machine and see no other; 0: all hosts share all cores."""

    racks: tuple[int, ...]
    host_mbit: float
    uplink_mbit: float = 0.0
    hosts_a_core: int = 0

    @property
    def hosts(self) -> int:
        return sum(self.racks)

    @property
    def name(self) -> str:
        shape = f"{self.hosts} hosts" if len(self.racks) == 1 else f"{'+'.join(map(str, self.racks))} hosts"
        link = f"{self.host_mbit:g} Mbit" if self.host_mbit else "no limit"
        up = f", uplink {self.uplink_mbit:g} Mbit" if len(self.racks) > 1 else ""
        cores = f", {self.hosts_a_core} a core" if self.hosts_a_core else ""
        return f"{shape}, {link}{up}{cores}"

    @property
    def slug(self) -> str:
        return self.name.replace(" ", "").replace(",", "_").replace("+", "p")

    @property
    def levels(self) -> str:
        """The value of ``pase calibrate --levels``."""
        if len(self.racks) == 1:
            return f"host={self.hosts}"
        return f"host={self.racks[0]},rack={len(self.racks)}"


def unavailable() -> str | None:
    """Returns why the laboratory cannot run here; None if it can."""
    if platform.system() != "Linux":
        return f"network namespaces are Linux's, this is {platform.system()}"
    if os.geteuid() != 0:
        return "setting up network namespaces needs root"
    missing = [p for p in ("ip", "tc") if shutil.which(p) is None]
    if missing:
        return f"no {' or '.join(missing)}: install iproute2"
    probe = f"{PREFIX}probe{os.getpid()}"  # a killed run may have left namespaces behind
    tried = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    try:
        _inside(probe, "ip", "link", "add", "one", "type", "veth", "peer", "name", "two")
        _inside(probe, "tc", *_limit("one", 100.0))
    except LabError as e:
        return f"links cannot be limited here: {e}"
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return None


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"'{' '.join(command)}' failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _inside(namespace: str, *command: str) -> str:
    return _run("ip", "netns", "exec", namespace, *command)


def _limit(device: str, mbit: float) -> list[str]:
    """Returns the arguments of tc for a small token bucket: a burst at full speed speeds small messages up."""
    rate = ["rate", f"{mbit:g}mbit", "burst", BURST, "limit", QUEUE]
    return ["qdisc", "replace", "dev", device, "root", "tbf", *rate]


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)]


def clean() -> list[str]:
    """Removes every namespace of the laboratory with its processes, and returns the names."""
    found = _namespaces()
    for name in found:
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
        for pid in pids.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    for name in found:
        _delete(name)
    if ETC.is_dir():
        for folder in ETC.glob(f"{PREFIX}*"):
            shutil.rmtree(folder, ignore_errors=True)
    return found


def _delete(name: str) -> None:
    for attempt in range(20):
        done = subprocess.run(["ip", "netns", "del", name], capture_output=True, text=True)
        if not done.returncode or name not in _namespaces():
            return
        time.sleep(0.05 * (attempt + 1))
    raise LabError(f"namespace {name} does not go away: {done.stderr.strip()}; try: ip netns del {name}")


class Network:
    """Context manager for the hosts of a topology, which exist only inside of it.

    ``command(i, argv)`` returns the command that runs argv on host i, ``address(i)`` its IP.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._lock: IO[str] | None = None

    def __enter__(self) -> Network:
        reason = unavailable()
        if reason:
            raise LabError(reason)
        self._lock = LOCK.open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            self._lock = None
            raise LabError(f"another network laboratory is running ({LOCK} is locked); wait for it") from None
        try:
            clean()
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._down()

    def _down(self) -> None:
        try:
            clean()
        finally:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def host(self, i: int) -> str:
        return f"{PREFIX}h{i}"

    def address(self, i: int) -> str:
        return f"10.77.0.{i + 1}"

    def _up(self) -> None:
        t = self.topology
        number = 0
        for rack, hosts in enumerate(t.racks):
            switch = f"{PREFIX}s{rack}"
            _run("ip", "netns", "add", switch)
            _inside(switch, "ip", "link", "add", "br0", "type", "bridge")
            _inside(switch, "ip", "link", "set", "br0", "up")
            for _ in range(hosts):
                self._host(number, switch)
                number += 1
            if rack:
                self._uplink(rack, switch)
        # The limits come last, after bridges and addresses are set up.
        self.limit(t.host_mbit, t.uplink_mbit)

    def _host(self, i: int, switch: str) -> None:
        name, port = self.host(i), f"p{i}"
        _run("ip", "netns", "add", name)
        _run(
            "ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", switch
        )
        _inside(switch, "ip", "link", "set", port, "master", "br0", "up")
        _inside(name, "ip", "link", "set", "lo", "up")
        _inside(name, "ip", "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
        _inside(name, "ip", "link", "set", "eth0", "up")
        # gloo binds to the address of the host's name; ip netns exec shows this file as /etc/hosts.
        folder = ETC / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{self.address(i)} {socket.gethostname()}\n")

    def _uplink(self, rack: int, switch: str) -> None:
        """Connects a rack to the switch of the first one, by its own link."""
        ends = (f"u{rack}", f"{PREFIX}s0"), ("u0", switch)
        (a, core), (b, _) = ends
        _run("ip", "link", "add", a, "netns", core, "type", "veth", "peer", "name", b, "netns", switch)
        for end, place in ends:
            _inside(place, "ip", "link", "set", end, "master", "br0", "up")

    def limit(self, host_mbit: float, uplink_mbit: float = 0.0) -> None:
        """Sets the links' rates, also while programs run; 0: no limit."""
        number = 0
        for rack, hosts in enumerate(self.topology.racks):
            switch = f"{PREFIX}s{rack}"
            for _ in range(hosts):
                for place, device in ((self.host(number), "eth0"), (switch, f"p{number}")):
                    self._set(place, device, host_mbit)
                number += 1
            if rack:
                self._set(f"{PREFIX}s0", f"u{rack}", uplink_mbit)
                self._set(switch, "u0", uplink_mbit)

    def _set(self, place: str, device: str, mbit: float) -> None:
        if mbit:
            _inside(place, "tc", *_limit(device, mbit))
        else:
            subprocess.run(
                ["ip", "netns", "exec", place, "tc", "qdisc", "del", "dev", device, "root"],
                capture_output=True,
            )

    def core(self, i: int) -> int:
        """Returns the core of host i, if hosts have one: its programs and XLA's thread pools then see one core."""
        cores = sorted(os.sched_getaffinity(0))
        return cores[i // self.topology.hosts_a_core % len(cores)]

    def command(self, i: int, argv: list[str]) -> list[str]:
        """Returns the command that runs argv on host i and dies with its parent process."""
        leash = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        if self.topology.hosts_a_core:
            leash += ["taskset", "-c", str(self.core(i))]
        return [*leash, "ip", "netns", "exec", self.host(i), *argv]


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP end the program like Ctrl-C, so that the laboratory is taken down."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
