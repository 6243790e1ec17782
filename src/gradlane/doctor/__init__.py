"""Finds what is broken or costs time on a machine or in a job: ``examine()`` and ``check_ddp(model)``."""

from .ddp_settings import check_ddp
from .examine import Report, examine
from .finding import Finding

__all__ = ["Finding", "Report", "check_ddp", "examine"]
