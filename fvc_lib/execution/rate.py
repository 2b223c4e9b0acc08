"""How fast a task goes and when it will be done, from what its progress said in this attempt."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 120.0
_SHORTEST_SECONDS = 3.0
_SAMPLES = 240


class RateMeter:
    """Estimates what is left from steps done over time: over the last two minutes and the whole attempt.

    The time of one step is the least-squares slope over a window, blended with the mean over the whole attempt, which
    steadies it while the window is short. What was done before this attempt, or before ``what`` or ``total`` changed,
    counts for nothing: a resumed training begins in the middle.
    """

    def __init__(self) -> None:
        self._kind: tuple[str, int] | None = None
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)
        self._first: tuple[float, int] | None = None

    def see(self, now: float, what: str, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` were done at ``now`` (monotonic seconds)."""
        going_back = bool(self._samples) and done < self._samples[-1][1]
        if (what, total) != self._kind or going_back:
            self._kind, self._first = (what, total), (now, done)
            self._samples.clear()
        if not self._samples or done > self._samples[-1][1]:
            self._samples.append((now, done))
        while len(self._samples) > 2 and now - self._samples[1][0] > WINDOW_SECONDS:
            self._samples.popleft()

    def seconds_left(self, now: float) -> float | None:
        """Until all is done; None while too little was seen to say."""
        if self._kind is None or self._first is None or len(self._samples) < 2:
            return None
        (began, at_first), (last, done) = self._first, self._samples[-1]
        if last - began < _SHORTEST_SECONDS:
            return None
        per_step = (self._slope() + (last - began) / (done - at_first)) / 2
        left = (self._kind[1] - done) * per_step
        # A step that takes longer than usual is not done sooner: what has passed since the last one counts down only
        # as far as that step itself.
        return max(0.0, left - min(now - last, per_step))

    def _slope(self) -> float:
        """Seconds a step over the window, by least squares of time over steps."""
        count = len(self._samples)
        mean_time = sum(time for time, _ in self._samples) / count
        mean_done = sum(done for _, done in self._samples) / count
        covariance = sum((time - mean_time) * (done - mean_done) for time, done in self._samples)
        return covariance / sum((done - mean_done) ** 2 for _, done in self._samples)
