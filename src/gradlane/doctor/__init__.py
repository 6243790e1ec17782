"""What is wrong with this machine and this job, or costs time: ``examine()``, and ``look_at(ddp_model)``."""

from .ddp_settings import look_at
from .examine import Report, examine
from .finding import Finding

__all__ = ["Finding", "Report", "examine", "look_at"]
