"""One self-contained HTML page from run data: the answer, the command, why, the evidence, the method, the data."""

from labkit.report.build import Notice, build_report, report_file_name, write_report

__all__ = ["Notice", "build_report", "report_file_name", "write_report"]
