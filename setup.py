"""The C kernels, as an optional extension: without a compiler the install succeeds and torch does their work.

Everything else is in pyproject.toml. No -march=native: the library chooses its instructions at run time.
"""

from pathlib import Path

from setuptools import Extension, setup

# Exceptions of floating point are nobody's business here; the bits of the results are. -g0: many Pythons ask for
# debug information, which changes no instruction and makes the compiler take half as long again.
FLAGS = ["-g0", "-std=c11", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"]
FLAGS += ["-fvisibility=hidden", "-pthread"]
SOURCE = "src/gradlane/kernels/csrc"

setup(
    ext_modules=[
        Extension(
            "gradlane.kernels._native",
            sources=[f"{SOURCE}/native.c"],
            depends=[str(path) for path in sorted(Path(SOURCE).glob("*.h"))],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
