"""Read a recipe from YAML, with its base and variables; apply overrides; report mistakes with field, value, remedy."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from herd.llama3.recipe.base import models_in, read_plain, read_yaml
from herd.llama3.recipe.schema import Recipe
from herd.storage.artifact import flatten
from herd.storage.processes import PACKAGE_FOLDER
from herd.storage.secrets import names_secret, refuse_secrets, scrub

BASE = "base"
"""Key of a recipe file that names another one, whose fields it takes and changes."""
ADDRESSES = ("uri", "contents", "use", "path", "init_from", "data")
"""Keys of files and addresses, in which variables are replaced."""
VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


Complete = Callable[[dict[str, Any]], dict[str, Any]]
"""Adds to the mapping of a recipe what is read elsewhere, such as the shape of the weights it starts from."""


class RecipeError(ValueError):
    """An invalid recipe; the message has one line per fault: field, value, remedy."""


RECIPES = PACKAGE_FOLDER / "recipes"
"""The recipes that herd ships."""


def find_recipe(path: Path | str, kind: str = "recipe", folder: Path = RECIPES) -> Path:
    """Return the file of a recipe: `path` itself, or the one with that name that herd ships, such as quickstart.

    A file in the current folder has precedence, a folder has not. Raises RecipeError for a name that is neither.
    """
    path = Path(path)
    name = str(path) if str(path).isprintable() else repr(str(path))
    if re.match(r"[a-z][a-z0-9]*:/", str(path)):  # Path has made one slash of two
        raise RecipeError(f"{kind} {path}: is an address; copy the file to this machine and name that")
    try:
        if path.is_file():
            return path
        shipped = folder / f"{path}.yaml"
        is_folder = path.is_dir() and not shipped.is_file()
    except OSError as error:  # a name of 256 letters
        raise RecipeError(f"{kind} {name}: names no file ({error.strerror}); name one, or a shipped {kind}") from None
    if is_folder:
        raise RecipeError(f"{kind} {path}: is a folder; name a YAML file in it, or a shipped {kind}")
    if len(path.parts) != 1 or path.suffix in (".yaml", ".yml"):
        return path
    if not shipped.is_file():
        names = sorted(other.stem for other in folder.glob("*.yaml") if not other.stem.startswith("base"))
        meant = did_you_mean(str(path), names, str)
        raise RecipeError(f"{kind} {name}: no such file or shipped {kind}; {meant}herd ships {', '.join(names)}")
    return shipped


def did_you_mean(word: str, known: Iterable[str], show: Callable[[str], str] = repr) -> str:
    """Return `did you mean 'tokenize'? ` for `tokenise`; empty if none of `known` is close."""
    close = difflib.get_close_matches(word, known, 1)
    return f"did you mean {show(close[0])}? " if close else ""


def load_recipe(path: Path | str, overrides: list[str] | str | None = None, complete: Complete | None = None) -> Recipe:
    """Return the recipe in a YAML file, or shipped under that name, with `overrides` (`curate.dedup.jaccard=0.7`).

    Raises RecipeError.
    """
    path, changes = find_recipe(path), [overrides] if isinstance(overrides, str) else overrides
    return parse_recipe(read_recipe(path), str(path), changes, complete)


def read_recipe(path: Path, above: tuple[Path, ...] = ()) -> Any:
    """Return the plain data of the recipe file `path`, merged into that of its `base`; `above` are its descendants.

    Mappings are merged, lists and values replaced. Raises RecipeError.
    """
    try:
        data = read_yaml(path, above[-1].name + ": base" if above else "", "recipes are YAML files")
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if not isinstance(data, dict) or BASE not in data:
        return data
    named, chain = data.pop(BASE), (*above, path)
    if not isinstance(named, str) or not named:
        raise RecipeError(f"{path}: base: {named!r} is not a file; write its path from the folder of this recipe")
    if "name" not in data:
        raise RecipeError(f"{path}: name: is missing; a recipe with a base needs its own")
    below = path.parent / named
    if below.resolve() in [file.resolve() for file in chain]:
        names = " -> ".join(file.name for file in (*chain, below))
        raise RecipeError(f"{path}: base: {names} is a cycle; the last recipe of a chain has no base")
    base = read_recipe(below, chain)
    if not isinstance(base, dict):
        raise RecipeError(f"{path}: base: {below} is not a recipe; it must be a mapping")
    return merge(base, data)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes`: mappings are merged at any depth, everything else is replaced."""
    merged = dict(base)
    for key, value in changes.items():
        before = merged.get(key)
        merged[key] = merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def base_changes(path: Path) -> str:
    """Return in a line what the recipe `path` changes in its base; "" if it has none. Raises RecipeError."""
    path = find_recipe(path)
    own = read_yaml(path)
    if not isinstance(own, dict) or BASE not in own:
        return ""
    below = flatten(read_recipe(path.parent / own[BASE]))
    changes = []
    for key, value in flatten(read_recipe(path)).items():
        if key != "name" and (key not in below or below[key] != value):
            before = below.get(key)
            short = not isinstance(value, list | dict) and not isinstance(before, list | dict)
            changes.append(f"{key} {'' if before is None else f'{before} -> '}{value}" if short else f"other {key}")
    return f"{own[BASE]}: {'; '.join(changes) or 'nothing'}"


