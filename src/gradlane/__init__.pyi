# For type checkers: the names that __init__.py imports when they are used.
from ._version import __version__
from .aggregate.adasum import AdaSum
from .aggregate.centre import CenteredClipping, GeometricMedian
from .aggregate.elementwise import Median, NearMedian, TrimmedMean
from .aggregate.krum import Bulyan, Krum, MultiKrum
from .aggregate.mean import mean
from .aggregate.mixture import Mixture
from .aggregate.nnm import NNM
from .aggregate.rule import GramRule, RowRule, Rule
from .aggregate.watch import Watch
from .attachment import Attachment
from .codecs.base import Codec
from .codecs.fp8 import Fp8
from .codecs.natural import Natural
from .codecs.randomk import RandomK
from .codecs.raw import Raw
from .codecs.sign import Sign
from .codecs.topk import TopK
from .codecs.uniform import Int2, Int4, Int8
from .core.bucket import Bucket, Slot
from .core.collectives import Payload, all_gather, all_reduce, all_to_all, note, step_sum
from .core.events import Event, StepTimes, Timing
from .core.memory import Memory
from .core.strategy import Reduced, Strategy
from .ddp import attach
from .elastic import init_elastic
from .ending import shutdown
from .errors import (
    GradlaneError,
    InvalidValue,
    NonFinite,
    NotSaved,
    PeerFailed,
    PeerLost,
    RanksDisagree,
    WrongState,
    WrongType,
)
from .reducer import Reducer, reduce_gradients
from .simulate.check import Finding, check_strategy
from .simulate.dryrun import StepCost, dry_run
from .simulate.ranks import Simulation
from .strategies.cast import Cast
from .strategies.combined import Combined
from .strategies.dgc import DGC
from .strategies.exchange import Gathered, Sharded, Summed
from .strategies.feedback import EF21, ErrorFeedback
from .strategies.from_function import strategy_from
from .strategies.lowrank.acpsgd import AcpSGD
from .strategies.lowrank.powersgd import PowerSGD
from .strategies.mean import Mean, Noop
from .strategies.momentum import WorkerMomentum
from .strategies.private import Private
from .strategies.route import Route
from .strategies.schedule import After
from .strategies.text import describe, parse
from .strategies.tokens import TokenCount
from .strategies.weighted import WeightedMean
from .telemetry.jsonl import JsonLines
from .telemetry.sink import RunInfo, Sink

__all__ = [
    "DGC",
    "EF21",
    "NNM",
    "AcpSGD",
    "AdaSum",
    "After",
    "Attachment",
    "Bucket",
    "Bulyan",
    "Cast",
    "CenteredClipping",
    "Codec",
    "Combined",
    "ErrorFeedback",
    "Event",
    "Finding",
    "Fp8",
    "Gathered",
    "GeometricMedian",
    "GradlaneError",
    "GramRule",
    "Int2",
    "Int4",
    "Int8",
    "InvalidValue",
    "JsonLines",
    "Krum",
    "Mean",
    "Median",
    "Memory",
    "Mixture",
    "MultiKrum",
    "Natural",
    "NearMedian",
    "NonFinite",
    "Noop",
    "NotSaved",
    "Payload",
    "PeerFailed",
    "PeerLost",
    "PowerSGD",
    "Private",
    "RandomK",
    "RanksDisagree",
    "Raw",
    "Reduced",
    "Reducer",
    "Route",
    "RowRule",
    "Rule",
    "RunInfo",
    "Sharded",
    "Sign",
    "Simulation",
    "Sink",
    "Slot",
    "StepCost",
    "StepTimes",
    "Strategy",
    "Summed",
    "Timing",
    "TokenCount",
    "TopK",
    "TrimmedMean",
    "Watch",
    "WeightedMean",
    "WorkerMomentum",
    "WrongState",
    "WrongType",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attach",
    "check_strategy",
    "describe",
    "dry_run",
    "init_elastic",
    "mean",
    "note",
    "parse",
    "reduce_gradients",
    "shutdown",
    "step_sum",
    "strategy_from",
]
