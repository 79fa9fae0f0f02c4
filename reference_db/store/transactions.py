"""One transaction of SQLite, in which other threads go on.

apsw's own `with connection` holds Python's global lock while the disk syncs: on a slow disk every other thread, the
event loop among them, stands still for as long.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import apsw


@contextmanager
def transaction(db: apsw.Connection) -> Iterator[apsw.Connection]:
    """All of what is done inside, on disk when it ends, or nothing of it."""
    db.execute("BEGIN")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        with suppress(apsw.Error):  # the first error is the one to tell
            if db.in_transaction:
                db.execute("ROLLBACK")
        raise
