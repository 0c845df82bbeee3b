from __future__ import annotations

import ast
import gettext
import inspect
import json as json_module
import statistics
import struct
import textwrap
from itertools import islice, pairwise
from pathlib import Path

import pytest

from herd.llama3.data.demo.installed import (
    InstalledFile,
    arguments,
    catalog_documents,
    catalog_language,
    description,
    docstrings,
    installed_documents,
    installed_state,
    licenses,
    manual_text,
    package_files,
    read_mo,
    read_po,
    spread,
    unescape,
)
from herd.llama3.recipe.base import DOMAINS

MAN = r"""'\" t
.\" a comment
.TH LS 1 "May 2024"
.ss \n[.ss] 0
.de Macro
never shown
..
.SH NAME
ls \- list directory contents
.SH "SEE ALSO" THIS
Words are \fBfilled\fP
into lines.\" another comment
.PP
.BR ls (1)
and
.I "two words" ;
.TP
\fB\-a\fR, \fB\-\-all\fR
do not ignore \(lqdot\(rq files
.nf
$ ls   -l
  total
.fi
.if n \{
.B hidden
.\}
.TS
a	b
.TE
After the table.
"""
MDOC = r""".Dd May 1, 2024
.Dt CAT 1
.Sh NAME
.Nm cat
.Nd concatenate files
.Sh SYNOPSIS
.Nm cat
.Op Fl u
.Op Ar file ...
.Bl -tag
.It Fl n
Number the lines; see
.Xr less 1 .
.El
"""


def test_manual_pages_become_prose() -> None:
    assert manual_text(MAN).split("\n\n") == [
        "NAME",
        "ls - list directory contents",
        "SEE ALSO THIS",
        "Words are filled into lines.",
        "ls(1) and two words ;",
        "-a, --all do not ignore “dot” files",
        "$ ls   -l\n  total",
        "After the table.",
    ]
    text = manual_text(MDOC)
    for part in ("cat [-u] [file ...]", "-n Number the lines; see less(1).", "concatenate files"):
        assert part in text
    assert manual_text(".so man1/other.1") == ""


def test_roff_escapes_and_arguments() -> None:
    assert unescape(r"a\-b \fIc\fP \(bu \[u00E9] \*(aq \s-1x\s0 \\ \e") == r"a-b c • é ' x \ " + "\\"
    assert arguments('one "two words" "a ""quote"""') == ["one", "two words", 'a "quote"']


def build_mo(messages: list[tuple[str, str]]) -> bytes:
    pairs = [(a.encode(), b.encode()) for a, b in messages]
    head, at, tables, data = 28, 28 + 16 * len(pairs), [b"", b""], b""
    for side in (0, 1):
        for pair in pairs:
            tables[side] += struct.pack("<2I", len(pair[side]), at + len(data))
            data += pair[side] + b"\0"
    offsets = (len(pairs), head, head + 8 * len(pairs), 0, 0)
    return b"\xde\x12\x04\x95" + struct.pack("<I5I", 0, *offsets) + b"".join(tables) + data


def test_compiled_catalogues_agree_with_gettext(tmp_path: Path) -> None:
    found = [file for file in package_files() if file.ending == ".mo"]
    made = tmp_path / "made.mo"
    made.write_bytes(build_mo([("", "Content-Type: text/plain; charset=UTF-8\n"), ("Open file", "Datei öffnen")]))
    agreed = 0
    for path in (made, *(Path(file.path) for file in found[:20])):
        with path.open("rb") as stream:
            oracle = gettext.GNUTranslations(stream)
        read: dict[str, set[str]] = {}
        for original, text in read_mo(path.read_bytes()):
            read.setdefault(original, set()).add(text)  # the same words may have several contexts
        for original, texts in read.items():
            known = {oracle.gettext(original), *(oracle.ngettext(original, original, n) for n in range(120))} - {
                original
            }
            if original and known:  # gettext finds no message that has a context
                agreed += 1
                assert texts & known or texts == {original}
    assert agreed > len(found)
    with pytest.raises(ValueError, match="magic number"):
        list(read_mo(b"something else" * 10))
    with pytest.raises(ValueError, match="truncated"):
        list(read_mo(made.read_bytes()[:40]))


def test_source_catalogues_are_read() -> None:
    text = 'msgid ""\nmsgstr "Language: de\\n"\n\n#: a.c\nmsgid "Open "\n"file"\nmsgstr "Datei "\n"\\"öffnen\\""\n'
    assert list(read_po(text)) == [("", "Language: de\n"), ("Open file", 'Datei "öffnen"')]


def test_catalogue_documents_have_a_sensible_length_and_no_originals() -> None:
    messages = [(f"message {i}", f"die Übersetzung Nummer {i} der Meldung") for i in range(400)]
    documents = list(
        catalog_documents(iter([("", "header"), ("same text here", "same text here"), *messages, *messages]))
    )
    assert "\n".join(documents).split("\n") == [text for _, text in messages]
    assert all(3500 < len(document) < 5000 for document in documents[:-1])


