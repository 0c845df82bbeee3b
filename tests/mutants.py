"""Makes mutants with mutmut's operators: `.venv/mutate/bin/python tests/mutants.py FILE...` prints one in a line.

A line has the file, the offsets of the text that is replaced, and the new text. Each mutant changes one number, string,
operator, argument, assignment, condition or keyword. mutmut has several versions of a string; the first is taken. (A
half of its mutants are arguments, which cosmic-ray does not change; that has 11 versions of an operator instead.)
Left out is what can only change a text for people, or nothing: docstrings, annotations and other types, code for type
checkers, imports, `__all__`, decorators, `raise`, what is printed or logged, and strings with four words in a row.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import libcst as cst
import libcst.matchers as m
from libcst._nodes.internal import CodegenState
from libcst.metadata import MetadataWrapper, WhitespaceInclusivePositionProvider
from mutmut.mutation.file_mutation import MutationVisitor
from mutmut.mutation.mutators import mutation_operators, operator_string
from mutmut.mutation.pragma_handling import IgnoredCode

OPERATORS = [
    (kind, (lambda node: itertools.islice(operator_string(node), 1)) if operator is operator_string else operator)
    for kind, operator in mutation_operators
]
PROSE = re.compile(r"(?:[\w'`.,:;-]+ ){3,}")
TALK = m.Name("print") | m.Attribute(m.OneOf(m.Name("console"), m.Name("warnings"), m.Name("logger")))
TYPES = m.Name("cast") | m.Name("TypeVar") | m.Name("NewType")
NO_EFFECT = m.OneOf(
    m.Import(),
    m.ImportFrom(),
    m.Expr(m.SimpleString() | m.ConcatenatedString()),
    m.If(test=m.Name("TYPE_CHECKING")),
    m.Assign(targets=[m.AssignTarget(m.Name("__all__"))]),
    m.Raise(),
    m.Call(func=TALK | TYPES),
)


class Visitor(MutationVisitor):
    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.SimpleString) and PROSE.search(node.raw_value):
            return True
        if isinstance(node, cst.FunctionDef):  # mutmut leaves out those with decorators, because it copies functions
            node = node.with_changes(decorators=())
        return m.matches(node, NO_EFFECT) or super()._skip_node_and_children(node)


def rendered(module: cst.Module, node: cst.CSTNode, depth: int) -> str:
    """Return the text of a node in a block of this depth; Module.code_for_node knows no depth."""
    state = CodegenState(module.default_indent, module.default_newline)
    state.increase_indent(module.default_indent * depth)
    node._codegen(state)
    return "".join(state.tokens)


def mutants(source: str) -> Iterator[tuple[int, int, str]]:
    """Yield the start, the end and the new text of each mutant."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    visitor = Visitor(OPERATORS, IgnoredCode(set(), set(), set()))
    module = wrapper.visit(visitor)
    spans = wrapper.resolve(WhitespaceInclusivePositionProvider)
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    seen = set()
    for old, new in ((mutation.original_node, mutation.mutated_node) for mutation in visitor.mutations):
        first, last = spans[old].start, spans[old].end
        start, end = starts[first.line - 1] + first.column, starts[last.line - 1] + last.column
        depth = next(depth for depth in range(20) if rendered(module, old, depth) == source[start:end])
        text = rendered(module, new, depth)
        if (mutant := (start, end, text)) not in seen and text != source[start:end]:
            seen.add(mutant)
            yield mutant


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for start, end, new in mutants(Path(name).read_text()):
            print(json.dumps([name, start, end, new]))
