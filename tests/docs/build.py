"""The site, built as `make docs` builds it: a warning is an error."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def build(folder):
    """Build the site into ``folder / "site"`` and return that."""
    site = folder / "site"
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "-q", "-d", str(folder / "doctrees"), str(DOCS), str(site)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return site
