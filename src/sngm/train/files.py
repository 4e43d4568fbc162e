"""The files of runs are written as all others are."""

from ..files import finite, locked, read_json, write_atomically, write_json

__all__ = ["finite", "locked", "read_json", "write_atomically", "write_json"]
