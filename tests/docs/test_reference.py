"""What the pages of the reference list, without building them; tests/docs/test_site.py builds the site."""

import re
from pathlib import Path

import gradlane
import gradlane.compat
import gradlane.doctor
import gradlane.local

API = Path(__file__).parents[2] / "docs" / "api"


def listed():
    """The last part of each name that has a directive."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in API.glob("*.rst"))
    return set(re.findall(r"^\.\. (?:auto|py:)\w+:: (?:[\w.]+\.)?(\w+)", pages, re.MULTILINE))


def test_every_public_name_has_a_directive():
    names = listed()
    assert {"Mean", "attach", "powerSGD_hook"} <= names
    for module in (gradlane, gradlane.compat, gradlane.doctor, gradlane.local):
        missing = {name for name in module.__all__ if name != "__version__"} - names
        assert not missing, f"give these of {module.__name__} an entry in a page of docs/api/"
