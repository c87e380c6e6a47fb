"""The default corpus: natural documents, and a metric that means something."""

from __future__ import annotations

import ast

import pytest
from nopad.recipes.support import stdlib_corpus
from nopad.recipes.support.stdlib_corpus import definitions, function_example, parses

SOURCE = """
x = 1

@decorated
def first(a):
    'Say it.'
    return a

class Small:
    def method(self): pass

class Large:
    'Long.'
    async def one(self):
        return(1)  # in another style
    def two(self):
        '''Say two.

        And more.'''
"""


def test_functions_and_small_classes_are_documents(monkeypatch):
    monkeypatch.setattr(stdlib_corpus, "MAX_CLASS_LINES", 3)
    texts = list(definitions(SOURCE))
    assert [text.splitlines()[0] for text in texts[:2]] == ["@decorated", "class Small:"]
    assert texts[2] == "async def one(self):\n    return 1\n"
    assert texts[3] == 'def two(self):\n    """Say two."""\n'
    for text in texts:
        assert len(ast.parse(text).body) == 1 and text.endswith("\n")
    assert list(definitions("def broken(:")) == []
    assert list(definitions("def long():\n" + "    f()\n" * 40)) == []


def test_a_function_is_continued_after_its_docstring():
    example = function_example("def f(a):\n    'Say it.'\n\n    return a\n")
    assert example.prompt.endswith("'Say it.'") and example.reference == "\n\n    return a\n"
    for text in ("class A:\n    x = 1\n", "def f(): return 1\n", "def f():\n    'Only this.'\n"):
        assert function_example(text) is None


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("\n    return self.position + offset\n", 1),
        ("\n    return self.position + offset\n    if it is cut he", 1),
        ("\n    return self.position + offset", 0),
        ("\n    return 1\n", 0),
        ("\n    return self.position + (offset\n", 0),
        ("\nreturn_self_position_and_offset\n", 0),
        ("\n    for each in self.elements_of_it:\n", 0),
        ('\n    x = "\x00 a null inside of a text"\n', 0),
        ("\n    x = " + "(" * 5000 + ")" * 5000 + "\n", 0),
        ("", 0),
    ],
)
def test_a_completion_counts_if_python_can_parse_enough_of_it(completion, score):
    assert parses(completion) == score
