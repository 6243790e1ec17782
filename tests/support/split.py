"""A pytest plugin: ``--processes N`` processes run one list of tests, each test once. tests/run.py uses it.

One process imports and collects; then it forks the others, whose output follows at the end. Every process
claims the tests of one file at a time, by making a file in a folder that all share. The first process claims
from the front of the list, the others from the back, until they meet: so the tests with ranks, which stand in
front and often wait, run beside tests that compute. All files with the marker ``networks`` are one claim, the
first: no two tests that make network namespaces run at the same time. Those of the emulated device are the
second: its ranks are forked, and an autograd engine that has run before the fork, in the code of a page say,
does not know the device.
"""

import gc
import itertools
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

WITH_RANKS = ("tests/processes", "tests/faults", "tests/integration")
NETWORKS = "tests with networks"
DEVICES = "tests with an emulated device"
HELPERS = pytest.StashKey[list["Helper"]]()


def pytest_addoption(parser):
    parser.addoption("--processes", type=int, default=1, metavar="N", help="that share the tests")


def pytest_runtestloop(session):
    count = session.config.getoption("processes")
    if count == 1 or session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own loop runs them, or says what failed
    gc.freeze()  # torch and thousands of tests stay: no collection need go through them
    folder = Path(tempfile.mkdtemp(prefix="gradlane-tests-"))
    helpers = []
    for number in range(2, count + 1):
        helpers.append(Helper(number, folder / f"output {number}", session.config))
        if helpers[-1].pid == 0:
            _run(session, folder, backwards=True)
            return True
    try:
        print(f"{count} processes share the tests; this is the first, the others follow at the end")
        _run(session, folder, backwards=False)
        session.config.stash[HELPERS] = helpers
        for helper in helpers:
            session.testsfailed += not helper.passed()
    finally:
        shutil.rmtree(folder)
    return True


def pytest_unconfigure(config):
    """What the others printed; what failed comes last."""
    for helper in sorted(config.stash.get(HELPERS, []), key=Helper.passed, reverse=True):
        print(f"== pytest {helper.number}: {'passed' if helper.passed() else 'failed'}")
        print(helper.printed, flush=True)


class Helper:
    """A process that was forked after the collection; ``pid`` is 0 in itself."""

    def __init__(self, number, output, config):
        self.number, self.printed = number, ""
        self._output, self._code = output, None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _print_to(output, config.pluginmanager.getplugin("capturemanager"))

    def passed(self):
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.printed = self._output.read_text(errors="replace")
        return self._code == 0


def _print_to(path, capture):
    capture.stop_global_capturing()  # it keeps descriptors of the terminal
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    capture.start_global_capturing()
    capture.suspend_global_capture()


def _run(session, folder, *, backwards):
    claimed = _claimed(session.items, folder, backwards)
    for item, following in itertools.pairwise(itertools.chain(claimed, [None])):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


def _claimed(items, folder, backwards):
    """The tests of one group after the other, as long as there is a group that no process has claimed."""
    groups = {}
    for item in items:
        groups.setdefault(_group(item), []).append(item)
    order = sorted(groups, key=lambda group: not group.startswith(WITH_RANKS))
    if backwards:
        order.reverse()
    # The networks are by far the longest: a late start would be waited for.
    order.sort(key=lambda group: (group != NETWORKS, group != DEVICES))
    for group in order:
        try:
            (folder / group.replace("/", "-")).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield from groups[group]


def _group(item):
    if item.get_closest_marker("networks"):
        return NETWORKS
    return DEVICES if item.location[0].startswith("tests/gpu") else item.location[0]
