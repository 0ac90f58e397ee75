"""`opcheck run SCRIPT`: an unmodified script under the checker."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opcheck.errors import ArgumentError
from opcheck.records import EXIT_STATUS
from opcheck.session import check

__all__ = ["run_script"]


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
    path = Path(script)
    if not path.is_file():
        raise ArgumentError(f"script: no such file: {script!r}")
    session = check(**options)
    with _as_main(path, args), session:
        status = _run(path)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.stdout.write(session.report() + "\n")
    return status or EXIT_STATUS[session.verdict]


def _run(path: Path) -> int:
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as stop:
        return _status(stop.code)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # noqa: BLE001 - shown as Python itself would, then reported on
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename != str(path):
            own = own.tb_next
        traceback.print_exception(type(error), error, own or error.__traceback__)
        return 1
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
