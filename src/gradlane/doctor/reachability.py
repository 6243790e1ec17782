"""Checks whether the ranks can reach each other, before they try."""

from __future__ import annotations

from collections.abc import Mapping

from .finding import Finding, fine
from .interface import VARIABLE, Binding, candidates, gloo_binding, has_psutil


def check_reachability(environ: Mapping[str, str], hosts: int) -> list[Finding]:
    """``hosts``: the number of machines of the job."""
    found = [interface_finding(gloo_binding(environ), hosts, candidates())]
    if not has_psutil():
        what = "psutil is not installed, so the addresses and speeds of interfaces are not known"
        found.append(Finding("interface", "note", what, "pip install psutil"))
    return found


def interface_finding(binding: Binding, hosts: int, others: list[str]) -> Finding:
    choose = (
        f"{VARIABLE}={others[0]}" if others else f"{VARIABLE}=NAME of an interface that all hosts can reach"
    )
    more = f" (or {', '.join(others[1:])})" if len(others) > 1 else ""
    if binding.missing:
        what = f"{binding.how}: this host has no interface {binding.missing}"
        return Finding("interface", "broken", what, f"set {choose}{more}, or unset it")
    if not binding.loopback:
        return fine("interface", f"Gloo would use {binding}")
    if hosts > 1:
        what = f"Gloo would use {binding}, which the other hosts cannot reach"
        return Finding("interface", "broken", what, f"set {choose}{more} on every host")
    return Finding(
        "interface",
        "note",
        f"Gloo would use {binding}",
        f"fine on one machine; on several set {choose}{more}",
    )
