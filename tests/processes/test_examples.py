"""Scripts of examples/ that need no framework, run as they are."""

import re
from functools import partial
from pathlib import Path

import pytest

from gradlane.bench.emulation import why_not

from ..support import scripts

pytestmark = pytest.mark.networks
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(scripts.run, id="python", marks=pytest.mark.slow),
        pytest.param(partial(scripts.run, ranks=4), id="ranks"),
    ],
)
def test_hsdp_learns_alike_with_an_eighth_of_the_bytes_across(launch):
    done = launch(EXAMPLES / "hsdp.py")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(.+): loss ([\d.]+), ([\d.]+) times fewer bytes", done.stdout)
    (_, alone, one), (name, loss, ratio) = found
    assert (one, name) == ("1.0", "int4 across")
    assert float(ratio) > 7
    assert float(alone) < 16  # of 32 at the start
    assert float(loss) == pytest.approx(float(alone), rel=0.05)


def test_local_steps_over_a_slow_link_are_sooner_done():
    done = scripts.run(EXAMPLES / "slow_link.py", "--link", "100mbit")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"(.+): ([\d.]+) s, ([\d.]+) MB sent, loss ([\d.]+)", done.stdout)
    assert [name for name, *_ in rows] == ["DDP alone", "int4 in every step", "int4 after every 16 steps"]
    seconds, megabytes, losses = (list(map(float, column)) for column in list(zip(*rows, strict=True))[1:])
    assert megabytes[0] > 7 * megabytes[1] > 49 * megabytes[2]
    assert max(losses) < 0.05
    if why_not() is None:
        assert "over an emulated link of 100mbit" in done.stdout
        assert seconds[0] > 2 * seconds[2]
