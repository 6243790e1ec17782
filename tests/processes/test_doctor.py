"""gradlane doctor as a user runs it, alone and in a job."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from gradlane import doctor
from gradlane.bench.emulation import _checked
from gradlane.bench.hosts import hosts_for
from gradlane.bench.link import parse_link
from gradlane.doctor.examine import _local_rank
from gradlane.local import run_ranks

from ..support import scripts
from ..support.links import needs_links

pytestmark = pytest.mark.networks


def test_alone_it_measures_between_two_local_ranks(tmp_path):
    done = scripts.gradlane("doctor", "--parameters", "2M", "--json", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stderr
    for text in (
        "kernels",
        "interface",
        "Between 2 ranks, measured",
        "2 M parameters on this link",
        "Mean()",
    ):
        assert text in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["broken"] is False
    assert 0 < report["link"]["latency_s"] < 1
    assert report["link"]["bytes_per_s"] > 1e6
    assert [row["strategy"] for row in report["estimates"]] == list(report["link"]["work_s"])


IN_A_JOB = ("doctor", "--json", "--link", "1gbit")


def by_torchrun():
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *launcher, "-m", "gradlane", *IN_A_JOB],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**clean, "OMP_NUM_THREADS": "1"},
    )


def forked():
    """As torchrun, without its seconds."""
    return scripts.gradlane(*IN_A_JOB, ranks=3)


@pytest.mark.parametrize("launch", [forked, pytest.param(by_torchrun, marks=pytest.mark.slow)])
def test_in_a_job_rank_0_speaks_for_all(launch):
    done = launch()
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["where"] == "3 ranks on 1 host"
    assert report["link"]["ranks"] == 3
    assert {"torch", "kernels", "threads", "interface"} == {found["topic"] for found in report["findings"]}
    plain = report["estimates"][0]
    assert plain["sending_s"] == pytest.approx(plain["wire_bytes"] / 125e6, rel=0.2)  # but for latency


def test_what_is_broken_is_an_exit_code():
    broken = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "GLOO_SOCKET_IFNAME": "nosuch0"}
    done = scripts.gradlane("doctor", COLUMNS="100", **broken)
    assert done.returncode == 1
    for text in (
        "this host has no interface nosuch0",
        "DDP's constructor crash",
        "use INFO",
        "2 things broken",
    ):
        assert text in done.stdout
    assert "Between" not in done.stdout


def test_wrong_options():
    done = scripts.gradlane("doctor", "--parameters", "lots")
    assert done.returncode == 2
    assert "write a number such as 9.4M" in done.stderr


def on_several_hosts(rank, path):
    """Two ranks that believe to be on hosts of their own, with names that resolve nowhere."""
    name = f"host{rank}.invalid"
    socket.gethostname = lambda: name
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    report = doctor.examine()
    broken = [finding for finding in report.findings if finding.level == "broken"]
    dist.destroy_process_group()
    return report.where, report.broken, report.link, [(found.topic, found.who) for found in broken]


def test_hosts_that_cannot_reach_each_other_are_reported_before_they_try():
    each = [("interface", f"rank {rank} (host{rank}.invalid)") for rank in range(2)]
    assert run_ranks(on_several_hosts, 2, init=False) == [("2 ranks on 2 hosts", True, None, each)] * 2


def in_a_script(rank):
    """With a process group that is there already, which stays as it is."""
    report = doctor.examine(1000)
    dist.barrier()
    return report.where, report.rank, report.link.ranks


def test_it_can_be_called_in_a_training_script():
    assert run_ranks(in_a_script, 2) == [("2 ranks on 1 host", rank, 2) for rank in range(2)]


@needs_links
def test_the_link_is_what_was_measured():
    with hosts_for(2, parse_link("100mbit")) as hosts:
        found = run_ranks(_local_rank, 2, prepare=hosts.prepare)
    assert found[0].bytes_per_s == found[1].bytes_per_s
    assert 50e6 < found[0].bytes_per_s * 8 < 110e6


CLONE_NEWUTS = 0x04000000


@pytest.mark.slow
@needs_links
def test_ranks_that_share_the_link_of_a_host_are_told_about_nodes():
    """Two hosts of two ranks, with names and links of their own."""
    with hosts_for(4, parse_link("100mbit"), per_host=2) as hosts:

        def on_its_host(rank):
            hosts.prepare(rank)
            _checked("unshare", CLONE_NEWUTS)
            socket.sethostname(f"node{rank // 2}")

        where, findings, shared, rate, (mean, int8) = run_ranks(
            on_two_nodes, 4, prepare=on_its_host, deadline=120
        )[0]
    assert where == "4 ranks on 2 hosts"
    assert [level for topic, level, _ in findings if topic == "nodes"] == ["note"]
    assert any("Hierarchical(" in advice and "HSDP" in advice for _, _, advice in findings)
    assert shared == 2
    assert 50e6 < rate < 110e6
    assert mean.uplink_bytes == mean.wire_bytes
    assert int8.uplink_bytes == pytest.approx(int8.wire_bytes * 4 / 3, abs=2)
    assert int8.sending_s > 0.95 * int8.uplink_bytes * 8 / 100e6  # but for the burst


def on_two_nodes(rank):
    report = doctor.examine(1_000_000)
    findings = [(found.topic, found.level, found.advice) for found in report.findings]
    chosen = [row for row in report.estimates if row.strategy in ("Mean()", "Sharded(Int8())")]
    return report.where, findings, report.link.ranks_per_host, report.link.bytes_per_s * 8, chosen
