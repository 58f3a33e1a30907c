"""Machines on a network, all on this machine: each has a network namespace, an address and a /tmp/ray of its own.

Packets between machines pass through a thread of this process (a TUN device per machine), which delays, paces and drops
them. That needs root, `ip` and /dev/net/tun, but no `tc` and no module of the kernel such as netem.
"""

import fcntl
import heapq
import os
import select
import shlex
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_TUN = Path("/dev/net/tun")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_MTU = 9000
_QUEUE_SECONDS = 1.0  # of packets that wait for a paced link; further ones are dropped


def missing() -> str | None:
    """The first thing that this machine lacks for a network of namespaces; None where it has everything."""
    if os.geteuid() != 0:
        return "root: network namespaces are made by root alone; run it with sudo"
    for command in ("ip", "unshare", "mount"):
        if shutil.which(command) is None:
            return f"the command `{command}` (packages iproute2, util-linux)"
    try:
        os.close(os.open(_TUN, os.O_RDWR))
    except OSError as error:
        return f"{_TUN} ({error.strerror}); load the kernel's module tun"
    name = f"cflprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces: `ip netns add` says {made.stderr.strip()!r}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


@dataclass
class Link:
    """The cable of a machine. Both directions share its settings, which may change at any time."""

    descriptor: int
    latency: float = 0.0  # seconds, in each direction
    bytes_per_second: float = float("inf")  # of what the machine sends, and of what it receives
    up: bool = True
    busy_until: dict[str, float] = field(default_factory=lambda: {"out": 0.0, "in": 0.0})

    def passes_at(self, direction: str, when: float, size: int) -> float | None:
        """The time at which a packet that comes at `when` has passed; None where it is dropped."""
        if not self.up:
            return None
        begins = max(when, self.busy_until[direction])
        if begins - when > _QUEUE_SECONDS:
            return None
        self.busy_until[direction] = begins + size / self.bytes_per_second
        return self.busy_until[direction] + self.latency


class Network:
    """Machines by name, with the links between them. Use as a context: at its end everything that it made is gone."""

    def __init__(self, folder: Path):
        self.folder, self.mark = folder, f"cfl{os.getpid()}"
        self.machines: dict[str, Machine] = {}
        self._by_address: dict[bytes, Link] = {}
        self._by_descriptor: dict[int, Link] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._forward, daemon=True)

    def __enter__(self) -> "Network":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for machine in self.machines.values():
            machine.kill()
        self._ended.set()
        self._thread.join()
        for machine in self.machines.values():
            os.close(machine.link.descriptor)
            subprocess.run(["ip", "netns", "del", machine.namespace], check=False)

    def add(self, name: str) -> "Machine":
        """A new machine, connected to all others."""
        number = len(self.machines) + 1
        address, namespace, device = f"10.203.0.{number}", f"{self.mark}{name}", f"{self.mark}t{number}"
        (self.folder / name / "ray").mkdir(parents=True, exist_ok=True)
        _ip("netns", "add", namespace)
        descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
        _ip("link", "set", device, "netns", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "link", "set", device, "mtu", str(_MTU), "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", device)
        link = Link(descriptor)
        self._by_address[bytes(map(int, address.split(".")))] = self._by_descriptor[descriptor] = link
        machine = self.machines[name] = Machine(name, address, namespace, self.folder / name, link)
        return machine

    def _forward(self) -> None:
        """Moves packets until the end."""
        waiting: list[tuple[float, int, int, bytes]] = []  # (time, number, descriptor, packet)
        number = 0
        while not self._ended.is_set():
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, descriptor, packet = heapq.heappop(waiting)
                with suppress(OSError):  # its queue is full: TCP sends it again
                    os.write(descriptor, packet)
            pause = min(waiting[0][0] - now if waiting else 0.1, 0.1)
            for source in select.select(list(self._by_descriptor), [], [], max(pause, 0))[0]:
                with suppress(BlockingIOError):
                    for _ in range(64):
                        packet = os.read(source, 65536)
                        target = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                        if target is None:
                            continue
                        sent = self._by_descriptor[source].passes_at("out", time.monotonic(), len(packet))
                        due = target.passes_at("in", sent, len(packet)) if sent is not None else None
                        if due is not None:
                            number += 1
                            heapq.heappush(waiting, (due, number, target.descriptor, packet))


@dataclass
class Machine:
    """A machine: what is started on it sees its network and its /tmp/ray alone."""

    name: str
    address: str
    namespace: str
    folder: Path
    link: Link
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def temporary(self) -> Path:
        """The folder that is /tmp/ray on this machine."""
        return self.folder / "ray"

    def start(self, command: list[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Starts a process, with those that it starts in a group of its own."""
        Path("/tmp/ray").mkdir(exist_ok=True)
        inner = f"mount --bind {shlex.quote(str(self.temporary))} /tmp/ray && exec {shlex.join(command)}"
        within = ["ip", "netns", "exec", self.namespace, "sh", "-c", inner]
        with log.open("ab") as output:
            process = subprocess.Popen(
                within, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def processes(self) -> list[int]:
        """The ids of all processes in this machine's namespace."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        return [int(number) for number in found.stdout.split()]

    def signal(self, number: int) -> None:
        """Sends a signal to every process of this machine."""
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def kill(self) -> None:
        """Ends every process of this machine, as a power failure does."""
        while self.processes():
            self.signal(signal.SIGKILL)
            for process in self.started:
                process.poll()
            time.sleep(0.02)
        for process in self.started:
            process.wait()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {shlex.join(arguments)}: {done.stderr.strip()}")
