"""The doctor's checks of machines, networks, environments and DDP models."""

import inspect
import json

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import gradlane as gl
from gradlane import doctor
from gradlane.doctor.environment import check_environment
from gradlane.doctor.estimates import STRATEGIES, estimates, parse_count
from gradlane.doctor.finding import Finding
from gradlane.doctor.interface import Binding, addresses, gloo_binding
from gradlane.doctor.job import merged
from gradlane.doctor.machine import check_machine, gpu_kernels, threads_finding
from gradlane.doctor.measure_link import MeasuredLink
from gradlane.doctor.reachability import check_reachability, interface_finding
from gradlane.doctor.shared_link import check_shared_link, ranks_per_host
from gradlane.plan.curves import PRIMITIVES, Curve, Curves


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "level", "advice"),
    [
        (None, 8, 8, "note", "cores / ranks"),
        (2, 4, 8, "fine", ""),
        (2, 8, 8, "costs", "OMP_NUM_THREADS=4"),
        (2, 1, 8, "note", "OMP_NUM_THREADS=4"),
        (4, 1, 2, "note", "more ranks than cores"),
        (1, 1, 1, "fine", ""),
    ],
)
def test_threads_are_compared_with_cores_and_ranks(ranks, threads, cores, level, advice):
    found = threads_finding(ranks, threads, cores, {})
    assert found.level == level
    assert advice in found.advice
    assert "OMP_NUM_THREADS is not set" in found.what


def test_kernels_that_are_switched_off_cost(monkeypatch):
    monkeypatch.setenv("GRADLANE_KERNELS", "torch")
    found = {finding.topic: finding for finding in check_machine(1, {})}["kernels"]
    assert found.level == "costs"
    assert "unset GRADLANE_KERNELS" in found.advice
    monkeypatch.setenv("GRADLANE_KERNELS", "sse9")
    found = {finding.topic: finding for finding in check_machine(1, {})}["kernels"]
    assert (found.level, found.advice) == ("broken", "unset GRADLANE_KERNELS")


def test_gpus_without_kernels_cost(monkeypatch):
    assert gpu_kernels([]) == []
    monkeypatch.setenv("GRADLANE_TRITON", "0")
    (found,) = gpu_kernels([torch.device("cuda", 0), torch.device("cuda", 1)])
    assert (found.level, found.what) == ("costs", "torch (GRADLANE_TRITON=0)")
    assert "unset GRADLANE_TRITON" in found.advice


LOOP = Binding("127.0.1.1", "lo", "the host name box resolves to it")
REAL = Binding("10.1.2.3", "eth0", "the host name box resolves to it")


@pytest.mark.parametrize(
    ("binding", "hosts", "level", "advice"),
    [
        (LOOP, 1, "note", "on several set GLOO_SOCKET_IFNAME=eth0 (or ib0)"),
        (LOOP, 2, "broken", "set GLOO_SOCKET_IFNAME=eth0 (or ib0) on every host"),
        (REAL, 2, "fine", ""),
        (Binding("", "eth9", "GLOO_SOCKET_IFNAME=eth9", "eth9"), 1, "broken", "or unset it"),
        (Binding("::1", "lo", "by name"), 2, "broken", "on every host"),
    ],
)
def test_an_address_that_others_cannot_reach_breaks_jobs_on_several_hosts(binding, hosts, level, advice):
    found = interface_finding(binding, hosts, ["eth0", "ib0"])
    assert found.level == level
    assert advice in found.advice


def test_the_interface_follows_the_variable_then_the_host_name(monkeypatch):
    assert "lo" in addresses()
    chosen = gloo_binding({"GLOO_SOCKET_IFNAME": "lo"})
    assert (chosen.address, chosen.loopback, chosen.missing) == ("127.0.0.1", True, "")
    assert gloo_binding({"GLOO_SOCKET_IFNAME": "nosuch0"}).missing == "nosuch0"
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    fallback = gloo_binding({})
    assert fallback.loopback
    assert "does not resolve" in fallback.how
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    assert "localhost resolves to it" in gloo_binding({}).how


def test_without_psutil_the_doctor_says_what_to_install(monkeypatch):
    monkeypatch.setattr("gradlane.doctor.interface.psutil", None)
    _, missing = check_reachability({}, 1)
    assert (missing.level, missing.advice) == ("note", "pip install psutil")
    assert "psutil is not installed" in missing.what


