"""Completions are shown by every logger that takes text or tables, and on the console."""

from __future__ import annotations

from types import SimpleNamespace

from nopad.trainer.evaluation import Report
from nopad.trainer.evaluation.eval_report import TableRow
from nopad.trainer.evaluation.report_writer import ReportWriter, table_logger


def test_tables_go_to_whatever_takes_text_or_tables(capsys):
    shown = []

    class Board:
        def add_text(self, tag, text, step):
            shown.append((tag, text.splitlines()[-1], step))

    class Tables:
        def log_table(self, name, columns, data, step):
            shown.append((name, columns, data, step))

    row = TableRow("2+2=", "4", "4", {"exact": 1.0})
    report = Report(3, {"eval/sums/exact": 1.0}, [row], name="sums")
    ReportWriter(console=True).write(report, [Board(), Tables(), None])
    assert shown[0] == ("eval/sums/samples", "| 2+2= | 4 | 4 | 1.0 |", 3)
    assert shown[1][0] == "eval/sums/samples" and shown[1][2:] == ([["2+2=", "4", "4", 1.0]], 3)
    said = capsys.readouterr().out
    assert said == "after 3 steps, sums: exact 1\n  '2+2=' -> '4'\n"


def test_samples_that_nobody_takes_are_told_of_once(caplog):
    writer = ReportWriter()
    for _ in range(2):
        writer.write(Report(3, rows=[TableRow("a", "b", "c")]), [None, object()])
    assert caplog.text.count("are not shown") == 1
    assert "GenerationEval(output=" in caplog.text and "nopad_eval_output" in caplog.text


def test_samples_that_are_in_a_file_need_no_logger(caplog):
    ReportWriter().write(Report(3, rows=[TableRow("a", "b", "c")], is_saved=True), [])
    assert caplog.text == ""


def test_tables_of_other_arguments_inside_a_logger_are_left_alone():
    class Client:  # mlflow's and Comet's are of this kind
        def log_table(self, run_id, data, artifact_file):
            raise AssertionError("called")

    class Board:
        def add_text(self, tag, text, step):
            shown.append(tag)

    shown: list[str] = []
    report = Report(1, {"eval/m": 1.0}, [TableRow("a", "b", "c")])
    inside = [SimpleNamespace(experiment=thing) for thing in (Client(), Board(), None)]
    loggers = [table_logger(logger, "experiment") for logger in [*inside, object()]]
    ReportWriter().write(report, loggers)
    assert shown == ["eval/samples"]
