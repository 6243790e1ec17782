"""A link by its name: ``100mbit``, ``1gbit``, ``none``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import InvalidValue

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SLOWEST, FASTEST = 1e5, 1e11  # bits per second; outside, tc's token bucket is no longer a link
MTU = 1500
HEADERS = 14 + 20 + 32  # Ethernet, IPv4, TCP with its time stamps: what each frame adds


@dataclass(frozen=True)
class Link:
    """A full-duplex link: a host sends and receives at ``rate_bits`` per second each. None: unshaped."""

    name: str
    rate_bits: float | None

    @property
    def burst_bytes(self) -> int:
        """Size of the token bucket: 64 KiB at 100 Mbit/s, 256 KiB at 1 Gbit/s.

        A larger one flatters small messages. A smaller one limits the rate of a fast link.
        """
        assert self.rate_bits is not None
        share = self.rate_bits / 100e6
        return max(8192, round(65536 * (share if share < 1 else share**0.602)))

    @property
    def payload_bytes_per_s(self) -> float | None:
        """What is left for the payload, without headers."""
        return None if self.rate_bits is None else self.rate_bits / 8 / framed_bytes(1.0)

    def seconds(self, sent_bytes: float) -> float:
        """The least time in which a host can send this many bytes, with their headers."""
        if self.rate_bits is None:
            return 0.0
        return framed_bytes(sent_bytes) * 8 / self.rate_bits


def framed_bytes(sent_bytes: float) -> float:
    """``sent_bytes`` with the headers of full frames: 1514 bytes on the link carry 1448 of payload."""
    return sent_bytes * (MTU + 14) / (MTU + 14 - HEADERS)


def parse_link(text: str, fastest: float = FASTEST) -> Link:
    """``fastest``: more than can be emulated, where the link is only thought of."""
    name = text.strip().lower()
    if name == "none":
        return Link("none", None)
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([a-z]+)", name)
    if match is None or match[2] not in UNITS:
        raise InvalidValue(
            f"link {text!r} is not known; write a rate in {', '.join(UNITS)}, as 100mbit or 2.5gbit, or none"
        )
    rate = float(match[1]) * UNITS[match[2]]
    if not SLOWEST <= rate <= fastest:
        raise InvalidValue(
            f"link {text!r} is outside of 100kbit to {fastest / 1e9:g}gbit; use a rate between, or none"
        )
    return Link(name, rate)
