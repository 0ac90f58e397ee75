"""`opcheck run SCRIPT`: an unmodified script under the checker."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opcheck.checking import check
from opcheck.errors import ArgumentError
from opcheck.records import EXIT_STATUS, Verdict
from opcheck.session import Session

__all__ = ["run_script", "selftest_script"]


def selftest_script(script: str, args: Sequence[str], options: dict[str, Any]) -> int:
    """Run a script with known faults planted into copies of its results, and print what is missed.

    Returns:
        The script's own exit status when it is not 0, else 0: every planted fault was found, 1:
        some were missed, 3: none could be planted.

    Raises:
        ArgumentError: there is no such file.
    """
    status, session = _checked(script, args, {**options, "selftest": True})
    result = session.selftest()
    sys.stdout.write(f"{result}\n")
    found = Verdict.PASS if result.all_found else Verdict.FAIL
    return status or EXIT_STATUS[found if result.num_planted else Verdict.INCONCLUSIVE]


def run_script(script: str, args: Sequence[str], options: dict[str, Any]) -> int:
    """Run a script as `python SCRIPT ARGS...` would, checked from its first line to its last.

    Args:
        script: path of the script.
        args: its command line.
        options: keyword arguments of `opcheck.check`.

    Returns:
        The script's own exit status when it is not 0, else 0 PASS, 1 FAIL, 3 INCONCLUSIVE.

    Raises:
        ArgumentError: there is no such file.
    """
    status, session = _checked(script, args, options)
    sys.stdout.write(session.report() + "\n")
    return status or EXIT_STATUS[session.verdict]


def _checked(script: str, args: Sequence[str], options: dict[str, Any]) -> tuple[int, Session]:
    path = Path(script)
    if not path.is_file():
        raise ArgumentError(f"script: no such file: {script!r}")
    session = check(**options)
    status = 1
    try:
        with _as_main(path, args), session:
            status = _run(path)
    except KeyboardInterrupt:
        status = 130
    except BaseException as error:  # noqa: BLE001 - shown as Python itself would, then reported on
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename != str(path):
            own = own.tb_next
        traceback.print_exception(type(error), error, own or error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    return status, session


def _run(path: Path) -> int:
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as stop:
        return _status(stop.code)
    return 0


def _status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    sys.stderr.write(f"{code}\n")
    return 1


@contextmanager
def _as_main(path: Path, args: Sequence[str]) -> Iterator[None]:
    argv, folder = sys.argv, str(path.resolve().parent)
    sys.argv = [str(path), *args]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = argv
        if folder in sys.path:
            sys.path.remove(folder)
