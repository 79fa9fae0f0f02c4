"""Words that must not come back in texts that users read: each hides the ordinary term.

Collected are log messages, errors, HTTP problems, API descriptions, help and output of commands, settings, metric
help, any other sentence in code, the dashboard's texts and all pages. Names and comments are for reviewers to judge.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
BANNED = {
    "told": "emitted, sent, reported",
    "kept": "stored, retained",
    "anew": "again, restarted",
    "heed|heeds|heeded": "apply",
    "begun": "started",
    "(gone|goes|go|going) on from": "resumed, restored",
    "what (became|came) of": "result, outcome",
    "who(ever)? (asks?|asked|sends?|comes)": "caller, client",
    "whoever": "name the actor",
    "nobody|somebody": "name the actor",
    "desk": "rights",
    "glimpses?": "latest frame",
    "courier": "webhook sender",
    "for want of": "without",
    "(is|are|was|were) let in": "is authorized",
    "earlier life": "previous run",
    "by and by": "later, gradually",
    "the last word": "the final event",
    "hangs? up|hung up": "close the connection",
    "owed|owes": "queued, pending",
    "put aside|puts aside": "move",
}
PATTERN = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)
LOG_LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
SENTENCE_WORDS = 3  # a string literal of so many words is for people, wherever it stands
# Functions whose shorter string arguments users read, too.
OUTPUT = {"echo", "secho", "print", "complain", "confirm", "prompt", "Problem", "not_found", "reply", "HTTPException"}
METRICS = {"Counter", "Gauge", "Histogram", "Summary", "Info", "GaugeMetricFamily", "CounterMetricFamily"}
# Keyword arguments that users read, of any call.
KEYWORDS = {"help", "description", "detail", "short_help", "epilog"}
DECORATORS = {"command", "callback", "get", "post", "put", "patch", "delete"}  # of typer and FastAPI


@dataclass(frozen=True)
class Text:
    """A text that users read."""

    file: str
    line: int
    words: str

    @property
    def findings(self) -> list[str]:
        """One line for each banned word."""
        words = " ".join(self.words.split())
        return [f"{self.file}:{self.line}: {found.group()!r} in {words[:90]!r}" for found in PATTERN.finditer(words)]


def python_texts(name: str, source: str) -> Iterator[Text]:
    tree = ast.parse(source)
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if _has_docstring(node)}  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from _strings(name, node.exc)
        elif isinstance(node, ast.Call):
            yield from _call_texts(name, node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and _is_documented(node):
            yield Text(name, node.body[0].lineno, ast.get_docstring(node, clean=False) or "")
        elif isinstance(node, ast.Constant) and id(node) not in docstrings and _is_sentence(node.value):
            yield Text(name, node.lineno, str(node.value))


def _has_docstring(node: ast.AST) -> bool:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None


def _is_sentence(value: object) -> bool:
    return isinstance(value, str) and len(value.split()) >= SENTENCE_WORDS


def _call_texts(name: str, call: ast.Call) -> Iterator[Text]:
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    is_log = function in LOG_LEVELS and isinstance(owner, ast.Name) and owner.id in ("logger", "log")
    if is_log or function in OUTPUT or function in METRICS or _is_error_init(call):
        for argument in call.args:
            yield from _strings(name, argument)
    for keyword in call.keywords:
        if keyword.arg in KEYWORDS:
            yield from _strings(name, keyword.value)


def _is_error_init(call: ast.Call) -> bool:
    """Whether this is `super().__init__(...)`, by which an exception gets its message."""
    function = call.func
    if (
        not isinstance(function, ast.Attribute)
        or function.attr != "__init__"
        or not isinstance(function.value, ast.Call)
    ):
        return False
    return isinstance(function.value.func, ast.Name) and function.value.func.id == "super"


def _is_documented(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether the docstring is the help of a command, or a description in the OpenAPI document."""
    if isinstance(node, ast.ClassDef):  # pydantic models, and those that extend one
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        return any(base == "BaseModel" or base.endswith(("In", "Out")) for base in bases)
    calls = [one.func for one in node.decorator_list if isinstance(one, ast.Call)]
    return any(isinstance(one, ast.Attribute) and one.attr in DECORATORS for one in calls)


