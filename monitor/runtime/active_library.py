"""The references that the running channels are matched with, and the rules for their alerts."""

from __future__ import annotations

from monitor.rights.rules import NO_RULES, Rules
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import Reference, ReferenceId


class ActiveLibrary:
    """The index in use and the rules in force; each is replaced as a whole when it changes."""

    def __init__(self, index: ReferenceIndex, rules: Rules = NO_RULES) -> None:
        self.rules = rules
        self.retracted_open: dict[str, frozenset[str]] = {}  # by channel, retracted alerts of open segments
        self._known: dict[ReferenceId, Reference] = {}
        self.replace(index)

    def replace(self, index: ReferenceIndex) -> None:
        """Switches to a new generation of the index; open alerts may still name a reference that it lacks."""
        self.index = index
        self._known |= {reference.id: reference for reference in index.references}

    def reference(self, reference: ReferenceId) -> Reference:
        return self._known[reference]
