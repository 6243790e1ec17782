import contextlib
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradlane as gl
from gradlane.strategies.text import saved_by

from ..support.catalogue import Clipped, MajorityVote, median

PLAIN = [
    "Mean()",
    "Noop()",
    "Cast(Mean(), bfloat16)",
    "After(1000, Cast(Mean(), float16))",
    "After(10, Mean(), first=Noop())",
    "Route({'embed.*': Mean(), '*.bias': Cast(Mean(), float16)}, otherwise=Noop())",
    "WeightedMean(2.0)",
]
EXCHANGES = [
    "Gathered(Raw())",
    "ErrorFeedback(Sharded(Int4(block=32), aggregate=Clipped(2.0)))",
    "WeightedMean(3.0, inner=Sharded(Int8()), max_share=0.5)",
    "Private(Mean(), 1.0, 1.1)",
    "Private(PowerSGD(rank=2), 0.5, 2.0, sample_rate=0.25)",
]


@pytest.mark.parametrize("text", PLAIN)
def test_text_is_read_and_written(text):
    strategy = gl.parse(text)
    assert gl.describe(strategy, short=True) == text
    assert gl.parse(gl.describe(strategy)) == strategy
    assert gl.parse(repr(strategy)) == strategy


@pytest.mark.parametrize("text", EXCHANGES)
def test_exchanges_are_read_and_written(text):
    strategy = gl.parse(text, names={"Clipped": Clipped})
    assert gl.describe(strategy, short=True) == text
    assert gl.parse(gl.describe(strategy), names={"Clipped": Clipped}) == strategy


def test_aggregates_by_name():
    assert (
        gl.parse("Sharded(Raw(), mean)") == gl.parse("Sharded(Raw(), aggregate=mean)") == gl.Sharded(gl.Raw())
    )
    assert gl.describe(gl.Sharded(gl.Raw(), gl.mean), short=True) == "Sharded(Raw())"
    assert gl.describe(gl.Gathered(gl.Raw(), gl.mean)).endswith(", aggregate=mean)")
    assert gl.describe(gl.mean) == "mean"
    assert gl.parse("Gathered(Raw(), median)", names={"median": median}) == gl.Gathered(gl.Raw(), median)
    assert gl.describe(gl.Gathered(gl.Raw(), median)).endswith(", aggregate=<median>)")
    assert gl.describe(Clipped) == "<Clipped>"


def test_dtypes_under_torch_and_names_of_ones_own():
    assert gl.parse("Cast(inner=Mean(), dtype=torch.float16)") == gl.Cast(gl.Mean(), torch.float16)
    own = gl.parse("Cast(MajorityVote(step_size=-0.5), bfloat16)", names={"MajorityVote": MajorityVote})
    assert own.inner == MajorityVote(-0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Maen()", "'Maen' in 'Maen\\(\\)' is not known; did you mean Mean?"),
        ("Zzz()", "is not known; `gradlane strategies` lists all names"),
        ("powersgd(4)", "did you mean PowerSGD"),
        ("Gathered(Sign(rotate=true))", "'true' in .* is not known; write True"),
        ("fp16", r"did you mean float16, as in Cast\(Mean\(\), float16\)"),
        ("Int8(rotate=True)", r"Int8 is a codec.*Write Sharded\(Int8\(rotate=True\)\)"),
        ("int4", r"Int4 is a codec.*Write Sharded\(Int4\(\)\)"),
        ("TrimmedMean(1)", r"TrimmedMean is a rule.*Write Combined\(TrimmedMean\(1\)\)"),
        ("Cast(Mean(), float8_e4m3fn)", r"cannot be summed; use float16, bfloat16, float32, float64, or a"),
        ("PowerSGD(4, foo=3)", "PowerSGD has no option foo; it has rank, min_compression_rate"),
        ("PowerSGD(4, warmstart=True)", r"has no option warmstart; did you mean warm_start="),
        ("PowerSGD(4, rank=4)", "PowerSGD has rank twice"),
        ("Mean(4)", "Mean takes no arguments, got 1"),
        ("Combined()", "Combined needs rule"),
        ("DGC(TopK(0.01))", r"DGC ratio=TopK\(.*use a share above 0"),
        ("Gathered(TopK('all'))", "TopK ratio='all'; use a share"),
        ("Mean", "write Mean\\(\\)"),
        ("Cast(Mean(), int8)", r"'int8' in .*Sharded\(Int8\(\)\)"),
        ("Cast(Mean())", "Cast needs dtype"),
        ("Mean().reduce", "is not read"),
        ("__import__('os').system('true')", "is not read"),
        ("Cast(Mean(), dtype=open('x'))", "'open' in"),
        ("After(1 + 1, Mean())", "is not read"),
        ("After(-1, Mean())", "step=-1 is before the first"),
        ("Mean(*[1])", "are not read"),
        ("bfloat16", "is not a strategy: it reads as dtype"),
        ("'Mean()'", "is not a strategy: it reads as str"),
        ("(lambda: 1)()", "is not read"),
        ("Mean(", "is not a strategy"),
        ("", "it is empty; write Mean"),
        (
            "rotate=True",
            "is an option and no strategy; it stands in the brackets of one, as in",
        ),
        ("(" * 500 + ")" * 500, "is not a strategy"),
        ("bfloat16()", "takes no arguments; write it without brackets"),
        ("mean", r"mean is an aggregate. Write Sharded\(Raw\(\), aggregate=mean\)"),
        ("Sharded(Raw(), mean())", "mean in .* takes no arguments; write it without brackets"),
        ("Sharded(Raw(), mean(3))", "takes no arguments"),
        ("Sharded(Raw(), Int8)", r"Sharded got the class Int8; write Int8\(\), with brackets"),
        ("Sharded(Raw(), 'mean')", "aggregate='mean' cannot be called"),
        ("Route({[1]: Mean()})", r"\[1\] in .* cannot be a key"),
        ("Route({Mean(): Mean()})", r"Mean\(\) in .* cannot be a key"),
        ("Route({'a': Mean(), 'a': Noop()})", "the key 'a' twice"),
        ("Cast(Mean(), dtype=float16, dtype=bfloat16)", "dtype twice; say it once"),
        ("After(" + "-" * 900 + "1, Mean())", "is not read"),
        ("After(1, " * 150 + "Mean()" + ")" * 150, "more than 100 levels"),
        ("1" * 5000, "is not a strategy"),
    ],
)
def test_everything_else_is_refused(text, message):
    with pytest.raises(gl.InvalidValue, match=message):
        gl.parse(text)


