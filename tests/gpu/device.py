"""The device "emulated": importing this module adds it to torch, in this process, for good.

Its memory is host memory, and each of its kernels runs at once on the CPU. So numbers are right whatever
the order of streams is. Noted are: every pair of kernels whose order streams and events do not decide
(``races``), every place where the host would wait (``waits``), and every kernel with its bytes (``kernels``).
Tensors of two devices in one kernel are refused, as CUDA refuses them.
"""

import importlib
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gradlane.kernels import triton_launch

from .build import built

sys.path.insert(0, str(built()))
emulated_device = importlib.import_module("emulated_device")

DEVICE = torch.device("privateuseone", 0)
PACKAGE = f"{Path(triton_launch.__file__).parents[1]}/"
WAITS = {  # their result has a shape that depends on numbers, or goes to the host
    "nonzero", "masked_select", "bincount", "unique_dim", "_unique2", "repeat_interleave.Tensor", "equal",
    "linalg_eigh", "linalg_cholesky_ex", "linalg_svd", "multinomial",
}  # fmt: skip
INDEXED = ("index.Tensor", "index_put_", "index_put", "_index_put_impl_")


@dataclass
class Kernel:
    name: str
    bytes: int
    where: str
    stream: int


@dataclass
class Log:
    kernels: list[Kernel] = field(default_factory=list)
    waits: Counter = field(default_factory=Counter)
    """By what the host waits for, and where."""

    narrow_products: int = 0
    """Products of matrices in TF32 or less that are subtracted from something."""
    _synchronized: int = 0

    def clear(self):
        self.kernels.clear()
        self.waits.clear()
        self.narrow_products = 0
        self._synchronized = emulated_device.host_waits()

    @property
    def all_waits(self):
        """How often the host has waited for anything, events among them."""
        return emulated_device.host_waits() - self._synchronized


log = Log()


def races():
    """(kind, place, earlier place) of each pair of kernels that a device may run in the other order; since
    the last call."""
    return emulated_device.races()


def where():
    """The innermost two functions of gradlane that are running; or the innermost of anything else."""
    frame, found, other = sys._getframe(1), [], "autograd"
    while frame is not None and len(found) < 2:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):  # a checkout may be in a folder of the same name
            name = code.co_filename.removeprefix(PACKAGE)
            found.append(f"{name}:{frame.f_lineno} {code.co_name}")
        elif other == "autograd" and "/tests/gpu/" not in code.co_filename:
            other = f"{code.co_filename.rsplit('/', 1)[1]}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return " < ".join(found) or other


def host_waits(what):
    log.waits[what, where()] += 1
    emulated_device.wait()


def on_device(value):
    return isinstance(value, Tensor) and value.device.type == DEVICE.type


def touched(name, moved):
    log.kernels.append(Kernel(name, moved, where(), emulated_device.current()))


def size_of(tensor):
    return tensor.numel() * tensor.element_size()


class _Call:
    """One kernel: its tensors as tensors of the CPU, and back."""

    def __init__(self, name, place):
        self.name, self.place = name, place
        self.bytes = 0
        self.devices = set()
        self.written = []
        self._originals = {}

    def given(self, value, writes):
        return pytree.tree_map(lambda leaf: self._given(leaf, writes), value)

    def _given(self, value, writes):
        if not isinstance(value, Tensor):
            return value
        if not on_device(value):
            if value.dim() or writes:  # a number of the host may go with a kernel as an argument
                self.devices.add(value.device.type)
            return value
        self.devices.add(DEVICE.type)
        empty = writes and not value.numel()
        alias = torch.empty(value.shape, dtype=value.dtype) if empty else emulated_device.on_cpu(value)
        self._originals[id(alias)] = (alias, value)
        self.bytes += size_of(value)
        if writes:
            self.written.append(value)
        else:
            emulated_device.touch(value, False, f"{self.name} in {self.place}")
        return alias

    def resized(self):
        for alias, value in self._originals.values():
            if alias.shape != value.shape:  # an ``out=`` that was empty
                value.resize_(alias.shape)
                emulated_device.on_cpu(value).copy_(alias)
                self.bytes += size_of(value)

    def returned(self, value):
        return pytree.tree_map(self._returned, value)

    def _returned(self, value):
        if not isinstance(value, Tensor):
            return value
        if id(value) in self._originals:
            return self._originals[id(value)][1]
        strides = value.stride() if value.numel() else torch.empty(value.shape).stride()
        made = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=DEVICE)
        if value.numel():
            emulated_device.on_cpu(made).copy_(value)
        self.bytes += size_of(made)
        emulated_device.touch(made, True, f"{self.name} in {self.place}")
        return made


