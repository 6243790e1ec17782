"""Whether a change made a step slower: two installed versions alternate, step by step, in one run.

Each version runs two ranks in processes of its own, over loopback or an emulated link that both share, with
one thread per rank. A step of one version is followed by the same step of the other, so a slow moment of the
machine hits both. The arm ``ddp`` runs no code of gradlane: its ratio shows what chance makes of two equal
versions.

    .venv/bin/python benchmarks/two_checkouts.py --old OLD/.venv/bin/python --new .venv/bin/python --json FILE
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ARMS = (
    "ddp",
    "Mean()",
    "Cast(Mean(), bfloat16)",
    "ErrorFeedback(Sharded(Int8()))",
    "ErrorFeedback(Sharded(Int4()))",
    "ErrorFeedback(Sharded(Sign(rotate=True), answer=Int2()))",
    "ErrorFeedback(Gathered(TopK(0.01)))",
    "ErrorFeedback(PowerSGD(4))",
    "ErrorFeedback(AcpSGD(4))",
)
WARMUP = 5  # rounds; DDP rebuilds its buckets after the first


def rank_of_one_version(rank: int, store: str) -> None:
    """Take one step of the arm whose number comes in; answer with CPU and wall seconds."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import gradlane as gl

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    models = []
    for arm in ARMS:
        layers = [*(nn.Linear(1024, 1024) for _ in range(8)), nn.Linear(1024, 1000)]
        ddp = DistributedDataParallel(nn.Sequential(*layers))
        models.append((ddp, None if arm == "ddp" else gl.attach(ddp, arm)))
    inputs = torch.randn(16, 1024)
    print(gl.__version__, flush=True)
    for line in sys.stdin:
        ddp, _ = models[int(line)]
        cpu, wall = time.process_time(), time.perf_counter()
        ddp(inputs).square().mean().backward()
        print(time.process_time() - cpu, time.perf_counter() - wall, flush=True)
        ddp.zero_grad(set_to_none=False)
    for _, attachment in models:
        if attachment is not None:
            attachment.close()


class Version:
    """The two ranks of one version, each on its host."""

    def __init__(self, python: str, folder: str, host: Callable[[int], dict]) -> None:
        command = [
            str(Path(python).absolute()),
            str(Path(__file__).resolve()),
            "--store",
            str(Path(folder) / "store"),
        ]
        self._ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=folder,
                **host(rank),
            )
            for rank in range(2)
        ]
        (self.version,) = {rank.stdout.readline().strip() for rank in self._ranks}

    def step(self, arm: int) -> tuple[float, float]:
        """CPU seconds, the mean of both ranks, and wall seconds, those of the slower one."""
        for rank in self._ranks:
            rank.stdin.write(f"{arm}\n")
            rank.stdin.flush()
        found = [tuple(map(float, rank.stdout.readline().split())) for rank in self._ranks]
        return statistics.fmean(cpu for cpu, _ in found), max(wall for _, wall in found)

    def close(self) -> None:
        for rank in self._ranks:
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait(60)


@contextlib.contextmanager
def hosts_on(link: str | None) -> Iterator[Callable[[int], dict]]:
    """The options of a rank's process: an emulated host, and the interface that Gloo must use there."""
    if link is None:
        yield lambda rank: {}
        return
    from gradlane.bench.emulation import INTERFACE  # the old version may have it elsewhere
    from gradlane.bench.hosts import hosts_for
    from gradlane.bench.link import parse_link

    with hosts_for(2, parse_link(link)) as hosts:
        if not hosts.emulated:
            sys.exit(hosts.note)
        settings = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE}
        yield lambda rank: {"preexec_fn": partial(hosts.prepare, rank), "env": settings}


def compare(old: str, new: str, rounds: int, link: str | None) -> list[dict]:
    with (
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as two,
        hosts_on(link) as host,
    ):
        versions = {"old": Version(old, one, host), "new": Version(new, two, host)}
        seconds = {(name, arm): [] for name in versions for arm in range(len(ARMS))}
        for number in range(WARMUP + rounds):
            for arm in range(len(ARMS)):
                order = ("old", "new") if (number + arm) % 2 else ("new", "old")
                for name in order:
                    step = versions[name].step(arm)
                    if number >= WARMUP:
                        seconds[name, arm].append(step)
        for version in versions.values():
            version.close()
    return [
        {
            "arm": text,
            "cpu_ratio": _paired(seconds["old", arm], seconds["new", arm], 0),
            "wall_ratio": _paired(seconds["old", arm], seconds["new", arm], 1),
            **{
                f"{name}_{kind}_s": statistics.median(step[place] for step in seconds[name, arm])
                for name in versions
                for place, kind in enumerate(("cpu", "wall"))
            },
        }
        for arm, text in enumerate(ARMS)
    ]


def _paired(old: list[tuple[float, float]], new: list[tuple[float, float]], place: int) -> float:
    """The median over the rounds of new over old."""
    return statistics.median(b[place] / a[place] for a, b in zip(old, new, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", help="the Python of an environment with the old version")
    parser.add_argument("--new", help="the Python of an environment with the new version")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--link", help="a link to emulate, such as 1gbit (default: loopback)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_of_one_version(options.rank, options.store)
        return
    if not options.old or not options.new:
        parser.error("give --old and --new")
    rows = compare(options.old, options.new, options.rounds, options.link)
    print(f"{'new over old, median of pairs':60s} {'wall':>7s} {'CPU':>7s} {'old ms':>8s} {'new ms':>8s}")
    for row in rows:
        print(
            f"{row['arm']:60s} {row['wall_ratio']:7.3f} {row['cpu_ratio']:7.3f} "
            f"{row['old_wall_s'] * 1e3:8.2f} {row['new_wall_s'] * 1e3:8.2f}"
        )
    if options.json:
        link = f" --link {options.link}" if options.link else ""
        command = f"two_checkouts.py --rounds {options.rounds}{link}"
        document = {"command": command, "link": options.link or "loopback", "arms": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
