"""pytest-benchmark's clock, set by hand: its statistics are of times that were measured before."""

from __future__ import annotations


class Clock:
    """pytest-benchmark's timer, in seconds: every call of ``tick`` takes the next sample."""

    __name__ = "device time"

    def __init__(self) -> None:
        self.now = 0.0
        self.samples: list[float] = []

    def __call__(self) -> float:
        return self.now

    def tick(self) -> None:
        if self.samples:
            self.now += self.samples.pop(0)


clock = Clock()
