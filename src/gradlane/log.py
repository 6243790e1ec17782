"""The library's logger: silent until the application says otherwise."""

from __future__ import annotations

import logging

log = logging.getLogger("gradlane")
log.addHandler(logging.NullHandler())