def test_parse_of_something_else():
    with pytest.raises(gl.WrongType, match="parse reads text, got Mean"):
        gl.parse(gl.Mean())


def test_description_holds_no_address_and_may_leave_out_what_is_per_rank():
    weighted = gl.Cast(gl.WeightedMean(lambda: 3.0), torch.bfloat16)
    assert "0x" not in gl.describe(weighted)
    assert gl.describe(gl.WeightedMean(1.0), shared_only=True) == "WeightedMean(inner=Mean(), max_share=None)"
    assert gl.describe(gl.WeightedMean(1.0), short=True) == "WeightedMean(1.0)"


def test_what_is_recorded_keeps_its_meaning_when_a_default_changes():
    """The class of the later version has another default; the text of the earlier one still means 0.01."""

    @dataclass
    class Kept(gl.Strategy):
        ratio: float = 0.01

        async def reduce(self, bucket):
            return gl.Reduced(await gl.all_reduce(bucket.flat))

    recorded = gl.describe(Kept())
    Later = type("Kept", (Kept,), {"__init__": lambda self, ratio=0.5: Kept.__init__(self, ratio)})
    assert gl.parse(recorded, names={"Kept": Later}).ratio == 0.01
    assert gl.describe(gl.parse("Gathered(TopK(0.01))")).startswith("Gathered(TopK(ratio=0.01")
    assert "rank=4," in gl.describe(gl.PowerSGD())


def test_a_state_of_before_0_2_is_known_by_its_short_text():
    strategy = gl.parse("WeightedMean(2.0, ErrorFeedback(Gathered(TopK())))")
    assert saved_by(strategy, gl.describe(strategy, shared_only=True))
    assert saved_by(strategy, "WeightedMean(inner=ErrorFeedback(Gathered(TopK())))")
    assert saved_by(gl.PowerSGD(), "PowerSGD()")
    assert not saved_by(gl.PowerSGD(), "PowerSGD(rank=2)")
    assert not saved_by(gl.PowerSGD(), "nothing")


def test_a_tensor_is_no_page_of_numbers():
    zeros, ones = gl.describe(torch.zeros(1000)), gl.describe(torch.ones(1000))
    assert zeros.startswith("<tensor float32[1000] ")
    assert len(zeros) < 40
    assert zeros == gl.describe(torch.zeros(1000)) != ones
    assert gl.describe(torch.zeros(3, device="meta")) == "<tensor float32[3]>"
    assert gl.describe(torch.tensor(True)).startswith("<tensor bool[] ")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_any_text_is_read_or_refused_with_one_kind_of_error(data):
    pieces = (
        *(
            "Mean()",
            "Cast(",
            "Route(",
            "PowerSGD(",
            "TopK(",
            "Sharded(",
            "Int8(",
            "After(",
            "Krum(",
            "Combined(",
        ),
        *(
            "{",
            "}",
            "[",
            "]",
            "(",
            ")",
            ",",
            ":",
            "=",
            "'a'",
            "'",
            "-",
            "1",
            "0.5",
            "1e999",
            "float16",
            "rank",
        ),
        *(
            "rank=2",
            "dtype=",
            "None",
            "True",
            "mean",
            "*",
            "**",
            "torch.",
            "lambda",
            "\\",
            "\x00",
            "f''",
            "b''",
            "…",
        ),
    )
    text = "".join(data.draw(st.lists(st.sampled_from(pieces) | st.text(max_size=3), max_size=12)))
    with contextlib.suppress(gl.InvalidValue):
        assert isinstance(gl.parse(text), gl.Strategy)
