"""gradlane: how gradients travel between workers in PyTorch.

Attach a strategy to a model of DDP or FSDP2 with ``attach``, or call ``reduce_gradients`` in a loop without
them. The names that are imported here are the public ones; everything else in the package is internal.

- Start and end: ``attach``, ``Attachment``, ``reduce_gradients``, ``init_elastic``, ``shutdown``
- Means and wrappers: ``Mean``, ``Noop``, ``Cast``, ``After``, ``Route``, ``WeightedMean``, ``Private``,
  ``Hierarchical``, ``AcrossReplicas``
- Compression: ``ErrorFeedback``, ``EF21``, ``DGC`` around ``Gathered``, ``Sharded``, ``Summed`` with a codec
  (``Int8``, ``Int4``, ``Int2``, ``Sign``, ``Fp8``, ``Natural``, ``TopK``, ``ChunkTopK``, ``RandomK``,
  ``Raw``), or around ``PowerSGD``, ``AcpSGD``
- Chosen while training runs: ``Auto``
- With Adam: ``freeze_moments``, ``SharedMomentum``
- Robust aggregation: ``Combined`` with a rule (``Median``, ``TrimmedMean``, ``Krum``, ``MultiKrum``,
  ``Bulyan``, ``GeometricMedian``, ``CenteredClipping``, ``NNM``, ``AdaSum``), ``Watch``, ``WorkerMomentum``
- The outer step of local training: ``Nesterov``, around any of these
- A strategy of your own: ``Strategy``, ``Bucket``, ``Feedback``, ``Reduced``, ``Memory``, ``Codec``,
  ``all_reduce``, ``all_gather``, ``all_to_all``, ``reduce_scatter``, ``step_sum``, ``note``,
  ``strategy_from``
- Try and price it: ``Simulation``, ``check_strategy``, ``dry_run``
- As text: ``parse``, ``describe``
- Telemetry: ``JsonLines``, ``Sink``, ``Event``
"""

# DDP imports this module when it is first used. Its functions keep the default group as a default
# argument, and a group that exists by then would outlive its destruction. So import it before there is one.
import torch.distributed.nn.functional

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
from .codecs.base import Codec
from .codecs.chunk_topk import ChunkTopK
from .codecs.fp8 import Fp8
from .codecs.natural import Natural
from .codecs.randomk import RandomK
from .codecs.raw import Raw
from .codecs.sign import Sign
from .codecs.topk import TopK
from .codecs.uniform import Int2, Int4, Int8
from .core.bucket import Bucket, Slot
from .core.collectives import Payload, all_gather, all_reduce, all_to_all, note, reduce_scatter, step_sum
from .core.events import Event, StepTimes, Timing
from .core.feedback import Feedback
from .core.memory import Memory
from .core.strategy import Reduced, Strategy
from .ddp import attach
from .elastic import init_elastic
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
from .freeze import freeze_moments
from .less_often import local_steps
from .session.attachment import Attachment
from .session.local_training import LocalTraining
from .session.own_loop import OwnLoop
from .session.sharded import ShardedAttachment
from .simulate.check import Finding, check_strategy
from .simulate.dryrun import StepCost, dry_run
from .simulate.ranks import Simulation
from .strategies.across_replicas import AcrossReplicas
from .strategies.auto.strategy import Auto
from .strategies.cast import Cast
from .strategies.combined import Combined
from .strategies.dgc import DGC
from .strategies.exchange import Gathered, Sharded, Summed
from .strategies.feedback import EF21, ErrorFeedback
from .strategies.from_function import strategy_from
from .strategies.hierarchical import Hierarchical
from .strategies.local_steps import LocalSteps
from .strategies.lowrank.acpsgd import AcpSGD
from .strategies.lowrank.powersgd import PowerSGD
from .strategies.mean import Mean, NodeMean, Noop
from .strategies.momentum import WorkerMomentum
from .strategies.nesterov import Nesterov
from .strategies.private import Private
from .strategies.route import Route
from .strategies.schedule import After
from .strategies.shared_momentum import SharedMomentum
from .strategies.text import describe, parse
from .strategies.tokens import TokenCount
from .strategies.weighted import WeightedMean
from .teardown import shutdown
from .telemetry.jsonl import JsonLines
from .telemetry.sink import RunInfo, Sink
from .without_ddp import attach_without_ddp, reduce_gradients

__all__ = [
    "DGC",
    "EF21",
    "NNM",
    "AcpSGD",
    "AcrossReplicas",
    "AdaSum",
    "After",
    "Attachment",
    "Auto",
    "Bucket",
    "Bulyan",
    "Cast",
    "CenteredClipping",
    "ChunkTopK",
    "Codec",
    "Combined",
    "ErrorFeedback",
    "Event",
    "Feedback",
    "Finding",
    "Fp8",
    "Gathered",
    "GeometricMedian",
    "GradlaneError",
    "GramRule",
    "Hierarchical",
    "Int2",
    "Int4",
    "Int8",
    "InvalidValue",
    "JsonLines",
    "Krum",
    "LocalSteps",
    "LocalTraining",
    "Mean",
    "Median",
    "Memory",
    "Mixture",
    "MultiKrum",
    "Natural",
    "NearMedian",
    "Nesterov",
    "NodeMean",
    "NonFinite",
    "Noop",
    "NotSaved",
    "OwnLoop",
    "Payload",
    "PeerFailed",
    "PeerLost",
    "PowerSGD",
    "Private",
    "RandomK",
    "RanksDisagree",
    "Raw",
    "Reduced",
    "Route",
    "RowRule",
    "Rule",
    "RunInfo",
    "Sharded",
    "ShardedAttachment",
    "SharedMomentum",
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
    "attach_without_ddp",
    "check_strategy",
    "describe",
    "dry_run",
    "freeze_moments",
    "init_elastic",
    "local_steps",
    "mean",
    "note",
    "parse",
    "reduce_gradients",
    "reduce_scatter",
    "shutdown",
    "step_sum",
    "strategy_from",
]

del torch