@pytest.mark.parametrize(
    ("environ", "nccl", "cuda", "levels"),
    [
        ({}, False, False, []),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, False, False, ["broken"]),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, False, True, ["costs"]),
        ({"TORCH_DISTRIBUTED_DEBUG": "INFO"}, False, False, []),
        ({"NCCL_SOCKET_NTHREADS": "16"}, False, False, []),
    ],
)
def test_the_environment(environ, nccl, cuda, levels):
    assert [found.level for found in check_environment(environ, nccl=nccl, cuda_build=cuda)] == levels


def sockets(threads=None, each=None, **more):
    variables = {"NCCL_SOCKET_NTHREADS": threads, "NCCL_NSOCKS_PERTHREAD": each, **more}
    environ = {name: str(value) for name, value in variables.items() if value is not None}
    return [(found.what, found.advice) for found in check_environment(environ, nccl=True, cuda_build=True)]


def test_sockets_of_nccl_are_advised_once_and_held_to_its_limits():
    ((what, advice),) = sockets()
    assert "one TCP socket" in what
    assert "NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4" in advice
    assert sockets(NCCL_IB_DISABLE=1) == sockets()
    for fine in ((4, 4), (16, 4), (1, 64), (8, None), (None, 8)):
        assert sockets(*fine) == sockets(*fine, NCCL_IB_DISABLE=1) == []
    assert sockets(17, 1) == [("NCCL_SOCKET_NTHREADS=17", "NCCL takes 16 at most")]
    ((what, advice),) = sockets(16, 8)
    assert what.endswith("= 128")
    assert advice == "NCCL takes 64 at most: NCCL_NSOCKS_PERTHREAD=4"


def test_sockets_of_nccl_are_no_matter_on_other_networks():
    assert sockets(NCCL_NET="IB") == []
    ((what, _),) = sockets(4, NCCL_NET="AWS Libfabric")
    assert what == "NCCL_NET=AWS Libfabric, and NCCL_SOCKET_NTHREADS is for TCP sockets"
    assert sockets(4, 4, NCCL_NET="socket") == []


@pytest.fixture
def alone():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    gl.shutdown()


def model():
    return nn.Sequential(nn.Linear(600, 600), nn.BatchNorm1d(600), nn.Linear(600, 600))


@pytest.mark.usefixtures("alone")
def test_each_setting_of_ddp_that_costs_is_named_and_no_other():
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    lean = {"gradient_as_bucket_view": True, buffers: False, "bucket_cap_mb": 1}

    def topics(**options):
        found = doctor.check_ddp(DistributedDataParallel(model(), **{**lean, **options}))
        return [(finding.topic, finding.level) for finding in found]

    assert topics() == [("DDP", "fine")]
    assert topics(find_unused_parameters=True) == [("unused parameters", "costs")]
    with pytest.warns(UserWarning, match="find_unused_parameters=true"):
        assert topics(find_unused_parameters=True, static_graph=True) == [("unused parameters", "fine")]
    assert topics(gradient_as_bucket_view=False) == [("gradients", "costs")]
    assert topics(**{buffers: True}) == [("buffers", "costs")]
    assert topics(bucket_cap_mb=0.01) == [("buckets", "costs")]
    assert topics(bucket_cap_mb=25) == [("buckets", "note")]
    default = doctor.check_ddp(DistributedDataParallel(model()))
    assert [finding.topic for finding in default] == ["gradients", "buckets", "buffers"]
    assert all(finding.advice for finding in default)
    with pytest.raises(gl.WrongType, match="got Sequential; wrap it first"):
        doctor.check_ddp(model())


def link_of(latency, rate, ranks, work=0.0):
    points = ((4096.0, latency + 4096 / rate), (1e9, latency + 1e9 / rate))
    curves = Curves(ranks, dict.fromkeys(PRIMITIVES, Curve(points)))
    return MeasuredLink(curves, dict.fromkeys(STRATEGIES, work))


def test_estimates_are_the_times_of_requests_and_work():
    link = link_of(0.001, 1e6, 2, work=1e-9)
    rows = {row.strategy: row for row in estimates(3 * 2**20 + 5, link)}
    plain = rows["Mean()"]
    assert plain.wire_bytes == 4 * (3 * 2**20 + 5)
    assert plain.sending_s == pytest.approx(plain.wire_bytes / 1e6 + 0.001 * plain.collectives)
    assert plain.seconds == pytest.approx(plain.sending_s + (3 * 2**20 + 5) * 1e-9)
    assert rows["Cast(Mean(), bfloat16)"].wire_bytes == plain.wire_bytes // 2
    assert min(rows.values(), key=lambda row: row.seconds).strategy != "Mean()"
    slow = {row.strategy: row for row in estimates(3 * 2**20 + 5, link.at_rate(1e5))}
    assert slow["Mean()"].sending_s == pytest.approx(plain.wire_bytes / 1e5, rel=0.01)


