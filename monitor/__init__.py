"""Copywatch: one broadcast's way from socket to alert."""

__version__ = "0.1.0"
