"""HTML pages and plots from run folders."""

from finetune.report.page import render_page, write_report

__all__ = ["render_page", "write_report"]
