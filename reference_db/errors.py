"""Errors of the library of references.

CatalogError
├── MediaError         a file or stream that cannot be decoded
├── EncoderMismatch    features made by another encoder
├── DamagedReference   bytes on disk are not those that were written
├── NotAReference      a file to import that is no export, or not a whole one
├── ReferenceExists    the id is taken by other content
├── UnknownReference   no reference has this id
└── StorageError       the library as a whole cannot be used: disk, permissions, catalogue
    └── CatalogLocked  another process is writing to this directory
"""


class CatalogError(Exception):
    """The root; its message is one sentence that says what to do."""


class MediaError(CatalogError):
    """A file or stream that cannot be decoded."""


class EncoderMismatch(CatalogError):
    """Features made by another encoder than the one in use."""


class DamagedReference(CatalogError):
    """Bytes on disk are not those that were written; `what` says which."""

    def __init__(self, id: str, what: str) -> None:
        self.what = what
        again = f"run `copywatch refs add FILE` with its video again, or `copywatch refs rm {id}`"
        super().__init__(f"Reference {id} is damaged: {what}; {again}.")


class NotAReference(CatalogError):
    """A file to import that is no export of Copywatch, or not a whole one."""


class ReferenceExists(CatalogError):
    """The id is taken by other content."""


class UnknownReference(CatalogError):
    """No reference has this id."""


class StorageError(CatalogError):
    """The library as a whole cannot be used; going on to the next video would fail alike."""


class CatalogLocked(StorageError):
    """Another process is writing to this directory."""
