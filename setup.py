"""The C kernels, as an optional extension: without a compiler the install succeeds and torch does their work.

Everything else is in pyproject.toml. No -march=native: the library chooses its instructions at run time.
"""

from pathlib import Path

from setuptools import Extension, setup

SOURCE = "src/gradlane/kernels/csrc"

setup(
    ext_modules=[
        Extension(
            "gradlane.kernels._native",
            sources=[f"{SOURCE}/native.c"],
            depends=[str(path) for path in sorted(Path(SOURCE).glob("*.h"))],
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