def test_the_latency_is_that_of_four_kilobytes_and_not_of_four_bytes():
    """A few bytes take another way through Gloo, whose time is that of no gradient."""
    curve = Curve(((24.0, 0.2e-3), (4096.0, 0.5e-3), (1e9, 1.0005)))
    link = MeasuredLink(Curves(2, dict.fromkeys(PRIMITIVES, curve)))
    assert link.latency_s == 0.5e-3
    assert link.bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert link.largest_bytes == 10**9
    assert json.loads(json.dumps(link.as_dict()))["curves"]["world"] == 2


def test_estimates_count_that_ranks_of_a_host_share_its_link():
    """Four ranks on two hosts: a ring leaves a host once, direct sends leave it from both ranks."""
    link = link_of(0.0, 1e6, 4)
    shared = link.shared_by(2)
    assert (link.ranks_per_host, shared.ranks_per_host, shared.bytes_per_s) == (1, 2, link.bytes_per_s)
    alone = {row.strategy: row for row in estimates(2**20, link)}
    both = {row.strategy: row for row in estimates(2**20, shared)}
    for strategy, row in both.items():
        assert row.wire_bytes == alone[strategy].wire_bytes == alone[strategy].uplink_bytes
        # What was measured between these hosts has the sharing in it: the time does not change.
        assert row.sending_s == pytest.approx(alone[strategy].sending_s, rel=1e-3)
    assert both["Mean()"].uplink_bytes == alone["Mean()"].uplink_bytes
    int8 = both["Sharded(Int8())"]  # of three peers two are on the other host
    assert int8.uplink_bytes == pytest.approx(2 * int8.wire_bytes * 2 / 3, abs=2)
    # On another link its bytes count: the host's for direct sends, the rank's for a ring.
    slower = {row.strategy: row for row in estimates(2**20, shared.at_rate(shared.curves.bytes_per_s / 100))}
    for strategy in ("Mean()", "Sharded(Int8())"):
        rate = shared.curves.bytes_per_s / 100
        assert slower[strategy].sending_s == pytest.approx(both[strategy].uplink_bytes / rate, rel=0.02)


@pytest.mark.parametrize(
    ("hosts", "shared", "what", "advice"),
    [
        (["a", "a", "a"], 1, None, None),
        (["a", "b", "c"], 1, None, None),
        (["a", "a", "b", "b"], 2, "2 ranks of a host share its link", "Hierarchical(ErrorFeedback("),
        (["a", "b", "a", "b"], 2, "2 ranks of a host share its link", "or HSDP with"),
        (["a", "a", "a", "b"], 3, "differ: 3 on a, 1 on b", "equally many ranks on each host"),
    ],
)
def test_ranks_that_share_a_link_are_told_what_sends_once_for_each_host(hosts, shared, what, advice):
    assert ranks_per_host(hosts) == shared
    found = check_shared_link(hosts)
    if what is None:
        assert found == []
        return
    (finding,) = found
    assert (finding.topic, finding.level) == ("nodes", "note")
    assert what in finding.what
    assert advice in finding.advice
    assert "docs/" not in finding.advice  # an installed package has no such folder


@pytest.mark.parametrize(
    ("text", "count"), [("9.4M", 9_400_000), ("350k", 350_000), ("7b", 7 * 10**9), (" 12 ", 12)]
)
def test_counts_are_read(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "many", "0", "-3", "9.4X", "9e99M", "99999B"])
def test_other_texts_are_refused_as_counts(text):
    with pytest.raises(gl.InvalidValue, match="write a number such as"):
        parse_count(text)


def test_what_ranks_find_is_reported_once_with_those_who_find_it():
    same, odd = Finding("torch", "fine", "2.13"), Finding("torch", "broken", "2.5", "newer")
    last = Finding("threads", "note", "few")
    found = merged([[same, last], [odd, last], [same, last]], ["a", "b", "a"])
    assert [(finding.what, finding.who) for finding in found] == [
        ("2.13", "ranks 0, 2 (a)"),
        ("2.5", "rank 1 (b)"),
        ("few", ""),
    ]
