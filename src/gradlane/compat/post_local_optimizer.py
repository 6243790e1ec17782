"""torch's ``PostLocalSGDOptimizer``: an optimizer that averages weights after its steps."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from ..errors import WrongType
from ..log import log
from ..torch_internals import always_called_by_scaler, is_always_called_by_scaler
from .model_averager import ModelAverager, checked_count

Closure = Callable[[], Any]


@always_called_by_scaler
class PostLocalSGDOptimizer(Optimizer):
    """Takes the steps of ``optim``, and lets ``averager`` average its parameters after each.

    It is an optimizer like any other: with closures, step hooks, schedulers and a ``GradScaler``. Parameter
    groups and state are those of ``optim``. ``state_dict`` has the averager's step as ``"step"``.

    If the ``GradScaler`` of one rank finds an overflow, that rank leaves out its own step and takes part in
    the averaging, so that the ranks stay together.
    """

    optim: Optimizer
    averager: ModelAverager
    grad_scale: Tensor | None  # while a GradScaler calls ``step``

    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        if not isinstance(optim, Optimizer):
            raise WrongType(
                f"optim is a {type(optim).__name__}; pass a torch.optim.Optimizer, such as "
                "torch.optim.SGD(model.parameters(), lr=0.1)"
            )
        if not isinstance(averager, ModelAverager):
            kind = f"{type(averager).__module__}.{type(averager).__qualname__}"
            raise WrongType(
                f"averager is a {kind}; pass a PeriodicModelAverager or a HierarchicalModelAverager of "
                "gradlane.compat"
            )
        # Not Optimizer's constructor, which would make groups and a state of its own: this sets up the hooks.
        self.__setstate__({"optim": optim, "averager": averager, "defaults": dict(optim.defaults)})

    # Parameter groups and state. torch's class keeps the list of groups that it has seen first; the local
    # optimizer makes another one in load_state_dict, and from then on no scheduler reaches it.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optim.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none=set_to_none)

    # Steps

    def step(self, closure: Closure | None = None) -> Any:
        """A step of the local optimizer, then of the averager. What the closure returned, if there is one."""
        loss = self._local_step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def _local_step(self, closure: Closure | None) -> Any:
        arguments = () if closure is None else (closure,)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:  # no GradScaler
            return self.optim.step(*arguments)
        if is_always_called_by_scaler(self.optim):  # it unscales and looks for overflows itself
            vars(self.optim).update(grad_scale=self.grad_scale, found_inf=found_inf)
            try:
                return self.optim.step(*arguments)
            finally:
                del vars(self.optim)["grad_scale"], vars(self.optim)["found_inf"]
        if bool(found_inf):
            return None
        if self.grad_scale is not None:
            self._unscale(self.grad_scale)
        return self.optim.step(*arguments)

    @torch.no_grad()
    def _unscale(self, scale: Tensor) -> None:
        factor = scale.double().reciprocal().float()  # as GradScaler does it, to the bit
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.grad.device))

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """That of the local optimizer, and the averager's step."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load both. From the ``state_dict`` of a plain optimizer the averager begins with its step 0."""
        step = checked_count("step", state_dict.get("step", 0), 0)
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key != "step"})
        if "step" not in state_dict:
            log.warning("the loaded state has no step of an averager: it begins with 0, its warm-up too")
        self.averager.step = step

    # Hooks of checkpoints see the local optimizer, and its state.

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        return self.optim.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        return self.optim.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        return self.optim.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        return self.optim.register_load_state_dict_post_hook(hook, prepend)

    def __getstate__(self) -> dict[str, Any]:
        return {"optim": self.optim, "averager": self.averager, "defaults": self.defaults}

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.optim!r}"
