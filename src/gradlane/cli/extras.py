"""What an extra of gradlane needs, by name: `pip install 'gradlane[cli]'` may find another package."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires


def way_to_install(extra: str, missing: ModuleNotFoundError) -> str:
    """The command that brings the packages of an extra."""
    try:
        wanted = [line for line in requires("gradlane") or () if f'extra == "{extra}"' in line]
    except PackageNotFoundError:
        wanted = []
    names = [re.split(r"[^\w.-]", line)[0] for line in wanted if "python_version" not in line]
    return f"the command line needs it: pip install {' '.join(names or [missing.name or extra])}"
