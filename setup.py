"""The C kernels, as an optional extension: without a compiler the install succeeds and torch replaces them.

Everything else is in pyproject.toml. No -march=native: the library chooses its instructions at run time.
``python setup.py build_ext --inplace`` compiles on all cores, and only the units whose files have changed.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Floating-point exceptions are not used; the bits of the results matter. -g0: many Pythons ask for debug
# information, which changes no instruction and makes the compiler take half as long again.
FLAGS = ["-g0", "-std=c11", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"]
FLAGS += ["-fvisibility=hidden", "-pthread"]
CSRC = Path("src/gradlane/kernels/csrc")


def files_of(source: Path) -> set[Path]:
    """A file and all headers of ours that it includes, directly or not."""
    includes = re.findall(r'^#include "(.+)"', source.read_text(encoding="utf-8"), re.MULTILINE)
    return {source}.union(*(files_of(source.parent / name) for name in includes))


# Where the repository is: the workflow of a release knows, and nobody else needs to.
ADDRESS = os.environ.get("GRADLANE_REPOSITORY", "").rstrip("/")
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:)([^)]+)\)")


def description(readme: str, address: str) -> str:
    """The README for a package index, which has none of its files: links lead to the repository.

    Without an address they are plain text, and pictures are left out.
    """

    def link(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        if address:
            return f"{picture}[{text}]({address}/{'raw' if picture else 'blob'}/main/{path})"
        return "" if picture else text

    return RELATIVE.sub(link, readme)


def urls(address: str) -> dict[str, str]:
    if not address:
        return {}
    changes = f"{address}/blob/main/CHANGELOG.md"
    return {"Source": address, "Issues": f"{address}/issues", "Changelog": changes}


class ParallelBuild(build_ext):
    """Compiles the units of an extension at the same time, and not those that are newer than their files."""

    def build_extension(self, ext: Extension) -> None:
        compiler, rules = self.compiler, Path(__file__).stat().st_mtime
        compile_all = compiler.compile

        def compile_one(source: str, output_dir: str, options: dict) -> str:
            (unit,) = compiler.object_filenames([source], output_dir=output_dir)
            changed = max(rules, *(path.stat().st_mtime for path in files_of(Path(source))))
            if self.force or not os.path.exists(unit) or os.path.getmtime(unit) < changed:
                compile_all([source], output_dir=output_dir, **options)
            return unit

        def compile_parallel(sources: list[str], output_dir: str, **options: object) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return list(pool.map(lambda source: compile_one(source, output_dir, options), sources))

        compiler.compile = compile_parallel
        try:
            super().build_extension(ext)
        finally:
            compiler.compile = compile_all


if __name__ == "__main__":
    setup(
        long_description=description(Path("README.md").read_text(encoding="utf-8"), ADDRESS),
        long_description_content_type="text/markdown",
        project_urls=urls(ADDRESS),
        cmdclass={"build_ext": ParallelBuild},
        ext_modules=[
            Extension(
                "gradlane.kernels._native",
                sources=[str(path) for path in sorted(CSRC.glob("*.c"))],
                depends=[str(path) for path in sorted(CSRC.glob("*.h"))],
                extra_compile_args=FLAGS,
                extra_link_args=["-pthread"],
                optional=True,
            )
        ],
    )
