"""Addresses that hold a password, which would be kept in every record, manifest and log that names them.

Secrets come from the environment (AWS_SECRET_ACCESS_KEY, FSSPEC_HTTP, netrc) or from Prefect blocks, never from a
recipe, a root or a cluster file; a login in the address of a server moves to the variables made for it. What this gives
up: only what looks like a password is found: the part between `:` and `@` of an address, and query parameters by which
stores sign or open one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/@\s?#]*:[^/@\s?#]+@")
_SIGNED = re.compile(
    r"://[^\s]*[?&](x-amz-signature|x-amz-security-token|signature|sig|token|access_token|api_?key|password)=", re.I
)

LOGINS = {
    "MLFLOW_TRACKING_URI": ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
    "PREFECT_API_URL": ("PREFECT_API_AUTH_STRING",),
    "PREFECT_UI_URL": (),
}
"""Variable with the address of a server -> the variables for user and password, or for both with `:` between them."""


def move_logins() -> None:
    """Take user and password out of the addresses of servers in the environment: addresses are printed and recorded."""
    for name, variables in LOGINS.items():
        address, user, password = split_login(os.environ.get(name, ""))
        if address.startswith("http") and (user or password):
            os.environ[name] = address
            values = (user, password) if len(variables) == 2 else (f"{user}:{password}",)
            os.environ.update(zip(variables, values, strict=False))


def split_login(address: str) -> tuple[str, str, str]:
    """Return an address without user and password, and these two."""
    parts = urlsplit(address)
    login = parts.netloc.rpartition("@")[0]
    user, _, password = login.partition(":")
    return address.replace(f"{login}@", "", 1) if login else address, unquote(user), unquote(password)


def holds_secret(text: str) -> bool:
    """Return whether `text` holds an address with a password or a signature in it."""
    return bool(_PASSWORD.search(text) or _SIGNED.search(text))


def secret_fields(data: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted names of the fields in nested plain `data` that hold such an address."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from secret_fields(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, list | tuple):
        for place, value in enumerate(data):
            yield from secret_fields(value, f"{path}.{place}" if path else str(place))
    elif isinstance(data, str) and holds_secret(data):
        yield path


def refuse_secrets(data: Any, name: str) -> None:
    """Raise ValueError naming the fields of `data` (called `name`) with a password, without repeating it."""
    faults = [
        f"{name}{f'.{field}' if field else ''}: the address holds a password or a signature, and would be written into "
        "records and logs; take it out and give it by the environment (AWS_SECRET_ACCESS_KEY, netrc, FSSPEC_HTTP, "
        "PGPASSWORD)"
        for field in secret_fields(data)
    ]
    if faults:
        raise ValueError("\n".join(faults))
