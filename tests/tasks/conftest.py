"""The servers of the run."""

from __future__ import annotations

from tests.storage.s3 import bucket, moto_endpoint
from tests.tasks.mlflow_server import mlflow_uri

__all__ = ["bucket", "mlflow_uri", "moto_endpoint"]
