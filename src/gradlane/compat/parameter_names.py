"""Names of parameters for a bare hook, which sees only the objects and their order."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import InvalidValue, WrongState


class ParameterNames:
    """A name for each parameter object, that it keeps when DDP rebuilds its buckets.

    By itself ``parameter0``, ``parameter1``, ... in the order in which the first backward brings them:
    that of DDP's first buckets, which is the same in every process that builds the same DDP model. After
    ``take_from(model)`` the names of the model.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        """Name and shape of each parameter of the model, for the ranks to compare; empty without one."""
        self._names = WeakTensorKeyDictionary()
        self._met = 0

    @property
    def from_model(self) -> bool:
        return bool(self.lines)

    def take_from(self, model: nn.Module) -> None:
        if self._met:
            raise WrongState(
                "name_parameters after the first backward: memory is kept under other names by now; call it "
                "right after you make the state"
            )
        module = model.module if isinstance(model, DistributedDataParallel) else model
        for name, parameter in module.named_parameters():
            self._names[parameter] = name
            self.lines.append(f"{name} {list(parameter.shape)}")

    def refuse_others(self, parameters: Sequence[Tensor]) -> None:
        """Refuse another model. ``parameters`` are those of a step's first bucket; in another model none of
        them was met before."""
        if self._met and not any(parameter in self._names for parameter in parameters):
            raise WrongState(
                "this PowerSGDState is in use with another model, whose residuals and counts it keeps; make "
                "a PowerSGDState for each DDP model"
            )

    def __call__(self, index: int, position: int, parameter: Tensor) -> str:
        if parameter not in self._names:
            if self.from_model:
                raise InvalidValue(
                    f"bucket {index} holds a parameter of shape {tuple(parameter.shape)} that is none of the "
                    "model given to name_parameters; give it the model that DDP wraps"
                )
            self._names[parameter] = f"parameter{self._met}"
        self._met += 1
        return str(self._names[parameter])
