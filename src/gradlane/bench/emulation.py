"""Hosts on this machine, joined by links of a given rate: network namespaces, veth, a bridge, tc.

The namespaces have no names. File descriptors of this process keep them. When the process ends, in any way,
the kernel removes them with everything in them: there is nothing to clean up later.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil

from ..errors import InvalidValue, WrongState
from .link import Link

CLONE_NEWNET = 0x40000000
INTERFACE = "eth0"  # of every host
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
MOST_HOSTS = 64
T = TypeVar("T")


class EmulatedNetwork:
    """``hosts`` hosts at a switch, each on its own link. A context manager."""

    def __init__(self, hosts: int, link: Link) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise InvalidValue(f"{hosts} hosts cannot be emulated; use 1 to {MOST_HOSTS}")
        self.link = link
        self.hosts = hosts
        self._descriptors = ExitStack()
        self._namespaces: list[int] = []
        self._switch = -1

    def __enter__(self) -> EmulatedNetwork:
        if (reason := why_not()) is not None:
            raise WrongState(f"links cannot be emulated here: {reason}")
        try:
            switch = self._switch = self._namespace()
            self._namespaces = [self._namespace() for _ in range(self.hosts)]
            self._build(switch)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._descriptors.close()  # the kernel removes a namespace with its last descriptor
        self._namespaces = []

    def enter(self, host: int) -> None:
        """Move this process to a host, before it starts a thread. Gloo then uses the host's interface."""
        _enter(self._namespaces[host])
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    def _namespace(self) -> int:
        made = _in_thread(_new_namespace)
        self._descriptors.callback(os.close, made)
        return made

    def _build(self, switch: int) -> None:
        own = f"/proc/{os.getpid()}/fd"
        joins = [
            line
            for host, namespace in enumerate(self._namespaces)
            for line in (
                f"link add port{host} type veth peer name {INTERFACE} netns {own}/{namespace}",
                f"link set port{host} master switch up",
            )
        ]
        _run(switch, "ip", ["link add switch type bridge", "link set switch up", *joins])
        for host, namespace in enumerate(self._namespaces):
            address = f"addr add 10.0.0.{host + 1}/24 dev {INTERFACE}"
            _run(namespace, "ip", ["link set lo up", address, f"link set {INTERFACE} up"])
            _in_thread(partial(_use_reno, namespace))
        if self.link.rate_bits is not None:
            self._shape("add", self.link)

    def change(self, link: Link) -> None:
        """Give all links another rate, while traffic is under way."""
        if self.link.rate_bits is None or link.rate_bits is None:
            raise InvalidValue("an unshaped link has no rate that could change; begin with a rate, as 10gbit")
        self._shape("change", link)
        self.link = link

    def _shape(self, how: str, link: Link) -> None:
        rule = f"root tbf rate {link.rate_bits:.0f}bit burst {link.burst_bytes} latency 50ms"
        _run(self._switch, "tc", [f"qdisc {how} dev port{host} {rule}" for host in range(self.hosts)])
        for namespace in self._namespaces:
            _run(namespace, "tc", [f"qdisc {how} dev {INTERFACE} {rule}"])


def sent_bytes(interface: str = INTERFACE) -> int:
    """Bytes that the host of this process has sent, by the counter of the interface."""
    counters = psutil.net_io_counters(pernic=True, nowrap=False)
    if interface not in counters:
        raise WrongState(f"there is no interface {interface} here")
    return int(counters[interface].bytes_sent)


def why_not() -> str | None:
    """Why links cannot be emulated on this machine, or None."""
    if missing := [tool for tool in ("ip", "tc") if _tool(tool) is None]:
        return f"no {' and no '.join(missing)}; install iproute2 from the system's packages"
    try:
        os.close(_in_thread(_new_namespace))
    except (OSError, AttributeError) as error:
        return f"network namespaces are refused ({error}); run as root"
    return None


def _tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _in_thread(function: Callable[[], T]) -> T:
    """Call it in a new thread: a namespace belongs to a thread, and the others must not change theirs."""
    found: list[T] = []
    failed: list[BaseException] = []

    def call() -> None:
        try:
            found.append(function())
        except BaseException as error:  # noqa: BLE001  raised below, in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _new_namespace() -> int:
    _checked("unshare", CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(namespace: int) -> None:
    _checked("setns", namespace, CLONE_NEWNET)


def _checked(call: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, call)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _use_reno(namespace: int) -> None:
    """Use the same congestion control on every machine. BBR, the default of some, leaves up to 8 % unused."""
    _enter(namespace)
    Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")


def _run(namespace: int, tool: str, lines: list[str]) -> None:
    def run() -> subprocess.CompletedProcess[str]:
        _enter(namespace)
        command = [_tool(tool) or tool, "-batch", "-"]
        return subprocess.run(
            command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False
        )

    done = _in_thread(run)
    if done.returncode != 0:
        raise WrongState(f"{tool} refused to set up the emulated links: {done.stderr.strip()}")
