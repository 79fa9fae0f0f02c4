"""Errors of the library of references.

CatalogError
├── MediaError         a file or stream that cannot be decoded
├── EncoderMismatch    features made by another encoder
├── DamagedReference   bytes on disk are not those that were written
├── ReferenceExists    the id is taken by other content
├── UnknownReference   no reference has this id
└── CatalogLocked      another process is writing to this directory
"""


class CatalogError(Exception):
    """The root; its message is one sentence that says what to do."""


class MediaError(CatalogError):
    """A file or stream that cannot be decoded."""


class EncoderMismatch(CatalogError):
    """Features made by another encoder than the one in use."""


class DamagedReference(CatalogError):
    """Bytes on disk are not those that were written."""


class ReferenceExists(CatalogError):
    """The id is taken by other content."""


class UnknownReference(CatalogError):
    """No reference has this id."""


class CatalogLocked(CatalogError):
    """Another process is writing to this directory."""
