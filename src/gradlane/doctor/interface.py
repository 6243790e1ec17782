"""The network interface that Gloo binds to.

torch's Gloo uses the interfaces in GLOO_SOCKET_IFNAME. If it is not set, Gloo binds to the address of the
host's own name. If that cannot be bound, it uses the loopback address, which no other host can reach.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

try:
    import psutil
except ModuleNotFoundError:  # it comes with gradlane[cli]; the doctor works without it
    psutil = None

VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"


class Binding(NamedTuple):
    """The address on which Gloo will listen."""

    address: str
    name: str
    """The name of the interface, if known."""
    how: str
    """The reason for this address, in words."""
    missing: str = ""
    """An interface of GLOO_SOCKET_IFNAME that does not exist."""

    @property
    def loopback(self) -> bool:
        with suppress(ValueError):
            return ipaddress.ip_address(self.address).is_loopback
        return False

    def __str__(self) -> str:
        speed = interface_speed(self.name)
        rate = f", {speed / 1000:g} Gbit/s by its driver" if speed else ""
        return f"{self.name or 'unknown interface'}, {self.address}{rate} ({self.how})"


def gloo_binding(environ: Mapping[str, str]) -> Binding:
    known = addresses()
    if names := environ.get(VARIABLE):
        name = names.split(",")[0]
        present = {found for _, found in socket.if_nameindex()}
        missing = next((one for one in names.split(",") if one not in present), "")
        return Binding(known.get(name, ""), name, f"{VARIABLE}={names}", missing)
    host = socket.gethostname()
    for address in _resolved(host):
        if _can_bind(address):
            name = next((name for name, own in known.items() if own == address), "")
            loop = "lo" if ipaddress.ip_address(address).is_loopback else ""
            return Binding(address, name or loop, f"the host name {host} resolves to it")
    return Binding(LOOPBACK, "lo", f"the host name {host} does not resolve to an address of this machine")


def has_psutil() -> bool:
    return psutil is not None


def addresses() -> dict[str, str]:
    """IPv4 addresses by interface; empty without psutil."""
    if psutil is None:
        return {}
    return {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }


def candidates() -> list[str]:
    """Interfaces with an address that other hosts may reach."""
    return [name for name, own in addresses().items() if not ipaddress.ip_address(own).is_loopback]


def interface_speed(name: str) -> int | None:
    """Mbit/s as the driver reports it; None for virtual interfaces, and without psutil."""
    stats = None if psutil is None else psutil.net_if_stats().get(name)
    return int(stats.speed) if stats is not None and stats.speed > 0 else None


def _resolved(host: str) -> list[str]:
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return []


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.bind((address, 0))
        return True
    return False
