"""Figures for Prometheus, under vLLM's names where they exist. Each app has a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from forerun.core.request import Request
from forerun.engine.engine import Engine
from forerun.kv.kv_tiers import Tiers
from forerun.server.admission import Ending
from forerun.server.scheduler import Scheduler

TIME_BUCKETS_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Bounds of the histograms' buckets: three a decade, from a small model's step to a book's reading."""


class Metrics:
    """Counts what a server does.

    Args:
        engine, scheduler: give their figures when the metrics are read.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=True)

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"forerun:{name}", help_text, labels, registry=registry)

        def seconds(name: str, help_text: str) -> Histogram:
            return Histogram(f"forerun:{name}", help_text, buckets=TIME_BUCKETS_SECONDS, registry=registry)

        self.drafts = counter("spec_decode_num_drafts", "Steps that had drafts.")
        self.drafted = counter("spec_decode_num_draft_tokens", "Tokens that were drafted.")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self.by_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by their depth in the draft.", "position"
        )
        self.steps = counter("request_steps", "Steps of requests, one for each request in a pass.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of the prompts of requests that have begun to answer.")
        self.generated = counter("generation_tokens", "Tokens that were generated.")
        self.ended = counter("request_ended", "Requests by how they ended.", "reason")
        self.first = seconds("time_to_first_token_seconds", "From a request's arrival to its first tokens.")
        self.between = seconds("time_per_output_token_seconds", "Between steps, by the tokens that the step gave.")
        self.whole = seconds("e2e_request_latency_seconds", "From a request's arrival to its end.")

        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(f"forerun:{name}", help_text, registry=registry)

        gauge("num_requests_running", "Requests that decode.").set_function(lambda: scheduler.running)
        gauge("num_requests_waiting", "Requests that wait.").set_function(lambda: scheduler.waiting)
        gauge("kv_cache_usage_perc", "Part of the memory for keys and values that is taken; 1 is all.").set_function(
            lambda: scheduler.usage
        )
        gauge("index_bytes", "Bytes of what the drafter learned, of all namespaces.").set_function(
            lambda: engine.drafter.nbytes
        )
        registry.register(_PrefixCollector(engine))
        if engine.tiers is not None:
            registry.register(_TierCollector(engine.tiers))

    def text(self) -> bytes:
        """All figures in Prometheus's format."""
        return generate_latest(self.registry)


class _PrefixCollector(Collector):
    """Tokens of prompts, in whole chunks, that were looked up in the prefix cache and found there."""

    def __init__(self, engine: Engine) -> None:
        self._prefixes = engine.prefixes

    def collect(self) -> Iterator[Metric]:
        hits, misses = self._prefixes.hits, self._prefixes.misses
        for name, help_text, tokens in (
            ("queries", "Tokens of prompts that were looked up in the prefix cache.", hits + misses),
            ("hits", "Tokens of prompts that were found there.", hits),
        ):
            yield CounterMetricFamily(f"forerun:prefix_cache_{name}", help_text, value=tokens)


class _TierCollector(Collector):
    """Bytes of keys and values by tier, and those that were copied between the device and the rest."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers

    def collect(self) -> Iterator[Metric]:
        limits, copy_engine = self._tiers.memory.limits, self._tiers.copy_engine
        bounded = {tier: size for tier, size in limits.items() if size != float("inf")}
        for name, help_text, values in (
            ("kv_tier_bytes", "Bytes that running texts take of a tier.", self._tiers.taken),
            ("kv_tier_limit_bytes", "Bytes that they may take.", bounded),
        ):
            gauge = GaugeMetricFamily(f"forerun:{name}", help_text, labels=["tier"])
            for tier, value in values.items():
                gauge.add_metric([tier], value)
            yield gauge
        help_text = "Bytes of keys and values that were copied to the device, and away from it."
        counter = CounterMetricFamily("forerun:kv_tier_copied_bytes", help_text, labels=["way"])
        for way, value in (("in", copy_engine.fetched), ("out", copy_engine.written)):
            counter.add_metric([way], value)
        yield counter


class RequestMeter:
    """Counts the steps, tokens and times of one request.

    Args:
        metrics: takes the counts.
        request: is counted.
        arrived: by ``time.monotonic``.
    """

    def __init__(self, metrics: Metrics, request: Request, arrived: float) -> None:
        self._metrics, self._request, self._arrived = metrics, request, arrived
        self._last: float | None = None
        self._steps = 0

    def count(self, tokens: int, now: float) -> None:
        """Count the tokens of a step, at a time by ``time.monotonic``."""
        if not tokens:
            return
        if self._last is None:
            self._metrics.first.observe(now - self._arrived)
            self._metrics.prompt_tokens.inc(self._request.prompt_length)
        else:
            for _ in range(tokens):
                self._metrics.between.observe((now - self._last) / tokens)
        self._last = now
        self._metrics.generated.inc(tokens)
        self._count_steps()

    def end(self, how: Ending, now: float) -> None:
        """Count the end of the request."""
        self._count_steps()
        self._metrics.ended.labels(self._request.finish_reason or how).inc()
        self._metrics.whole.observe(now - self._arrived)

    def _count_steps(self) -> None:
        stats, metrics = self._request.stats, self._metrics
        end = len(stats.emitted)  # written last
        for drafted, accepted in zip(stats.drafted[self._steps : end], stats.accepted[self._steps : end], strict=True):
            metrics.steps.inc()
            metrics.drafts.inc(drafted > 0)
            metrics.drafted.inc(drafted)
            metrics.accepted.inc(accepted)
            for position in range(accepted):
                metrics.by_position.labels(position).inc()
        self._steps = end
