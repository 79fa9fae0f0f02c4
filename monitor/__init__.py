"""Copywatch: one broadcast's way from socket to alert."""

import os

# Before numpy is imported: the products here are small, and the threads that it would share them with wait by spinning.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

__version__ = "0.1.0"
