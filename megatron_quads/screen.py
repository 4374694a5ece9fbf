"""Progress bars under the lines that a job's rank 0 prints; without a terminal, the lines alone."""

from __future__ import annotations

import re
import threading
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

COUNT = re.compile(r"^(?:step|warm-up)\s+(\d+)/(\d+)\b")  # how jobs say where they are


class Screen:
    """Bars for all stages and for the job that runs. Use as a context; ``line`` may be called from any thread."""

    def __init__(self, stages: int = 0, console: Console | None = None) -> None:
        self.console = console or Console()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        live = self.console.is_terminal
        self.progress = Progress(*columns, console=self.console, disable=not live)
        self.all = self.progress.add_task("all stages", total=stages) if stages else None
        self.job = self.progress.add_task("start", total=None)
        self.begun = 0
        self.lock = threading.Lock()

    def __enter__(self) -> Screen:
        self.progress.start()
        return self

    def __exit__(self, *unused: Any) -> None:
        self.progress.stop()

    def stage(self, text: str) -> None:
        """A new stage: its own line, and its own bar once its job says how far it is."""
        with self.lock:
            if self.all is not None:
                self.progress.update(self.all, completed=self.begun)
            self.begun += 1
            self.console.rule(f"[bold]{text}[/bold]", align="left")
            self.progress.reset(self.job, description=text.split(":")[0].split(",")[0], total=None)

    def line(self, text: str) -> None:
        """Show a line of the job and move its bar."""
        with self.lock:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
            if found := COUNT.match(text):
                done, total = map(int, found.groups())
                self.progress.update(self.job, completed=done, total=total)

    def end(self) -> None:
        """All stages are done."""
        if self.all is not None:
            self.progress.update(self.all, completed=self.begun)
        self.progress.update(self.job, visible=False)
