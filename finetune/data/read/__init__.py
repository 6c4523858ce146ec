"""Reading users' rows: files of any format, records of any shape, one canonical row or a reject with its reason."""

from finetune.data.read.files import SourceFile, source_files
from finetune.data.read.lines import Range
from finetune.data.read.record import Reject
from finetune.data.read.source import check_one_use, check_reject_rate, iter_rows, split_ranges

__all__ = [
    "Range",
    "Reject",
    "SourceFile",
    "check_one_use",
    "check_reject_rate",
    "iter_rows",
    "source_files",
    "split_ranges",
]
