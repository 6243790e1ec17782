"""Ranks of one host that share its link to the other hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .finding import Finding


def ranks_per_host(hosts: Sequence[str]) -> int:
    """How many ranks share a link, at most; 1 on a single host, which has none. ``hosts``: of each rank."""
    counts = Counter(hosts)
    return max(counts.values()) if len(counts) > 1 else 1


def check_shared_link(hosts: Sequence[str]) -> list[Finding]:
    shared = ranks_per_host(hosts)
    if shared == 1:
        return []
    counts = Counter(hosts)
    what = (
        f"{shared} ranks of a host share its link to the other hosts, and most strategies send for each rank"
    )
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{count} on {host}" for host, count in counts.items())
        advice = "equally many ranks on each host would allow Hierarchical(...) or HSDP"
        return [Finding("nodes", "note", f"{what}; the numbers of ranks differ: {each}", advice)]
    advice = (
        "Hierarchical(ErrorFeedback(Sharded(Int4()))), or HSDP with ErrorFeedback(Sharded(Int4())), "
        "sends once for each host; `gradlane bench --nodes 2 --per-node 2` compares them"
    )
    return [Finding("nodes", "note", what, advice)]
