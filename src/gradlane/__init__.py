"""gradlane: how gradients travel between workers in DistributedDataParallel.

A name is imported with its module when it is used first: ``import gradlane`` alone costs a few milliseconds.
Type checkers read ``__init__.pyi``.
"""

from importlib import import_module as _import_module

# DDP imports this module when it is first used. Its functions keep the default group as a default
# argument, and one that exists by then would outlive its destruction: so import it before there is one.
import torch.distributed.nn.functional

from ._version import __version__

_NAMES = {
    "aggregate.adasum": "AdaSum",
    "aggregate.centre": "CenteredClipping GeometricMedian",
    "aggregate.krum": "Bulyan Krum MultiKrum",
    "aggregate.mean": "mean",
    "aggregate.elementwise": "Median NearMedian TrimmedMean",
    "aggregate.nnm": "NNM",
    "aggregate.mixture": "Mixture",
    "aggregate.rule": "GramRule RowRule Rule",
    "aggregate.watch": "Watch",
    "attachment": "Attachment",
    "codecs.base": "Codec",
    "codecs.fp8": "Fp8",
    "codecs.natural": "Natural",
    "codecs.randomk": "RandomK",
    "codecs.raw": "Raw",
    "codecs.sign": "Sign",
    "codecs.topk": "TopK",
    "codecs.uniform": "Int2 Int4 Int8",
    "core.bucket": "Bucket Slot",
    "core.collectives": "Payload all_gather all_reduce all_to_all note step_sum",
    "core.events": "Event StepTimes Timing",
    "core.memory": "Memory",
    "core.strategy": "Reduced Strategy",
    "ddp": "attach",
    "elastic": "init_elastic",
    "ending": "shutdown",
    "errors": "GradlaneError InvalidValue NonFinite NotSaved PeerFailed PeerLost RanksDisagree WrongState "
    "WrongType",
    "reducer": "Reducer reduce_gradients",
    "telemetry.jsonl": "JsonLines",
    "telemetry.sink": "RunInfo Sink",
    "simulate.check": "Finding check_strategy",
    "simulate.dryrun": "StepCost dry_run",
    "simulate.ranks": "Simulation",
    "strategies.cast": "Cast",
    "strategies.combined": "Combined",
    "strategies.dgc": "DGC",
    "strategies.exchange": "Gathered Sharded Summed",
    "strategies.feedback": "ErrorFeedback EF21",
    "strategies.from_function": "strategy_from",
    "strategies.lowrank.acpsgd": "AcpSGD",
    "strategies.lowrank.powersgd": "PowerSGD",
    "strategies.mean": "Mean Noop",
    "strategies.momentum": "WorkerMomentum",
    "strategies.private": "Private",
    "strategies.route": "Route",
    "strategies.schedule": "After",
    "strategies.text": "describe parse",
    "strategies.tokens": "TokenCount",
    "strategies.weighted": "WeightedMean",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

del torch

__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__():
    return __all__
