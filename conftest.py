"""Runs the Python blocks of the documentation as tests."""

import logging

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser


def restore_logging(namespace):
    """A page may configure logging, as its reader does; the tests after it must not inherit that."""
    logging.getLogger("gradlane").setLevel(logging.NOTSET)
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        root.removeHandler(handler)


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()], patterns=["*.md"], teardown=restore_logging
).pytest()
