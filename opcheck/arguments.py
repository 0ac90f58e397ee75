"""The arguments of the command `opcheck`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opcheck.records import PHASES

__all__ = ["Command", "Commands", "build_parser"]

_STATUS_HELP = "Exit status: 0 PASS, 1 FAIL, 2 usage or unreadable log, 3 INCONCLUSIVE."
_STATUS_OF = {
    "demo": "Exit status: 0 when it ends as it should: in FAIL, with --clean in PASS.",
    "diff": "Exit status: 0 PASS, 1 something fails in B that did not in A, 2 usage or unreadable"
    " log, 3 INCONCLUSIVE.",
    "export": "Exit status: 0 written, 2 usage or unreadable log.",
    "run": "Exit status: that of the script where it is not 0, else 0 PASS, 1 FAIL, 2 usage,"
    " 3 INCONCLUSIVE.",
    "selftest": "Exit status: that of the script where it is not 0, else 0 all planted faults were"
    " found, 1 some were missed, 2 usage, 3 nothing could be planted.",
    "replay": "Exit status: 0 the fault is not there, 1 it is, 2 usage or unreadable file, 3 it"
    " cannot be told.",
}
"""Of the commands whose status says something else than the verdict of a log."""

Command = Callable[[argparse.Namespace], int]
"""From the parsed arguments to the exit status."""


@dataclass(frozen=True, kw_only=True)
class Commands:
    """What each of the commands does."""

    review: Command
    diff: Command
    merge: Command
    export: Command
    demo: Command
    run: Command
    selftest: Command
    replay: Command


def build_parser(commands: Commands) -> argparse.ArgumentParser:
    """The parser of `opcheck`; what it gives has the chosen one of `commands` as `command`."""
    parser = argparse.ArgumentParser(
        prog="opcheck",
        description="Find the PyTorch op that computes a wrong number.",
        epilog=_STATUS_HELP,
        allow_abbrev=False,
    )
    parsers = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_review(parsers, commands.review)
    _add_diff(parsers, commands.diff)
    _add_merge(parsers, commands.merge)
    _add_export(parsers, commands.export)
    _add_demo(parsers, commands.demo)
    _add_run(parsers, "run", commands.run, "Run a script under the checker")
    missed = "Plant faults in a script's step: which are missed?"
    _add_run(parsers, "selftest", commands.selftest, missed)
    _add_replay(parsers, commands.replay)
    return parser


def _parser_of(parsers: Any, name: str, command: Command, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = parsers.add_parser(
        name,
        help=text,
        description=text if text.endswith("?") else f"{text}.",
        epilog=_STATUS_OF.get(name, _STATUS_HELP),
        allow_abbrev=False,
    )
    parser.set_defaults(command=command)
    return parser


def _add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", metavar="GLOB", help="aten.add.*, add and add.Tensor all work")
    parser.add_argument("--module", metavar="GLOB", help="with its children; <root> is the root")
    parser.add_argument("--phase", choices=PHASES, help="calls of this phase")
    parser.add_argument("--step", type=_count, metavar="N", help="calls of this step")
    parser.add_argument("--run", metavar="ID", help="another run of the log than the last")


def _add_review(parsers: Any, command: Command) -> None:
    parser = _parser_of(parsers, "review", command, "What a log says: verdict, culprit, coverage")
    parser.add_argument("log", metavar="LOG", help="a log file or a folder with one")
    _add_filters(parser)
    parser.add_argument(
        "--sort",
        choices=("first", "q", "failed", "checked", "seen", "name"),
        default="first",
        help="order of the ops (default: first divergence first)",
    )
    parser.add_argument("--tree", action="store_true", help="the modules as a tree")
    parser.add_argument(
        "--blame", action="store_true", help="errors born, inherited, amplified; along the step"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="with --blame: a picture (.png, .svg, .pdf) that is not there",
    )
    parser.add_argument("--call", type=_count, metavar="N", help="one call in full")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for a program")
    form.add_argument("--markdown", action="store_true", help="for an issue tracker")


def _add_diff(parsers: Any, command: Command) -> None:
    parser = _parser_of(parsers, "diff", command, "What fails in run B and did not in run A")
    parser.add_argument("a", metavar="A", help="the log of before, or its folder")
    parser.add_argument("b", metavar="B", help="the log of after")
    parser.add_argument("--run-a", metavar="ID", help="another run of A than the last")
    parser.add_argument("--run-b", metavar="ID", help="another run of B than the last")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for a program")
    form.add_argument("--markdown", action="store_true", help="for an issue tracker")


def _add_merge(parsers: Any, command: Command) -> None:
    parser = _parser_of(parsers, "merge", command, "The logs of several ranks as one")
    parser.add_argument("logs", metavar="LOG", nargs="+", help="of one rank each")
    parser.add_argument(
        "-o", "--out", metavar="OUT", required=True, help="a file that is not there"
    )
    parser.add_argument("--run", metavar="ID", help="another run than the last")


def _add_export(parsers: Any, command: Command) -> None:
    parser = _parser_of(parsers, "export", command, "The records of a run for a spreadsheet")
    parser.add_argument("log", metavar="LOG", help="a log file or a folder with one")
    parser.add_argument("--format", choices=("csv",), default="csv", help="default: csv")
    parser.add_argument("-o", "--out", metavar="OUT", help="a file that is not there (else stdout)")
    _add_filters(parser)


def _add_demo(parsers: Any, command: Command) -> None:
    parser = _parser_of(
        parsers, "demo", command, "A model with a planted fault, and how it is found"
    )
    parser.add_argument("--clean", action="store_true", help="without the fault")
    _add_log_dir(parser)


def _add_log_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-dir", metavar="DIR", default="logs", help="folder of the logs (default: logs)"
    )


def _add_run(parsers: Any, name: str, command: Command, text: str) -> None:
    parser = _parser_of(parsers, name, command, text)
    unset = argparse.SUPPRESS
    _add_log_dir(parser)
    parser.add_argument("--rtol", type=float, default=unset, help="of allclose (default: 1e-4)")
    parser.add_argument("--atol", type=float, default=unset, help="of allclose (default: 1e-5)")
    parser.add_argument(
        "--criterion", choices=("calibrated", "allclose"), default=unset,
        help="default: calibrated, unless a tolerance is given",
    )  # fmt: skip
    parser.add_argument(
        "--max-checks", type=_count_or_all, metavar="N|all", default=unset,
        help="checks of each signature (default: 10)",
    )  # fmt: skip
    parser.add_argument(
        "--max-overhead", metavar="SHARE", default=unset,
        help="time for checking beside the step's own, such as 50%% (default: not bounded)",
    )  # fmt: skip
    parser.add_argument(
        "--max-numel", type=_count, metavar="N", default=unset,
        help="elements of the largest tensor that is compared whole (default: 1000000)",
    )  # fmt: skip
    parser.add_argument(
        "--large", choices=("sample", "skip", "full"), default=unset,
        help="what to do with larger ones (default: sample)",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=_count, metavar="N", default=unset,
        help="threads that compute references beside the step (default: 0)",
    )  # fmt: skip
    for name, text in (
        ("--include", "ops to check (repeat for more)"),
        ("--exclude", "ops not to check"),
        ("--modules", "modules to check, with their children"),
    ):
        parser.add_argument(name, action="append", metavar="GLOB", default=unset, help=text)
    parser.add_argument(
        "--start-step", type=_count, metavar="N", default=unset, help="first step (default: 0)"
    )
    parser.add_argument(
        "--num-steps", type=_count, metavar="N", default=unset, help="steps (default: all)"
    )
    for name, text in (
        ("--blame", "tell errors born in a call from inherited ones"),
        ("--repeat", "run kernels twice: do they give the same bits"),
    ):
        parser.add_argument(name, action="store_true", default=unset, help=text)
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument(
        "args", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments"
    )


def _add_replay(parsers: Any, command: Command) -> None:
    text = "Run a reproducer, or judge the calls that another machine recorded"
    parser = _parser_of(parsers, "replay", command, text)
    parser.add_argument(
        "repro", metavar="REPRO", type=Path,
        help="a file of repro_dir=, or a folder of record_dir=",
    )  # fmt: skip
    parser.add_argument("--device", metavar="D", help="where to run the op (default: as recorded)")
    parser.add_argument(
        "--load", metavar="LIB", action="append", default=[],
        help="a module, Python file or shared library that registers kernels (repeat for more)",
    )  # fmt: skip
    parser.add_argument(
        "--pytest", metavar="OUT", type=Path, help="write it as a test, run nothing"
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        msg = f"{value} is negative"
        raise argparse.ArgumentTypeError(msg)
    return value


def _count_or_all(text: str) -> int | None:
    return None if text == "all" else _count(text)
