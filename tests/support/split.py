"""A pytest plugin: several pytest processes run one list of tests, each test once. tests/run.py uses it.

Every process collects all tests. It claims the tests of one file at a time, by making a file in a folder that
all processes share. The first process claims from the front of the list, the others from the back, until they
meet: so the tests with ranks, which stand in front and often wait, run beside tests that compute. All files
with the marker ``networks`` are one claim, the first: no two tests that make network namespaces run at the
same time. Those of the emulated device are the second: its ranks are forked, and an autograd engine that has
run before the fork, in the code of a page say, does not know the device.
"""

import gc
import itertools
from pathlib import Path

WITH_RANKS = ("tests/processes", "tests/faults", "tests/integration")
NETWORKS = "tests with networks"
DEVICES = "tests with an emulated device"


def pytest_addoption(parser):
    parser.addoption("--claims", type=Path, metavar="FOLDER", help="where the processes mark what they run")
    parser.addoption("--claim-from", choices=["front", "back"], default="front", help="of the list of tests")


def pytest_runtestloop(session):
    folder = session.config.getoption("claims")
    if folder is None or session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own loop runs them, or says what failed
    backwards = session.config.getoption("claim_from") == "back"
    gc.freeze()  # torch and thousands of tests stay: no collection need go through them
    claimed = _claimed(session.items, folder, backwards)
    for item, following in itertools.pairwise(itertools.chain(claimed, [None])):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
    return True


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
