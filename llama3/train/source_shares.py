"""Planned and realised shares of sources, counted on as training goes, for domains that have more than one.

The stream tells the sources of a range of positions apart by the shards' tables, so only what is new since the record
before is counted, and the sums are kept. Planned is what the mix gives the domain, split among its sources as their
tokens are (pooled) or as their weights say.
"""

from __future__ import annotations

import re

from llama3.tokens.stream import TokenStream
from llama3.train import metrics

_ILLEGAL = re.compile(r"[^\w./-]+")
"""What MLflow does not take in a key."""


class SourceShares:
    """Shares of the tokens of a stage that starts at `start`."""

    def __init__(self, stream: TokenStream, start: int) -> None:
        self.stream, self.start, self.counted = stream, start, start
        self.tokens: dict[str, int] = {}
        names = list(stream.sources(start, start))
        domains = [name.split("/", 1)[0] for name in names]
        self.shown = [name for name, domain in zip(names, domains, strict=True) if domains.count(domain) > 1]

    def at(self, position: int) -> dict[str, float]:
        """Return the metrics at `position`, which is not before the last one asked for."""
        if not self.shown:
            return {}
        for name, count in self.stream.sources(self.counted, position).items():
            self.tokens[name] = self.tokens.get(name, 0) + count
        self.counted = position
        total = position - self.start
        planned = self.stream.planned_sources(self.start, position)
        values = {}
        for name in self.shown:
            key = _ILLEGAL.sub("-", name)
            values[metrics.share(key)] = self.tokens.get(name, 0) / total
            values[metrics.planned_share(key)] = float(planned[name] / total)
        return values
