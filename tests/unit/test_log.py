"""Who hears of a warning: stderr, unless the application has said where warnings go."""

import pytest

from ..support import scripts

WARN = "from gradlane.log import log; log.info('quiet'); log.warning('step %d is skipped', 7)"


@pytest.fixture
def stderr_of(tmp_path):
    def run(before):
        script = tmp_path / "script.py"
        script.write_text(f"import logging, sys\n{before}\n{WARN}")
        done = scripts.run(script, warnings="error")
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        return done.stderr

    return run


def test_warnings_are_heard_where_nobody_has_configured_logging(stderr_of):
    assert stderr_of("") == "gradlane: step 7 is skipped\n"


def test_with_the_rank_of_a_launcher(stderr_of):
    assert stderr_of("import os; os.environ['RANK'] = '3'") == "gradlane: rank 3: step 7 is skipped\n"


@pytest.mark.parametrize(
    ("before", "heard"),
    [
        ("logging.basicConfig(format='root %(levelname)s %(message)s')", "root WARNING step 7 is skipped\n"),
        ("logging.getLogger('gradlane').addHandler(logging.StreamHandler())", "step 7 is skipped\n"),
        ("logging.getLogger('gradlane').addHandler(logging.NullHandler())", ""),
        ("logging.getLogger('gradlane').setLevel(logging.ERROR)", ""),
    ],
)
def test_an_application_that_says_so_has_the_only_word(stderr_of, before, heard):
    assert stderr_of(before) == heard
