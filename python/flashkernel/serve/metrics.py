"""What Prometheus is told at /metrics. Counted by the worker's thread and by the app; each server has a registry of its
own.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["Metrics"]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "flashkernel_requests", "Requests that were answered", ["endpoint", "status"], registry=registry
        )
        self.cancelled = Counter(
            "flashkernel_cancelled", "Requests whose client went away or whose time was over", registry=registry
        )
        self.prompt_tokens = Counter("flashkernel_prompt_tokens", "Tokens of accepted prompts", registry=registry)
        self.new_tokens = Counter("flashkernel_generated_tokens", "Tokens that were generated", registry=registry)
        self.waiting = Gauge("flashkernel_sequences_waiting", "Sequences that wait for a place", registry=registry)
        self.running = Gauge("flashkernel_sequences_running", "Sequences that have pages", registry=registry)
        self.pages_used = Gauge("flashkernel_kv_pages_used", "Pages of the KV-cache in use", registry=registry)
        self.pages = Gauge("flashkernel_kv_pages", "Pages of the KV-cache", registry=registry)
        self.preemptions = Gauge(
            "flashkernel_preemptions",
            "Sequences that gave their pages away",
            registry=registry,
        )
        self.drafts = Counter(
            "flashkernel_drafts", "Drafts that were verified, one a sequence and step", registry=registry
        )
        self.drafted_tokens = Counter("flashkernel_drafted_tokens", "Tokens of those drafts", registry=registry)
        self.accepted_tokens = Counter(
            "flashkernel_accepted_tokens", "Drafted tokens that were right", registry=registry
        )
        self.first_token = Histogram(
            "flashkernel_time_to_first_token_seconds",
            "From the arrival of a request to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.seconds = Histogram(
            "flashkernel_request_seconds",
            "From the arrival of a request to its end",
            buckets=_SECONDS,
            registry=registry,
        )
        self.batch = Histogram(
            "flashkernel_batch_size",
            "Sequences beside each other in a step of the engine",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=registry,
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)
