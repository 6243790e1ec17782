"""Compiles the emulated device, once for each version of its source and of torch."""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

SOURCE = Path(__file__).parent / "emulator"
BUILD = Path(__file__).parents[2] / "build" / "emulator"
COMPILER = os.environ.get("CXX", "g++")


def compiler() -> str | None:
    return shutil.which(COMPILER)


def built() -> Path:
    """The folder with the module ``emulated_device``."""
    sources = sorted(SOURCE.iterdir())
    name = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    name.update(f"{torch.__version__} {sys.version}".encode())
    folder = BUILD / name.hexdigest()[:16]
    target = folder / f"emulated_device{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        _compile(unfinished)
        unfinished.rename(target)  # another process may have done the same
    return folder


def _compile(target: Path) -> None:
    root = Path(torch.__file__).parent
    include = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    libraries = ["torch", "torch_cpu", "torch_python", "c10"]
    command = [COMPILER, "-std=c++20", "-O0", "-fPIC", "-shared", "-w", *(f"-I{path}" for path in include)]
    command += [str(SOURCE / "device.cpp"), "-o", str(target), f"-L{root / 'lib'}"]
    command += [f"-l{name}" for name in libraries] + [f"-Wl,-rpath,{root / 'lib'}"]
    subprocess.run(command, check=True, capture_output=True, text=True)
