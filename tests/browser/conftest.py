"""One Chromium for all pages of a module."""

import pytest

from . import chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = chromium.find()
    if program is None:
        pytest.skip("no Chromium on this machine: install the system package chromium")
    opened = chromium.Chromium(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()
