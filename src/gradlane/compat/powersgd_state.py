"""torch's ``PowerSGDState``: options that become a strategy, and the state of that strategy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.bucket import Bucket
from ..core.memory import Memory
from ..core.numbers import is_whole
from ..core.strategy import Reduced, Strategy
from ..errors import InvalidValue, WrongState
from ..feed.ddp import DdpFeed
from ..log import log
from ..strategies.cast import Cast
from ..strategies.feedback import ErrorFeedback
from ..strategies.lowrank.factors import FactorMemory
from ..strategies.lowrank.powersgd import PowerSGD
from ..strategies.lowrank.rank import View
from ..strategies.mean import Mean
from ..strategies.schedule import After
from .compression_stats import CompressionStats
from .feeds import feed_of
from .parameter_names import ParameterNames
from .powersgd_options import check_options

FORMAT = 1  # of PowerSGDState.state_dict

OPTIONS = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
    "random_seed",
    "compression_stats_logging_frequency",
    "batch_tensors_with_same_shape",
)
WITHOUT_EFFECT = (
    "orthogonalization_epsilon",
    "compression_stats_logging_frequency",
    "batch_tensors_with_same_shape",
)
"""Options without effect on the gradients: a checkpoint may be loaded with other values."""


@dataclass
class _SparseMean(Strategy):
    """The plain mean for a sparse gradient; ``others`` is the strategy, with state, of all others."""

    others: Strategy

    async def reduce(self, bucket: Bucket) -> Reduced:
        return await Mean().reduce(bucket)


class PowerSGDState:
    """Options and memory of ``powerSGD_hook`` or ``batched_powerSGD_hook``, for one DDP model.

    It stands for ``After(start_powerSGD_iter, then=ErrorFeedback(PowerSGD(matrix_approximation_rank,
    min_compression_rate, warm_start=..., seed=random_seed)))``. What differs from torch:

    - The residual of a rank is what its own factors left out, which stays bounded. torch subtracts the
      averaged product; its error memory grows with the root of the steps.
    - Factors are made orthonormal safely, and several matrices are one message anyway. So
      ``orthogonalization_epsilon`` and ``batch_tensors_with_same_shape`` are accepted and have no effect.
    - Memory follows the parameters, never a bucket's number. In a checkpoint they are called
      ``parameter0``, ``parameter1``, ... in the order of DDP's first buckets: load it for the same model
      and the same ``bucket_cap_mb``, with the hook registered before the first backward. After
      ``name_parameters(model)`` they have the model's names, and only those must be the same.
    - Options cannot change once training has begun. ``iter`` and ``process_group`` can be set.

    None as ``process_group`` means the default group, as in torch.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        self._strategy: Strategy | None = None  # made when a hook says in which form
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = compression_stats_logging_frequency
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        check_options(self._options())
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self._form: tuple[View, tuple[torch.dtype, ...]] | None = None
        self._errors = Memory(torch.float32)
        self._factors = FactorMemory()  # shared: undone where a step fails
        self._names = ParameterNames()
        self._loaded_names_of_model: bool | None = None
        self._stats = CompressionStats(start_powerSGD_iter, self.compression_stats_logging_frequency)
        self._feed: DdpFeed | None = None
        self._first_step = 0

    def __setattr__(self, name: str, value: object) -> None:
        if name in OPTIONS and self._strategy is not None:
            raise WrongState(
                f"{name} cannot change once training has begun; make another PowerSGDState, or use "
                "gradlane.attach and Attachment.swap"
            )
        super().__setattr__(name, value)

    @property
    def iter(self) -> int:
        """The iteration that the next backward will be."""
        return self._first_step if self._feed is None else self._feed.step.next

    @iter.setter
    def iter(self, step: int) -> None:
        if not is_whole(step) or step < 0:
            raise InvalidValue(f"iter={step!r}; use a whole number from 0 up")
        self._first_step = step
        if self._feed is not None:
            self._feed.step.go_to(step)

    @property
    def error_dict(self) -> dict[str, Tensor]:
        """A copy of this rank's residual, by parameter; torch has it by bucket."""
        return self._errors.state_dict()

    @property
    def q_memory_dict(self) -> dict[str, Tensor]:
        """A copy of the kept factors Q, rank x columns, by parameter, or by bucket for the batched hook."""
        return self._factors.state_dict()

    @property
    def p_memory_dict(self) -> dict[str, Tensor]:
        """Empty: every step computes P from Q, here and in torch, so there is none to keep."""
        return {}

    def compression_stats(self) -> tuple[float, int, int]:
        """Rate, elements before and elements after compression, of all compressed iterations so far.

        The elements after compression are those that were sent.
        """
        return self._stats.totals()

    def name_parameters(self, model: nn.Module) -> None:
        """Keep memory under the names of this model, wrapped by DDP or not, instead of numbers.

        Call it on every rank before the first backward. A checkpoint can then be read whatever buckets
        DDP makes.
        """
        self._names.take_from(model)

    def state_dict(self) -> dict[str, Any]:
        """Iteration, memory and statistics of this rank: tensors, numbers and strings only."""
        return {
            "format": FORMAT,
            "iter": self.iter,
            "options": self._options(),
            "names_of_model": self._names.from_model,
            "error": self.error_dict,
            "q": self.q_memory_dict,
            "stats": self._stats.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken. Options must be the same, apart from those that do not
        change a gradient."""
        expected = ("format", "iter", "options", "names_of_model", "error", "q", "stats")
        if missing := [key for key in expected if key not in state]:
            raise InvalidValue(
                f"the state lacks {', '.join(missing)}; pass what PowerSGDState.state_dict() gave"
            )
        if state["format"] != FORMAT:
            raise InvalidValue(f"the state has format {state['format']}, this version reads {FORMAT}")
        own = self._options()
        for name in OPTIONS:
            if name not in WITHOUT_EFFECT and state["options"].get(name) != own[name]:
                raise InvalidValue(
                    f"the state was saved with {name}={state['options'].get(name)!r}, this one has "
                    f"{own[name]!r}; make the PowerSGDState with the options that it was saved with"
                )
        self._errors.load_state_dict(state["error"])
        self._factors.load_state_dict(state["q"])
        self._stats.load_state_dict(state["stats"])
        self._loaded_names_of_model = state["names_of_model"] if state["error"] or state["q"] else None
        self.iter = state["iter"]

    def __getstate__(self) -> dict[str, Any]:
        log.warning("a PowerSGDState is saved without its process group, and without names of parameters")
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        log.warning("a loaded PowerSGDState works on the default process group; set process_group otherwise")
        self.__init__(None, **state["options"])  # type: ignore[misc]
        self.load_state_dict(state)

    def reduce(
        self, bucket: dist.GradBucket, view: View, wires: tuple[torch.dtype, ...]
    ) -> torch.futures.Future[Tensor]:
        """Called by the hooks; ``wires`` are the dtypes of wrappers around them, inner ones first."""
        if self._strategy is None:
            check_options(self._options())  # they may have been set since
            self._stats.start = self.start_powerSGD_iter
            self._stats.every = max(1, self.compression_stats_logging_frequency)
            self._form, self._strategy = (view, wires), self._translated(view, wires)
        elif self._form != (view, wires):
            raise WrongState("this PowerSGDState is in use with another hook; make one for each DDP model")
        if self._loaded_names_of_model not in (None, self._names.from_model):
            had, now = ("", "out") if self._loaded_names_of_model else ("out", "")
            raise InvalidValue(
                f"the state was saved with{had} the names of a model and is used with{now} them; call "
                "name_parameters in both runs or in neither"
            )
        if bucket.index() == 0:
            self._names.refuse_others(bucket.parameters())
        feed = feed_of(
            self.process_group,
            bucket,
            self._strategy,
            name_of=self._names,
            parameters=self._names.lines,
            observers=(self._stats,),
        )
        if feed is not self._feed:
            feed.step.go_to(self.iter)
            self._feed = feed
        gradient = bucket.buffer()
        self._stats.gradient(feed.step.next, gradient.numel() * (2 if gradient.is_complex() else 1))
        return feed.reduce(bucket, _SparseMean(self._strategy) if gradient.is_sparse else self._strategy)

    def _translated(self, view: View, wires: tuple[torch.dtype, ...]) -> Strategy:
        first: Strategy = Mean()
        power = PowerSGD(
            self.matrix_approximation_rank,
            self.min_compression_rate if view == "tensor" else 0,
            warm_start=self.warm_start,
            view=view,
            seed=self.random_seed,
        )
        power.factors = self._factors
        then: Strategy = power
        for dtype in wires:
            first, then = Cast(first, dtype), Cast(then, dtype)
        if self.use_error_feedback:
            then = feedback = ErrorFeedback(then)
            feedback.memory = self._errors
        return After(self.start_powerSGD_iter, then=then, first=first)

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OPTIONS}
