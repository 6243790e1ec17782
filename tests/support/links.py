"""For tests that need emulated links; elsewhere they are skipped, and say why."""

import pytest

from gradlane.bench.emulation import why_not

needs_links = pytest.mark.skipif(why_not() is not None, reason=f"no emulated links here: {why_not()}")
