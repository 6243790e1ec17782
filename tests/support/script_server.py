"""The process from which scripts.py forks ranks. It reads requests from stdin and answers with exit codes.

As little as possible is done here: what this module defines, the scripts have as ``__main__`` too.
"""

import ctypes
import gc
import json
import os
import signal
import sys
import time
import warnings

import torch
from torch.distributed import TCPStore

sys.modules["triton"] = None  # dynamo would import it, and its bindings may print lines at the end
__import__("torch._dynamo")  # DDP's constructor would, for a second in every rank
with torch.profiler.record_function("tests"):  # it imports what the first forward of DDP would
    pass


def _next_script():
    """Serve requests; come back in each rank of a script, with what it is to run."""
    for line in sys.stdin:
        request = json.loads(line)
        launcher = os.fork()
        if launcher == 0:
            _die_with_parent()
            if (rank := _forked_rank(request)) is not None:
                return rank
        _, status = os.waitpid(launcher, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    os._exit(0)


def _forked_rank(request):
    """The request with a rank's environment, in that rank; the launcher never comes back."""
    world = request["ranks"] or 1
    read, write = os.pipe()
    ranks = set()
    for rank in range(world):
        if (pid := os.fork()) == 0:
            _die_with_parent()
            os.close(write)
            port = os.read(read, 100).decode() if request["ranks"] else None
            os.close(read)
            return request | {"rank": rank, "port": port}
        ranks.add(pid)
    if request["ranks"]:  # after the forks: a store has threads
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(write, f"{store.port:<100}".encode() * world)
    os._exit(_first_failure(ranks, time.monotonic() + request["timeout"]))


def _first_failure(ranks, end):
    """The exit code of all; the first rank that fails ends the others, as with torchrun."""
    failed = 0
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0 and time.monotonic() < end:
            time.sleep(0.005)
            continue
        ranks.discard(pid)
        code = 124 if pid == 0 else os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = code if code > 0 else 128 - code
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return failed


def _die_with_parent():
    """So that an interrupted test leaves no script behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _become(request):
    """Arguments, environment and files as torchrun would have them."""
    if request["port"]:
        rank, world = str(request["rank"]), str(request["ranks"])
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=request["port"].strip())
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(request["environ"])
    for number, name, how in ((0, os.devnull, os.O_RDONLY), (1, request["out"], os.O_WRONLY | os.O_APPEND),
                              (2, request["err"], os.O_WRONLY | os.O_APPEND)):  # fmt: skip
        file = os.open(name, how)
        os.dup2(file, number)
        os.close(file)
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = os.path.dirname(request["script"])
    if request["warnings"]:
        warnings.simplefilter(request["warnings"])
    torch.set_num_threads(1)


_die_with_parent()
gc.freeze()  # the end of a script collects what it has made, and does not go through all of torch
_request = _next_script()
_become(_request)
__file__ = _request["script"]
with open(__file__) as _source:
    _code = compile(_source.read(), __file__, "exec")
exec(_code)
