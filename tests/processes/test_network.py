"""Emulated links, with real namespaces. Where they cannot be made the tests are skipped by name."""

import gc
import os
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist

import gradlane as gl
from gradlane.bench import emulation
from gradlane.bench.emulation import EmulatedNetwork, sent_bytes, why_not
from gradlane.bench.link import Link, framed_bytes, parse_link
from gradlane.local import run_ranks

from ..support.leftovers import gone, members, namespaces
from ..support.links import needs_links
from ..support.sessions import started

pytestmark = pytest.mark.networks


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100mbit", 1e8), ("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("500kbit", 5e5), ("none", None)],
)
def test_links_by_name(text, rate):
    assert parse_link(text).rate_bits == rate


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("100mb", "link '100mb' is not known; write a rate in kbit, mbit, gbit"),
        ("fast", "is not known"),
        ("0mbit", "outside of 100kbit to 100gbit"),
        ("900gbit", "outside of"),
        ("-1gbit", "is not known"),
        ("", "is not known"),
    ],
)
def test_other_names_are_refused(text, message):
    with pytest.raises(gl.InvalidValue, match=message):
        parse_link(text)


def test_bursts_are_the_measured_ones():
    assert parse_link("100mbit").burst_bytes == 64 * 1024
    assert parse_link("1gbit").burst_bytes == pytest.approx(256 * 1024, rel=0.01)
    assert Link("x", 10e6).burst_bytes >= 4 * 1514


def exchange(rank, numel):
    tensor = torch.ones(numel)
    dist.all_reduce(tensor)
    dist.barrier()  # what was given to the link has left it when the other rank has it
    before, start = sent_bytes(), time.perf_counter()
    dist.all_reduce(tensor)
    seconds = time.perf_counter() - start
    dist.barrier()
    return seconds, sent_bytes() - before, socket.if_nameindex()


@needs_links
def test_a_shaped_link_has_its_rate_and_counts_its_bytes():
    link = parse_link("100mbit")
    with EmulatedNetwork(2, link) as hosts:
        found = run_ranks(exchange, 2, 1_000_000, prepare=hosts.enter)
    for seconds, counted, interfaces in found:
        assert seconds >= 0.9 * link.seconds(4e6)  # never faster than the link
        assert 4e6 <= counted <= 1.03 * framed_bytes(4e6)
        assert {name for _, name in interfaces} == {"lo", "eth0"}


@needs_links
def test_hosts_come_and_go_without_a_trace():
    gc.collect()  # what earlier tests left to it
    before = (socket.if_nameindex(), os.listdir("/proc/self/fd"))
    used = set()
    for _ in range(3):
        with EmulatedNetwork(4, Link("none", None)) as hosts:
            used |= set(run_ranks(lambda rank: os.readlink("/proc/self/ns/net"), 4, prepare=hosts.enter))
    with pytest.raises(ZeroDivisionError), EmulatedNetwork(2, parse_link("1gbit")):
        raise ZeroDivisionError
    assert (socket.if_nameindex(), os.listdir("/proc/self/fd")) == before
    assert len(used) > 3  # each host was one of its own; the kernel may use a number again
    assert not used & namespaces()


KILLED = """
import os
import time
from gradlane.bench.link import parse_link
from gradlane.bench.emulation import EmulatedNetwork
from gradlane.local import run_ranks
with EmulatedNetwork(2, parse_link("100mbit")) as hosts:
    run_ranks(lambda rank: (os.write(1, b"up\\n"), time.sleep(60)), 2, prepare=hosts.enter)
"""


@pytest.mark.slow  # a bench on nodes does the same in the quick suite
@needs_links
def test_a_killed_process_takes_its_ranks_and_its_hosts_with_it():
    with started((sys.executable, "-c", KILLED)) as victim:
        assert [victim.stdout.readline(), victim.stdout.readline()] == ["up\n", "up\n"]
        used = namespaces(members(victim.pid))
        assert len(used) == 2  # those of the two ranks
        victim.kill()
        victim.wait(10)
        assert gone(lambda: not members(victim.pid))
        assert not used & namespaces()


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(emulation, "_tool", lambda name: None)
    assert why_not() == "no ip and no tc; install iproute2 from the system's packages"
    with pytest.raises(gl.WrongState, match="links cannot be emulated here: no ip and no tc"):
        EmulatedNetwork(2, parse_link("1gbit")).__enter__()
    monkeypatch.setattr(emulation, "_tool", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(emulation, "_checked", refused)
    assert "run as root" in why_not()


def refused(call, *arguments):
    raise PermissionError(1, f"{call}: Operation not permitted")


def test_too_many_hosts_are_refused():
    with pytest.raises(gl.InvalidValue, match="65 hosts cannot be emulated; use 1 to 64"):
        EmulatedNetwork(65, parse_link("none"))
