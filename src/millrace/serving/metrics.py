"""Counters of a server in the text format of Prometheus. Used on the server's event loop."""

import bisect
from collections import Counter
from collections.abc import Mapping

_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_GAUGES = ("running", "waiting", "free_blocks")  # of engines; all other values are counters


class Histogram:
    """Counts durations by upper bound."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(_BOUNDS_S, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        total, lines = 0, [f"# TYPE {name} histogram"]
        for bound, count in zip((*_BOUNDS_S, "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum}", f"{name}_count {total}"]


class ServerMetrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.running = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.disconnects = 0
        self.restarts = 0  # restarts of engines
        self.first_token_s = Histogram()
        self.request_s = Histogram()
        self.engines: dict[str, Mapping[str, float]] = {}  # the counters of each running engine

    def text(self) -> str:
        lines = ["# TYPE millrace_requests_total counter"]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'millrace_requests_total{{path="{path}",status="{status}"}} {count}')
        for name, kind, value in (
            ("requests_running", "gauge", self.running),
            ("disconnects_total", "counter", self.disconnects),
            ("prompt_tokens_total", "counter", self.prompt_tokens),
            ("completion_tokens_total", "counter", self.completion_tokens),
            ("engine_restarts_total", "counter", self.restarts),
        ):
            lines += [f"# TYPE millrace_{name} {kind}", f"millrace_{name} {value}"]
        lines += self.first_token_s.lines("millrace_time_to_first_token_seconds")
        lines += self.request_s.lines("millrace_request_seconds")
        for counter in sorted({name for counters in self.engines.values() for name in counters}):
            is_gauge = counter in _GAUGES
            name = f"millrace_engine_{counter}" + ("" if is_gauge else "_total")
            lines.append(f"# TYPE {name} {'gauge' if is_gauge else 'counter'}")
            for engine, counters in sorted(self.engines.items()):
                if counter in counters:
                    lines.append(f'{name}{{engine="{engine}"}} {counters[counter]:g}')
        return "\n".join([*lines, ""])
