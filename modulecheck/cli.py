"""The command `modulecheck`: each command imports what it needs when it is called."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from opcheck.commandline import run_command
from opcheck.errors import OpcheckError
from opcheck.printing import visible
from opcheck.records import EXIT_STATUS

__all__ = ["main"]

_STATUS_HELP = "Exit status: 0 PASS, 1 FAIL, 2 usage or unreadable file, 3 INCONCLUSIVE."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    return run_command(_parser(), argv, errors=(OpcheckError, OSError))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="modulecheck",
        description="Compare two implementations of a model, and find where they part.",
        epilog=_STATUS_HELP,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_tensors(commands)
    _add_merge(commands)
    _add_drilldown(commands)
    return parser


# ---- tensors ------------------------------------------------------------------------------------


def _add_tensors(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "tensors",
        help="compare two files that TensorChecker.save() wrote",
        description="Compare the tensors of two files, tag by tag; A is the reference."
        " A file is what TensorChecker.save() wrote, or an .npz of named arrays.",
        epilog=_STATUS_HELP,
    )
    parser.add_argument("a", metavar="A", help="the reference")
    parser.add_argument("b", metavar="B")
    parser.add_argument(
        "--criterion",
        choices=("equal", "allclose", "calibrated"),
        default="equal",
        help="default: equal",
    )
    parser.add_argument("--rtol", type=float, default=1e-5, help="of allclose; default: 1e-5")
    parser.add_argument("--atol", type=float, default=1e-8, help="of allclose; default: 1e-8")
    parser.add_argument("--equal-nan", action="store_true", help="NaN at the same place is equal")
    parser.add_argument(
        "--values-only", action="store_true", help="compare values across dtypes of one kind"
    )
    parser.add_argument("--precision", help="of calibrated: the dtype a side computed in")
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="GLOB", help="leave tags out; repeatable"
    )
    parser.add_argument(
        "--dump-mode",
        choices=("not", "all", "not_equal", "first_not_equal"),
        default="not",
        help="which groups to write as .npy files",
    )
    parser.add_argument("--dump-path", default="tensor_dump", metavar="FOLDER")
    parser.add_argument(
        "--repro-dir",
        metavar="FOLDER",
        help="write what differs first as a Python file that needs torch alone",
    )
    parser.set_defaults(command=_tensors)


def _tensors(chosen: argparse.Namespace) -> int:
    from modulecheck.tensor_dump import DumpMode
    from modulecheck.tensors import TensorChecker

    checker = TensorChecker.load(
        chosen.a, chosen.b, keep="stats", exclude=chosen.exclude, repro_dir=chosen.repro_dir
    )
    checker.check(
        chosen.criterion,
        rtol=chosen.rtol,
        atol=chosen.atol,
        equal_nan=chosen.equal_nan or None,
        check_dtype=False if chosen.values_only else None,
        precision=chosen.precision,
        dump_mode=DumpMode(chosen.dump_mode),
        dump_path=chosen.dump_path,
    )
    result = checker.result
    if result:
        print(result.report())
    return EXIT_STATUS[result.verdict]


# ---- merge --------------------------------------------------------------------------------------


def _add_merge(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "merge",
        help="the CSV reports of several ranks as one",
        description="Write the CSV reports of several ranks and scenarios as one, with the columns"
        " rank and scenario before the others. They come from the file names:"
        " precision_rank0.csv is rank 0 of core, precision_bf16_rank1.csv rank 1 of bf16.",
        epilog=_STATUS_HELP,
    )
    parser.add_argument("reports", metavar="CSV", nargs="+")
    parser.add_argument("-o", "--out", metavar="OUT", required=True, help="is replaced")
    parser.add_argument("--scenario", metavar="NAME", help="of all files, whatever their names")
    parser.add_argument(
        "--rank", action="append", type=int, metavar="N", help="one a file, in their order"
    )
    parser.set_defaults(command=_merge)


def _merge(chosen: argparse.Namespace) -> int:
    from modulecheck.ranks import merge_reports

    merged = merge_reports(chosen.reports, chosen.out, scenario=chosen.scenario, ranks=chosen.rank)
    print("\n".join(merged.lines()))
    print(f"CSV report saved to: {chosen.out}")
    return EXIT_STATUS[merged.verdict]


# ---- drilldown ----------------------------------------------------------------------------------


def _add_drilldown(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "drilldown",
        help="from the failing modules of a saved result to stage, kernel, op and line",
        description="Run the failing calls that PrecisionChecker.save() wrote again, stage by stage"
        " and kernel by kernel, and say where the error is born.",
        epilog="Exit status: 0 nothing is wrong, 1 a culprit was found, 2 usage or unreadable file,"
        " 3 something is wrong and was not reproduced or not reached.",
    )
    parser.add_argument("result", metavar="RESULT", help="what PrecisionChecker.save() wrote")
    parser.add_argument(
        "--model",
        metavar="MODULE:NAME",
        help="the model or a function that builds it, package.module:name or file.py:name; its"
        " weights are not used",
    )
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help="in place of the recorded one; MODULE:NAME where it is a function",
    )
    parser.add_argument(
        "--allow-class",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="objects of this class among the arguments may be made from the file; repeatable",
    )
    parser.add_argument(
        "--budget", type=float, default=300.0, metavar="SECONDS", help="default: 300"
    )
    parser.add_argument("--max-compiles", type=int, default=60, metavar="N", help="default: 60")
    parser.add_argument(
        "--repro-dir",
        default="repro",
        metavar="FOLDER",
        help="where to write a script for each culprit; default: repro, - for none",
    )
    parser.set_defaults(command=_drilldown)


def _drilldown(chosen: argparse.Namespace) -> int:
    from modulecheck.binding import named_object
    from modulecheck.checker import PrecisionChecker
    from modulecheck.drilldown import status_of
    from modulecheck.report import drilldown_lines, outcome
    from modulecheck.results import CompareResult

    result = CompareResult.load(chosen.result)
    backend = chosen.backend
    if backend is not None and ":" in backend:
        backend = named_object(backend, "--backend")
    PrecisionChecker().drilldown(
        result,
        budget_s=chosen.budget,
        max_compiles=chosen.max_compiles,
        repro_dir=None if chosen.repro_dir == "-" else chosen.repro_dir,
        model=None if chosen.model is None else named_object(chosen.model, "--model"),
        backend=backend,
        classes=[named_object(name, "--allow-class") for name in chosen.allow_class],
    )
    for note in [note for note in result.notes if "recorded" in note]:
        print(f"Note: {visible(note)}")
    print("\n".join(drilldown_lines(result)) or f"  nothing to drill into: {outcome(result)}")
    return status_of(result)
