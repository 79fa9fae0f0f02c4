"""Copywatch: one broadcast's way from socket to alert. Imports nothing of its own: builds read the version here."""

import os

# Set before numpy is imported: our matrix products are small, and OpenBLAS's threads would only spin while they wait.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

__version__ = "0.1.0"  # the only place; pyproject.toml reads it, a test compares the files in deploy/