def _strings(name: str, node: ast.AST) -> Iterator[Text]:
    """Every string literal within; the parts of an f-string are one text."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else " … " for part in node.values]
        yield Text(name, node.lineno, "".join(str(part) for part in parts))
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                yield from _strings(name, part.value)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield Text(name, node.lineno, node.value)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _strings(name, child)


def javascript_texts(name: str, source: str) -> Iterator[Text]:
    literals = re.compile(r"//[^\n]*|/\*.*?\*/|(\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)", re.S)
    for found in literals.finditer(source):
        if found.group(1):
            yield Text(name, source.count("\n", 0, found.start()) + 1, found.group(1)[1:-1])


class _HtmlTexts(HTMLParser):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.texts = name, list[Text]()

    def handle_data(self, data: str) -> None:
        self.texts.append(Text(self.name, self.getpos()[0], data))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        read = ("title", "aria-label", "placeholder", "alt", "content")
        self.texts += [Text(self.name, self.getpos()[0], value) for key, value in attrs if key in read and value]


def html_texts(name: str, source: str) -> Iterator[Text]:
    parser = _HtmlTexts(name)
    parser.feed(source)
    yield from parser.texts


def page_texts(name: str, source: str) -> Iterator[Text]:
    """The lines of a page without inline code, which names files and keys."""
    for number, line in enumerate(source.splitlines(), 1):
        yield Text(name, number, re.sub(r"`[^`]*`", "", line))


READERS = {".py": python_texts, ".js": javascript_texts, ".html": html_texts, ".md": page_texts}
CODE = ("monitor", "reference_db", "scripts")
PAGES = (*CODE, "deploy", "tests", ".github")


def sources() -> list[Path]:
    code = [
        path for folder in CODE for path in (REPOSITORY / folder).rglob("*") if path.suffix in (".py", ".js", ".html")
    ]
    pages = [path for folder in PAGES for path in (REPOSITORY / folder).rglob("*.md")]
    return sorted([*code, *pages, *REPOSITORY.glob("*.md")])


def test_users_read_ordinary_words() -> None:
    found = set()
    for path in sources():
        name = str(path.relative_to(REPOSITORY))
        for text in READERS[path.suffix](name, path.read_text(encoding="utf-8")):
            found.update(text.findings)
    assert not found, f"{len(found)} places:\n" + "\n".join(sorted(found))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (".py", 'logger.info("%s was told", name)'),
        (".py", 'raise ConfigError(f"{path} is kept " "elsewhere")'),
        (".py", 'raise Problem(403, "Nobody may use this.") from error'),
        (".py", 'class OneError(Exception):\n    def __init__(self):\n        super().__init__("begun anew")'),
        (".py", '@app.command("x")\ndef x() -> None:\n    """Tells what became of it."""'),
        (".py", '@router.get("/x")\nasync def x() -> None:\n    """For who asks."""'),
        (".py", 'class XOut(BaseModel):\n    """The same, kept."""'),
        (".py", 'typer.Option(False, help="Heeded at once.")'),
        (".py", 'x: int = Field(1, description="For want of more.")'),
        (".py", 'self.x = Counter("x_total", "Copies that were told.", ["channel"])'),
        (".py", 'typer.echo("gone " "on from")'),
        (".py", 'PROBLEM = "the outbox is begun anew"'),
        (".js", "toast(`${name} is told`)"),
        (".js", 'el("p", "Nobody is told yet.")'),
        (".html", "<p>told</p>"),
        (".html", '<a title="told">x</a>'),
        (".md", "It is\nbegun anew."),
    ],
)
def test_a_banned_word_is_found(kind: str, source: str) -> None:
    assert [line for text in READERS[kind]("x", source) for line in text.findings]


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (".py", 'told = {"kept": 1}  # told'),
        (".py", '"""Told."""\ndef told() -> None:\n    """Kept."""'),
        (".js", "// told\nconst told = 1; /* kept */"),
        (".md", "The file `desk.sqlite` holds rights."),
    ],
)
def test_names_and_comments_are_not_judged(kind: str, source: str) -> None:
    assert not [line for text in READERS[kind]("x", source) for line in text.findings]