def run(op, *args, **kwargs):
    """Every operation for which device.cpp has nothing."""
    schema = op._schema
    name = schema.name.removeprefix("aten::") + (f".{schema.overload_name}" if schema.overload_name else "")
    call = _Call(name, where())
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    leaves = pytree.tree_leaves((args, kwargs))
    wide = any(isinstance(leaf, Tensor) and leaf.dtype == torch.float64 for leaf in leaves)
    arguments = {argument.name: argument for argument in schema.arguments}

    def given(value, argument):
        if type(value) in (bool, int, float) and str(argument.type) in ("Tensor", "Optional[Tensor]"):
            # The boxed call has made a number of a tensor without dimensions.
            value = torch.tensor(value, dtype=torch.float64 if wide and isinstance(value, float) else None)
        return call.given(value, argument.alias_info is not None and argument.alias_info.is_write)

    subtracts = name.startswith("addmm") and kwargs.get("alpha") == -1
    if subtracts and torch.get_float32_matmul_precision() != "highest":
        log.narrow_products += 1
    own_args = [given(value, argument) for argument, value in zip(schema.arguments, args, strict=False)]
    own_kwargs = {key: given(value, arguments[key]) for key, value in kwargs.items()}
    indexed = name in INDEXED or name.startswith(INDEXED)
    if len(call.devices) > 1 and not indexed:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, {name} in {call.place}: {sorted(call.devices)}"
        )
    out = op(*own_args, **own_kwargs)
    call.resized()
    for tensor in call.written:
        emulated_device.touch(tensor, True, f"{name} in {call.place}")
    if name.removesuffix(".out") in WAITS or (indexed and _index_waits(name, args)):
        host_waits(name)
    result = call.returned(out)
    touched(name, call.bytes)
    return result


def _index_waits(name, args):
    """A mask is counted on the host, unless one number is put; indices of the host are copied."""
    indices = [index for index in pytree.tree_leaves(args[1]) if isinstance(index, Tensor)]
    masks = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    fills = "put" in name and args[2].numel() == 1
    return (masks and not fills) or not all(map(on_device, indices))


def copy_from(source, target, non_blocking=False):
    place = where()
    what = "copy_"
    if on_device(source):
        emulated_device.touch(source, False, f"copy in {place}")
    if on_device(source) and on_device(target):
        emulated_device.on_cpu(target).copy_(emulated_device.on_cpu(source))
    elif on_device(target):
        emulated_device.on_cpu(target).copy_(source)
        if source.numel() and not (non_blocking and source.is_pinned()):
            host_waits("copy to the device")
        what = "copy to the device"
    else:
        what = "copy to the host"
        if non_blocking and target.is_pinned():
            given = emulated_device.on_cpu(source).to(target.dtype, copy=True).contiguous()
            assert target.is_contiguous()
            emulated_device.deliver(given, target)
        else:
            host_waits(what)
            target.copy_(emulated_device.on_cpu(source))
    if on_device(target):
        emulated_device.touch(target, True, f"copy in {place}")
    touched(what, size_of(source) + size_of(target))
    return target


def item(tensor):
    emulated_device.touch(tensor, False, f"item in {where()}")
    host_waits("item")
    return emulated_device.on_cpu(tensor).item()


def launch(kernel, programs, *arguments, reads, writes, rarely=(), **fixed):
    """A kernel in Triton, which its interpreter runs on the same memory."""
    name = f"triton {kernel.__name__}"
    for tensor in (*reads, *rarely):
        emulated_device.touch(tensor, False, f"{name} in {where()}")
    aliases = [emulated_device.on_cpu(value) if on_device(value) else value for value in arguments]
    kernel[(programs,)](*aliases, **fixed)
    for tensor in (*writes, *rarely):
        emulated_device.touch(tensor, True, f"{name} in {where()}")
    touched(name, sum(map(size_of, (*reads, *writes))))


triton_launch.launch = launch


class _Module(ModuleType):
    """``torch.emulated``."""

    @staticmethod
    def is_available():
        return True

    is_initialized = is_available

    @staticmethod
    def _is_in_bad_fork():
        return False

    @staticmethod
    def current_device():
        return 0

    @staticmethod
    def device_count():
        return 1

    @staticmethod
    def Stream(priority=0):  # FSDP asks for it by this name
        return torch.Stream(DEVICE)

    @staticmethod
    def Event(**options):
        return torch.Event(DEVICE)

    @staticmethod
    def stream(stream):
        return stream

    @staticmethod
    def current_stream(device=None):
        return torch.accelerator.current_stream()

    @staticmethod
    def nothing(*args, **kwargs):
        return None

    set_device = manual_seed = manual_seed_all = _lazy_init = set_rng_state = nothing

    @staticmethod
    def get_rng_state(device=None):
        return torch.get_rng_state()

    @staticmethod
    def get_amp_supported_dtype():
        return [torch.float16, torch.bfloat16]


def _add_to_torch():
    torch.utils.rename_privateuse1_backend("emulated")
    torch._register_device_module("emulated", _Module("torch.emulated"))
    torch.utils.generate_methods_for_privateuse1_backend()
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(run, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten.impl("_copy_from", copy_from, "PrivateUse1")
    aten.impl("_copy_from_and_resize", copy_from, "PrivateUse1")
    aten.impl("_local_scalar_dense", item, "PrivateUse1")
    return everything, aten


_libraries = _add_to_torch()
DEVICE = torch.device("emulated", 0)
