"""Prometheus metrics, under vLLM's names where they exist."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from forerun.core.request import Request
from forerun.engine.engine import Engine
from forerun.server.admission import Ending
from forerun.server.scheduler import Scheduler

TIME_BUCKETS_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Bounds of the histograms' buckets: three per decade, from a small model's step to the prefill of a book."""


class Metrics:
    """A server's counters, and gauges of its engine and scheduler, in a registry."""

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
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that have started to answer.")
        self.generated = counter("generation_tokens", "Tokens that were generated.")
        self.ended = counter("request_ended", "Requests by how they ended.", "reason")
        self.first = seconds("time_to_first_token_seconds", "From a request's arrival to its first tokens.")
        self.between = seconds("time_per_output_token_seconds", "Time between steps, divided by the step's tokens.")
        self.whole = seconds("e2e_request_latency_seconds", "From a request's arrival to its end.")

        for name, help_text, now in (
            ("num_requests_running", "Requests that decode.", lambda: scheduler.running),
            ("num_requests_waiting", "Requests that are waiting.", lambda: scheduler.waiting),
            ("kv_cache_usage_perc", "Used fraction of the memory for keys and values.", lambda: scheduler.usage),
            ("index_bytes", "Bytes of the drafter's index, over all namespaces.", lambda: engine.learned_bytes),
        ):
            Gauge(f"forerun:{name}", help_text, registry=registry).set_function(now)
        registry.register(_EngineCollector(engine, scheduler))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine, scheduler: Scheduler) -> None:
        self._engine, self._scheduler = engine, scheduler

    def collect(self) -> Iterator[Metric]:
        seconds = {**asdict(self._engine.step_seconds), "other": self._scheduler.other_seconds}
        yield _family(CounterMetricFamily, "step_seconds", "Time of steps, by part.", "part", seconds)
        hits, misses = self._engine.prefixes.hits, self._engine.prefixes.misses
        for name, help_text, tokens in (
            ("queries", "Tokens of prompts, in whole chunks, that were looked up in the prefix cache.", hits + misses),
            ("hits", "Tokens of prompts that were found there.", hits),
        ):
            yield CounterMetricFamily(f"forerun:prefix_cache_{name}", help_text, value=tokens)
        if (tiers := self._engine.tiers) is not None:
            bounded = {tier: size for tier, size in tiers.memory.limits.items() if size != math.inf}
            copied = {"in": tiers.copy_engine.fetched, "out": tiers.copy_engine.written}
            for family, name, help_text, label, values in (
                (GaugeMetricFamily, "bytes", "Bytes that running requests use in a tier.", "tier", tiers.taken),
                (GaugeMetricFamily, "limit_bytes", "Bytes that they may use.", "tier", bounded),
                (CounterMetricFamily, "copied_bytes", "Bytes copied to the device, and away from it.", "way", copied),
            ):
                yield _family(family, f"kv_tier_{name}", help_text, label, values)


Family = CounterMetricFamily | GaugeMetricFamily


def _family(kind: type[Family], name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = kind(f"forerun:{name}", help_text, labels=[label])
    for of, value in values.items():
        family.add_metric([of], value)
    return family


class RequestMeter:
    """A meter of one request's steps, tokens and times; ``arrived`` is by ``time.monotonic``."""

    def __init__(self, metrics: Metrics, request: Request, arrived: float) -> None:
        self._metrics, self._request, self._arrived = metrics, request, arrived
        self._last: float | None = None
        self._steps = 0

    def count(self, tokens: int, now: float) -> None:
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
