"""Reports from records: tables, figures and one page that opens offline.

A report reads the records that runs leave on disk and nothing else, so it can be written again at any time and on
any machine, also while a study is still running.
"""

from .page import write
from .summary import Cell, Summary, summarise
from .tables import rows, table

__all__ = ["Cell", "Summary", "rows", "summarise", "table", "write"]
