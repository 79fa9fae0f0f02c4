"""Errors of the reference library.

CatalogError
├── MediaError         a file or stream that cannot be decoded
├── EncoderMismatch    features of another encoder
├── DamagedReference   bytes on disk do not match their hash
├── NotAReference      a file to import that is not an export, or is damaged
├── ReferenceExists    another video has this id
├── UnknownReference   no reference has this id
└── StorageError       the library cannot be used: disk, permissions, catalogue
    └── CatalogLocked  another process is writing to this directory
"""


class CatalogError(Exception):
    """The base class; its message is one sentence with the remedy."""


class MediaError(CatalogError):
    """A file or stream that cannot be decoded."""


class EncoderMismatch(CatalogError):
    """Features of another encoder than the one in use."""


class DamagedReference(CatalogError):
    """Bytes on disk do not match their hash; `what` says which."""

    def __init__(self, id: str, what: str) -> None:
        self.what = what
        remedy = f"run `copywatch refs add FILE` with its video again, or `copywatch refs rm {id}`"
        super().__init__(f"Reference {id} is damaged: {what}; {remedy}.")


class NotAReference(CatalogError):
    """A file to import that is not a Copywatch export, or is damaged."""


class ReferenceExists(CatalogError):
    """Another video has this id."""


class UnknownReference(CatalogError):
    """No reference has this id."""


class StorageError(CatalogError):
    """The library cannot be used; the next video would fail as well."""


class CatalogLocked(StorageError):
    """Another process is writing to this directory."""
