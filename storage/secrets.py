"""Find addresses that contain a password, which would be copied into records, manifests and logs.

Secrets come from the environment (AWS_SECRET_ACCESS_KEY, FSSPEC_HTTP, netrc) or from Prefect blocks, never from a
recipe, a root or a cluster file. Refused are the part between `:` and `@` of an address and query parameters that sign
or open a store; `scrub` also hides what has the name or the shape of a secret in text that herd records.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/@\s?#]*:[^/@\s?#]+@")
_SIGNING = "[?&](?:x-[a-z]+-(?:signature|security-token)|signature|sig|token|access_token|api_?key|password)="
_SIGNED = re.compile(rf"://[^\s]*{_SIGNING}", re.I)

_NAME = re.compile(
    r"(^|[^A-Z])(SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH|API_?KEY|(ACCESS|PRIVATE|SIGNING)_KEY)([^A-Z]|$)"
)
_SHAPES = (
    (re.compile(r"(://[^/@\s?#:]*:)[^/@\s?#]+@"), r"\1***@"),
    (re.compile(rf"({_SIGNING})[^&\s\"']+", re.I), r"\1***"),
    (re.compile(r"(\b[A-Z0-9_]*(?:SECRET|TOKEN|PASSWORD|_KEY)\b[\"']?\s*[=:]\s*[\"']?)[\w/+.=-]{8,}"), r"\1***"),
    (re.compile(r"\b(hf_|gh[pousr]_|sk-|AKIA|ASIA)[\w-]{16,}"), r"\1***"),
    (re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END|\Z)", re.S), r"\1***\2"),
)
"""Addresses with a login or a signature, assignments to NAMES of secrets, keys of well-known services, private keys."""

LOGINS = {
    "MLFLOW_TRACKING_URI": ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
    "PREFECT_API_URL": ("PREFECT_API_AUTH_STRING",),
    "PREFECT_UI_URL": (),
}
"""Variable with a server address -> variables for user and password, or one variable for `user:password`."""


PAGE_KEY = "pages.key"
"""File in a root's working folder: the key of the pages of `herd watch` and `herd serve`."""


def kept_secret(path: Path, user: str = "") -> str:
    """Return the text of a file that only its owner can read; at first a random secret, after `user` if there is one.

    A secret that stays keeps open pages and links valid. Where the file can be neither read nor written it is another
    one each time.
    """
    with suppress(OSError):
        if known := path.read_text().strip():
            return known
    secret, staged = f"{user}{secrets.token_urlsafe(32)}", path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    with suppress(OSError):
        try:
            # Complete before it has its name: "", read by another process meanwhile, would open the pages.
            with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"{secret}\n")
            os.link(staged, path)
        except FileExistsError:  # another process was first
            return path.read_text().strip() or secret
        except PermissionError:  # a file system without hard links
            os.rename(staged, path)
        finally:
            staged.unlink(missing_ok=True)
    return secret


def move_logins() -> None:
    """Move user and password from server addresses in the environment, which are printed, to their own variables."""
    for name, variables in LOGINS.items():
        address, user, password = split_login(os.environ.get(name, ""))
        if address.startswith("http") and (user or password):
            os.environ[name] = address
            values = (user, password) if len(variables) == 2 else (f"{user}:{password}",)
            os.environ.update(zip(variables, values, strict=False))


def split_login(address: str) -> tuple[str, str, str]:
    """Return the address without login, the user and the password."""
    parts = urlsplit(address)
    login = parts.netloc.rpartition("@")[0]
    user, _, password = login.partition(":")
    return address.replace(f"{login}@", "", 1) if login else address, unquote(user), unquote(password)


def holds_secret(text: str) -> bool:
    """Return whether `text` contains an address with a password or a signature."""
    return bool(_PASSWORD.search(text) or _SIGNED.search(text))


def names_secret(name: str) -> bool:
    """Return whether `name`, of a variable, is one of a secret: HF_TOKEN, AWS_SECRET_ACCESS_KEY, db-password."""
    return bool(_NAME.search(name.upper().replace("-", "_")))


def scrub(text: str) -> str:
    """Return `text` with *** for secrets: those of `_SHAPES`, and what this process's own variables hold."""
    values = {value for name, value in os.environ.items() if names_secret(name) and len(value) >= 8}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***")
    for shape, hidden in _SHAPES:
        text = shape.sub(hidden, text)
    return text


def secret_fields(data: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted names of the fields of nested `data` that contain such an address."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from secret_fields(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from secret_fields(value, f"{path}.{index}" if path else str(index))
    elif isinstance(data, str) and holds_secret(data):
        yield path


def refuse_secrets(data: Any, name: str) -> None:
    """Raise ValueError naming the fields of `data` (called `name`) with a password, but not the password."""
    faults = [
        f"{name}{f'.{field}' if field else ''}: the address holds a password or a signature, and would be written into "
        "records and logs; remove it and set it in the environment (AWS_SECRET_ACCESS_KEY, netrc, FSSPEC_HTTP, "
        "PGPASSWORD)"
        for field in secret_fields(data)
    ]
    if faults:
        raise ValueError("\n".join(faults))
