"""A process group with NCCL's manners, for the emulated device; importing it registers the backend.

Collectives run on a stream of the group, in the order of issue. They wait for the stream that issues them,
and ``wait`` orders the caller's stream after them; the host never waits. Ranks that issue different
collectives get an error, where NCCL would hang or mix them up.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from . import device
from .device import DEVICE, emulated_device

LIMIT = timedelta(seconds=15)
DTYPES = {  # NCCL's
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip


LINK = 1
"""Nanoseconds of the link for a byte that a rank gives to a collective."""


class OutOfOrder(RuntimeError):
    """The ranks have issued different collectives."""


class Group(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._store, self._rank, self._size = store, rank, size
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("inner", store), rank, size, LIMIT)
        self._stream = torch.Stream(DEVICE)
        self._peers_gone = False
        self._name = ""
        self.issued = []
        """What this rank has issued, and where."""

    def get_group_store(self):
        return self._store

    def getBackendName(self):
        return "emulated"

    def setGroupName(self, name):
        self._name = name

    def getGroupName(self):
        return self._name

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def _run(self, what, reads, writes, exchange):
        place = device.where()
        for tensor in [*reads, *writes]:
            _check(what, tensor)
        shapes = [tuple(tensor.shape) for tensor in reads]
        self.issued.append((what, shapes, place))
        if self._gloo is None:
            raise RuntimeError("this group was aborted")
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            for tensor in [*reads, *writes]:  # NCCL keeps what it works on
                tensor.record_stream(self._stream)
            emulated_device.busy(LINK * sum(map(device.size_of, reads)))
            for tensor in reads:
                emulated_device.touch(tensor, False, f"{what} in {place}")
            try:
                if not self._peers_gone:
                    self._compare(f"{what} of {reads[0].dtype} {shapes if what != 'all_to_all' else ''}")
                    exchange()
            except OutOfOrder:
                raise
            except RuntimeError:  # a connection is closed: NCCL would wait for this peer, on the device
                self._peers_gone = True
            if self._peers_gone:
                emulated_device.stick()
            for tensor in writes:
                emulated_device.touch(tensor, True, f"{what} in {place}")
            done = Future(devices=[DEVICE])
            done.set_result([*writes])
        return torch._C._distributed_c10d._create_work_from_future(done)

    def _compare(self, own):
        """All ranks issue the same."""
        row = torch.zeros(256, dtype=torch.uint8)
        text = f"{len(self.issued)}: {own}".encode()[:256]
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in range(self._size)]
        self._gloo.allgather([rows], [row]).wait()
        if any(not torch.equal(row, other) for other in rows):
            texts = [bytes(other.tolist()).rstrip(b"\0").decode(errors="replace") for other in rows]
            raise OutOfOrder(
                f"the ranks issue different collectives: {texts}; NCCL would hang or mix them up"
            )

    def abort(self):
        """Peers that wait for this rank wait until they abort too."""
        self._gloo = None
        emulated_device.free_stuck()

    def allreduce(self, tensors, options=None):
        own = [emulated_device.on_cpu(tensor) for tensor in tensors]
        return self._run("all_reduce", tensors, tensors, lambda: self._reduce(own, options))

    def _reduce(self, own, options):
        op = dist.ReduceOp.SUM if options is None else options.reduceOp
        how = dist.AllreduceOptions()
        how.reduceOp = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
        self._gloo.allreduce(own, how).wait()
        if op == dist.ReduceOp.AVG:
            for tensor in own:
                tensor.div_(self._size)

    def broadcast(self, tensors, options):
        how = dist.BroadcastOptions()
        how.rootRank, how.rootTensor = options.rootRank, 0

        def exchange():
            for tensor in tensors:
                self._gloo.broadcast([emulated_device.on_cpu(tensor)], how).wait()

        return self._run("broadcast", tensors, tensors, exchange)

    def allgather(self, outputs, inputs, options=None):
        (outputs,), (given,) = outputs, inputs
        return self._run("all_gather", inputs, outputs, lambda: self._gather(outputs, given))

    def _allgather_base(self, output, given, options=None):
        rows = list(output.view(self._size, -1).unbind())
        return self._run("all_gather", [given], [output], lambda: self._gather(rows, given.view(-1)))

    all_gather_single = _allgather_base

    def _gather(self, outputs, given):
        own = emulated_device.on_cpu(given).contiguous()
        found = [torch.empty_like(own) for _ in outputs]
        self._gloo.allgather([found], [own]).wait()
        for output, row in zip(outputs, found, strict=True):
            emulated_device.on_cpu(output).copy_(row)

    def alltoall_base(self, output, given, output_splits, input_splits, options=None):
        def exchange():
            own, found = emulated_device.on_cpu(given).clone(), emulated_device.on_cpu(output)
            outgoing = _split(own, input_splits, self._size)
            incoming = _split(found, output_splits, self._size)
            others = [peer for peer in range(self._size) if peer != self._rank]
            works = [self._gloo.recv([incoming[peer]], peer, 5) for peer in others if incoming[peer].numel()]
            works += [self._gloo.send([outgoing[peer]], peer, 5) for peer in others if outgoing[peer].numel()]
            incoming[self._rank].copy_(outgoing[self._rank])
            for work in works:
                work.wait()

        return self._run("all_to_all", [given], [output], exchange)

    all_to_all_single = alltoall_base

    def _reduce_scatter_base(self, output, given, options=None):
        def exchange():
            total = emulated_device.on_cpu(given).clone()
            self._reduce([total], options)
            emulated_device.on_cpu(output).view(-1).copy_(total.view(self._size, -1)[self._rank])

        return self._run("reduce_scatter", [given], [output], exchange)

    reduce_scatter_single = _reduce_scatter_base

    def barrier(self, opts=None):
        return self.allreduce([torch.zeros(1, device=DEVICE)])


def _check(what, tensor: Tensor):
    if tensor.is_sparse:
        raise RuntimeError(f"NCCL does not support {what} with sparse tensors")
    if tensor.device.type != DEVICE.type:
        raise RuntimeError(f"{what}: no backend for a tensor on {tensor.device.type}")
    if not tensor.is_contiguous():
        raise ValueError(f"{what}: Tensors must be contiguous")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{what}: unsupported data type {tensor.dtype} for NCCL process group")


def _split(tensor, sizes, count):
    return list(torch.split(tensor, list(sizes))) if sizes else list(tensor.chunk(count))


dist.Backend.register_backend("emulated", Group, devices=["emulated"])
