"""What the page of ``gradlane report`` is made of: numbers, axes, letters, means."""

from gradlane.report.arm_styles import assign
from gradlane.report.axis import linear, spending, towards_lowest
from gradlane.report.documents import Point
from gradlane.report.number_format import byte_size, duration, plain, seconds_column, setting, signed
from gradlane.report.train_section import mean_curve


def test_one_arm_has_one_letter_and_colour_all_over():
    arms = assign(["ddp", "Mean()", "Noop()", "Mean()", *map(str, range(40))])
    assert len({arm.letter for arm in arms.values()}) == len(arms)
    assert (arms["ddp"].letter, arms["ddp"].style) == ("A", "arm-base")
    assert (arms["Mean()"].style, arms["0"].style, arms["5"].style) == ("arm-0", "arm-1", "arm-0 arm-again")


def test_a_mean_over_seeds_has_no_value_where_one_seed_has_none():
    whole = [Point(0, 4.0, 0, 0), Point(10, 2.0, 100, 1), Point(20, 1.0, 200, 2)]
    cut = [Point(0, 6.0, 0, 0), Point(10, None, 100, 3)]
    assert mean_curve([whole, cut]) == [Point(0, 5.0, 0, 0), Point(10, None, 100, 2)]


def test_axes():
    assert [text for _, text in linear([0.0, 0.331], "s", from_zero=True).ticks()] == [
        *("0", "100\u00a0ms", "200\u00a0ms", "300\u00a0ms")
    ]
    assert not spending([1e6, 5e5], [1e5], "B").logarithmic
    wide = spending([1e8, 1e6, 0.0], [1e5], "B")
    assert [text for _, text in wide.ticks()] == ["100\u00a0kB", "1\u00a0MB", "10\u00a0MB", "100\u00a0MB"]
    assert (wide.at(1e5), wide.at(1e8)) == (0, 1)
    few = spending([7.7, 1.2], [1.2], "s")  # no two decades lie within it
    assert [text for _, text in few.ticks()] == ["2\u00a0s", "5\u00a0s"]
    assert linear([3.0]).at(3.0) < 1  # one value is no length of axis


def test_numbers():
    assert [plain(value) for value in (None, 0, 999.6, -0.01234, 1e-9)] == [
        *("\u2013", "0", "1000", "\u22120.0123", "1.00e\u221209")
    ]
    assert [byte_size(value) for value in (0, 999, 999_999, 37_699_488)] == [
        *("0\u00a0B", "999\u00a0B", "1.00\u00a0MB", "37.7\u00a0MB")
    ]
    assert [duration(value) for value in (None, 0.0000015, 0.0412, 3.4)] == [
        *("\u2013", "1.50\u00a0\u00b5s", "41.2\u00a0ms", "3.40\u00a0s")
    ]
    assert seconds_column([0.5, None]) == ("ms", ["500.0", "\u2013"])
    assert seconds_column([3.4, 0.041]) == ("s", ["3.400", "0.041"])
    assert signed(-0.0126, 0.004) == "\u22120.013 \u00b1 0.004"
    assert signed(0.5) == "+0.500"
    assert setting({"a": [1, None], "b": False}) == "a 1, \u2013, b no"


def test_the_axis_of_losses_shows_what_differs_at_the_end():
    """A linear axis from 8.2 to 3.7 has no hundredth of its length for 3.74 and 3.733."""
    losses = towards_lowest([8.2, 3.733, 3.74])
    assert losses.at(3.74) - losses.at(3.733) > 0.08
    assert losses.at(3.733) >= 0
    assert losses.at(8.2) == 1
    values = [value for value, _ in losses.ticks()]
    assert values == sorted(values)
    assert len(values) > 4
    assert min(values) < 3.74
    assert towards_lowest([2.0]).at(2.0) < 1
