"""The servers of the run."""

from __future__ import annotations

from tests.storage.s3 import bucket, moto_endpoint

__all__ = ["bucket", "moto_endpoint"]
