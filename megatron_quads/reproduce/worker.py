"""What the ranks of ``quads reproduce`` run, by name."""

from __future__ import annotations

from collections.abc import Callable

from ..jobs import Job
from .bases import calibrate_job
from .study_job import study_job
from .warm import warm_job

PARTS: dict[str, Callable[[Job], None]] = {"warm": warm_job, "calibrate": calibrate_job, "study": study_job}
