"""docs/getting-started.md as somebody follows it who knows nothing else: an empty folder, copy, run, compare.

A file is the Python block after a line that names it in backquotes; commands are the lines of shell blocks; a
text block is what the commands before it print. Where the page shows ``...`` anything may stand.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "getting-started.md"
BLOCK = re.compile(r"^```(python|sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?")

# The environment in which the tests run stands in for these. A change to one of them must be tried by hand.
INSTALLING = {
    "python3 -m venv .venv",
    ". .venv/bin/activate",
    'pip install "../gradlane[cli]"',
}


def steps(page):
    """The page as (what to do, text): write into a named file, run, or compare."""
    end = 0
    for block in BLOCK.finditer(page):
        before = page[end : block.start()].strip().splitlines()[-1:]
        end = block.end()
        kind, text = block.groups()
        if kind == "python":
            (name,) = re.findall(r"`([\w.]+\.py)`:$", before[0])
            yield name, text
        else:
            yield kind, text


def same(shown, printed):
    """Whole numbers and words as they are shown; other numbers to 2 % and one in the last digit, as
    another processor may round them."""
    shown, printed = shown.splitlines(), printed.splitlines()
    return len(shown) == len(printed) and all(map(same_line, shown, printed))


def same_line(shown, printed):
    words = [re.escape(part).replace(r"\.\.\.", ".*") for part in NUMBER.split(shown)]
    found = re.fullmatch(r"(\d+(?:\.\d+)?)".join(words), printed)
    return found is not None and all(map(same_number, NUMBER.findall(shown), found.groups()))


def same_number(shown, printed):
    if "." not in shown:
        return shown == printed
    last_digit = 10.0 ** -len(shown.partition(".")[2])
    return abs(float(printed) - float(shown)) <= 0.02 * float(shown) + 1.001 * last_digit


def run(command, folder):
    """As a shell would; programs of the running environment come first."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": programs},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_every_file_command_and_output_of_getting_started(tmp_path):
    printed, compared, installed = "", 0, set()
    for what, text in steps(PAGE.read_text(encoding="utf-8")):
        if what == "sh":
            commands = text.splitlines()
            installed.update(INSTALLING.intersection(commands))
            printed += "".join(run(line, tmp_path) for line in commands if line not in INSTALLING)
        elif what == "text":
            assert same(text, printed), f"the page shows\n{text}\nand this came\n{printed}"
            printed, compared = "", compared + 1
        else:
            (tmp_path / what).write_text(text, encoding="utf-8")
    assert installed == INSTALLING
    assert compared == 4
    assert printed == ""


@pytest.mark.parametrize(
    ("shown", "printed", "equal"),
    [
        ("step 20: loss 8.7\n", "step 20: loss 8.6\n", True),
        ("step 20: loss 8.7\n", "step 20: loss 9.7\n", False),
        ("step 20: loss 8.7\n", "step 21: loss 8.7\n", False),
        ("4493 bytes\n", "4494 bytes\n", False),
        ("kernels: ...\n", "kernels: C, AVX2\n", True),
        ("kernels: ...\n", "kernel: C, AVX2\n", False),
        ("one\n", "one\ntwo\n", False),
    ],
)
def test_what_counts_as_the_same_output(shown, printed, equal):
    assert same(shown, printed) == equal
