"""Reports of studies: tables, figures and one page that opens offline.

A report is made only from the records in a folder, so it can be written again at any time, on any machine, and while a
study is running.
"""

from .page import write
from .summary import summarise, summarise_tasks
from .tables import rows, table

__all__ = ["rows", "summarise", "summarise_tasks", "table", "write"]
