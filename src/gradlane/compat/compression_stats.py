"""Elements before and after compression, as torch's PowerSGD counts them."""

from ..core.events import Event, StepTimes
from ..log import log
from ..telemetry.sink import Sink

Figures = dict[str, int]


class CompressionStats(Sink):
    """Counts the steps from ``start`` on, and logs a line every ``every`` of them."""

    def __init__(self, start: int, every: int) -> None:
        self.start = start
        self.every = every
        self.before = 0
        self.after = 0
        self.next_report = 0

    def gradient(self, step: int, numel: int) -> None:
        if step >= self.start:
            self.before += numel

    def __call__(self, event: Event) -> None:
        if event.step >= self.start:
            self.after += event.payload_elements

    def step_ended(self, times: StepTimes) -> None:
        if times.step < max(self.start, self.next_report):
            return
        rate, before, after = self.totals()
        log.info(
            "PowerSGD, iteration %d: %d elements became %d, a rate of %.4g", times.step, before, after, rate
        )
        self.next_report = times.step + self.every

    def totals(self) -> tuple[float, int, int]:
        return (self.before / self.after if self.after else 0, self.before, self.after)

    def state_dict(self) -> Figures:
        return {"before": self.before, "after": self.after, "next_report": self.next_report}

    def load_state_dict(self, state: Figures) -> None:
        self.before, self.after = state["before"], state["after"]
        self.next_report = state["next_report"]
