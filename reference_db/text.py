"""Text of users that is printed in terminals, logs, tables and pages: which characters it may not have."""

import re

# Control characters (with C1: U+009B starts an escape sequence on some terminals), line breaks, marks that change the
# writing direction, and lone surrogates. One pattern for titles, notes, addresses and names.
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def is_printable(text: str) -> bool:
    """Whether a terminal, a log or a page shows the text as it is."""
    return not UNPRINTABLE.search(text)


def printable(text: str) -> str:
    """The text with each unprintable character replaced."""
    return UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)