def expand_variables(data: Any, path: str = "") -> Any:
    """Return `data` with `${NAME}` and `${NAME:-default}` replaced by variables of the environment in addresses.

    An address is a field of the keys ADDRESSES. Raises RecipeError for an unset variable, and for one that holds or
    names a secret, since recipes are copied into records and logs.
    """

    def value_of(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        value = os.environ.get(name, default)
        if names_secret(name) or (value and scrub(value) != value):
            raise RecipeError(
                f"{path}: ${{{name}}} is a secret, and would be written into records and logs; secrets stay in the "
                "environment, where herd's stores read them (AWS_SECRET_ACCESS_KEY, HF_TOKEN, netrc)"
            )
        if value is None:
            raise RecipeError(f"{path}: {name} is not set; export {name}=..., or write ${{{name}:-default}}")
        return value

    if isinstance(data, dict):
        return {key: expand_variables(value, f"{path}.{key}" if path else str(key)) for key, value in data.items()}
    if isinstance(data, list):
        return [expand_variables(value, f"{path}.{number}") for number, value in enumerate(data)]
    is_address = isinstance(data, str) and path.rpartition(".")[2] in ADDRESSES
    return VARIABLE.sub(value_of, data) if is_address else data


def parse_recipe(
    data: object, name: str, overrides: list[str] | None = None, complete: Complete | None = None
) -> Recipe:
    """Return the recipe of the mapping `data`; errors start with `name`. Raises RecipeError."""
    if not isinstance(data, dict):
        raise RecipeError(f"{name}: must be a mapping with the keys {', '.join(Recipe.model_fields)}")
    if BASE in data:
        raise RecipeError(f"{name}: base: cannot be followed here; write the fields of the base into this recipe")
    for override in overrides or []:
        apply_override(data, override)
    try:
        expanded: dict[str, Any] = expand_variables(data)
        data = expanded if complete is None else complete(expanded)
    except RecipeError as error:
        raise RecipeError(f"{name}: {error}") from None
    try:
        refuse_secrets(data, name)  # before any message that could show one
    except ValueError as error:
        raise RecipeError(str(error)) from None
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(fault_lines(error, Recipe, name)) from None


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe with all defaults as plain data, for digests, logs and pages."""
    return recipe.model_dump(mode="json", by_alias=True)


def to_yaml(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML; `load_recipe` reads it back to an equal recipe."""
    return yaml.safe_dump(resolved(recipe), sort_keys=False, allow_unicode=True, width=120)


def digest(data: object) -> str:
    """Return the SHA-256 (hex) of `data` as canonical JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def apply_override(data: dict[str, Any], override: str) -> None:
    """Apply `override` such as `stages.2.for=1M` or `mix.base.math=25%` to `data`. Raises RecipeError."""
    (*parents, last), text = override_parts(override)
    section: Any = data
    for key in parents:
        if isinstance(section, list):
            section = section[element(section, key, override)]
        else:
            section = section.setdefault(key, {})
        if not isinstance(section, dict | list):
            raise RecipeError(f"override {override!r}: {key!r} has no fields")
    try:
        section[element(section, last, override) if isinstance(section, list) else last] = read_plain(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {override!r}: {text!r} is not YAML: {error}") from None


def override_parts(override: str) -> tuple[list[str], str]:
    """Return the keys and the YAML value of an override. Raises RecipeError."""
    path, separator, text = override.partition("=")
    if not separator:
        raise RecipeError(f"override {override!r}: write field.subfield=value")
    return path.split("."), text


def element(items: list[Any], key: str, override: str) -> int:
    """Return the index of the element with the name or number `key`. Raises RecipeError."""
    named = [index for index, item in enumerate(items) if isinstance(item, dict) and item.get("name") == key]
    if named:
        return named[0]
    if key.isdigit() and int(key) < len(items):
        return int(key)
    names = [str(item.get("name", index)) if isinstance(item, dict) else str(index) for index, item in enumerate(items)]
    meant, has = did_you_mean(key, names), ", ".join(names) or "none"
    raise RecipeError(f"override {override!r}: there is no element {key!r} in that list; {meant}it has {has}")


def fault_lines(error: ValidationError, model: type[BaseModel], name: str = "", section: str = "") -> str:
    """Return a line for each fault that `model` found in the file `name`: field (below `section`), value, remedy."""
    lines: list[str] = []
    root = model.__name__.lower()
    listed: set[tuple[int | str, ...]] = set()
    for fault in error.errors():
        field = ".".join([*filter(None, [section]), *map(str, fault["loc"])]) or root
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            models = [model]
            for part in fault["loc"][:-1]:
                fields = [field for m in models for key, field in m.model_fields.items() if part in (key, field.alias)]
                models = [inner for field in fields for inner in models_in(field.annotation)] or models
            keys = [info.alias or key for m in models for key, info in m.model_fields.items()]
            hint = did_you_mean(str(fault["loc"][-1]), keys).strip()
            if not hint and fault["loc"][:-1] not in listed:
                listed.add(fault["loc"][:-1])
                hint = f"the keys here are {', '.join(keys)}"
            lines.append(f"{field}: unknown key{'; ' * bool(hint)}{hint}")
        elif fault["type"] == "missing":
            lines.append(f"{field}: is missing")
        elif fault["type"] == "value_error":
            lines += [line if field == root else f"{field}: {line}" for line in message.split("\n")]
        else:
            lines.append(f"{field}: {fault['input']!r}: {message[0].lower()}{message[1:]}")
    return "\n".join(f"{name}: {line}" if name else line for line in lines)