def test_catalogue_languages() -> None:
    for name, language in [
        ("locale/pt_BR/LC_MESSAGES/x.mo", "pt"), ("packages/a/locale/sr@latin/LC_MESSAGES/a.mo", "sr"),
        ("packages/a/po/de.po", "de"), ("packages/a/models.mo", None),
    ]:  # fmt: skip
        assert catalog_language(name) == language


def test_docstrings_are_those_that_the_parser_finds() -> None:
    for module in [textwrap, statistics, json_module, inspect]:
        code = inspect.getsource(module)  # type: ignore[arg-type]
        found = "\n\n\n".join(docstrings(code, "module"))
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        wanted = [ast.get_docstring(node) for node in ast.walk(ast.parse(code)) if isinstance(node, kinds)]
        long = [text for text in wanted if text and len(text) > 80 and "\\" not in text]
        assert len(long) > 3
        assert [text for text in long if text not in found] == []
        assert "import " not in found.split("\n")


def test_a_description_is_name_summary_and_body() -> None:
    metadata = (
        "Metadata-Version: 2.1\nName: tool\nVersion: 1\nSummary: Does things\nLicense: MIT\n\n# Tool\n\nIt works.\n"
    )
    assert description(metadata) == "tool\n\nDoes things\n\n# Tool\n\nIt works."


def test_spreading_takes_one_of_each_group_in_turn() -> None:
    files = [
        InstalledFile("", f"packages/{package}/{i}.py", 1)
        for package, n in (("a", 50), ("b", 3), ("c", 1))
        for i in range(n)
    ]
    order = spread(reversed(files))
    assert order == spread(files)
    assert {file.group for file in order[:3]} == {"packages/a", "packages/b", "packages/c"}
    assert {file.group for file in order[3:5]} == {"packages/a", "packages/b"}
    assert len(order) == len(files)


@pytest.mark.slow
def test_every_domain_has_text_with_python_and_its_packages_alone() -> None:
    for domain in DOMAINS:
        found = list(islice(installed_documents(domain, "installed", 1, system=False), 60))
        assert found == list(islice(installed_documents(domain, "installed", 1, system=False), 60))
        assert sum(document.size for document in found) > 10_000
        places = {document.url.split("/")[0] for document in found}
        assert places <= {"packages", "stdlib", "problems"}
        if domain in ("general", "code"):
            assert len({tuple(document.url.split("/")[:2]) for document in found}) > 30
        if domain == "multilingual":
            assert len({document.language for document in found}) > 4
            assert not {document.language for document in found} & {"en", None}


def test_a_document_has_the_license_of_its_package() -> None:
    """The standard library's of its files, a distribution's own of those it has installed, and `unknown` otherwise."""
    found: dict[str, set[str]] = {}
    for document in islice(installed_documents("code", "installed", 1, system=False), 400):
        root, _, rest = (document.url or "").partition("/")
        found.setdefault(root if root == "stdlib" else rest.split("/")[0], set()).add(document.license or "")
    assert found.pop("stdlib") == {"PSF-2.0"}
    known = licenses()
    assert len(found) > 3
    assert found == {top: {known.get(top, known.get(top.lower(), "unknown"))} for top in found}
    assert {"PSF-2.0"} not in [found[top] for top in found if known.get(top, "") != "PSF-2.0"]


def test_the_state_changes_with_any_file_that_may_be_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"stdlib": str(tmp_path / "lib"), **dict.fromkeys(("purelib", "platlib"), str(tmp_path / "site"))}
    monkeypatch.setattr("sysconfig.get_paths", lambda: paths)
    for folder in set(paths.values()):
        (Path(folder) / "package" / "__pycache__").mkdir(parents=True)
    changes = {
        "a new file": ("site/package/a.py", "a = 1"),
        "another size": ("site/package/a.py", "a = 12"),
        "another package": ("site/package-2.0.dist-info/METADATA", "Name: package"),
        "the library": ("lib/package/b.py", "b = 1"),
        "nothing: a cache": ("site/package/__pycache__/a.pyc", "compiled"),
        "nothing: a large file": ("site/package/c.py", "c" * 300_000),
    }
    try:
        states = [state_now()]
        for file, text in changes.values():
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(text)
            states.append(state_now())
    finally:
        monkeypatch.undo()
        state_now()
    changed = [before != after for before, after in pairwise(states)]
    assert dict(zip(changes, changed, strict=True)) == {name: not name.startswith("nothing") for name in changes}


def state_now() -> str:
    package_files.cache_clear()
    installed_state.cache_clear()
    return installed_state(system=False)
