"""What the commands of both packages have in common: exit status, closed pipes, odd characters."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from opcheck.errors import OpcheckError
from opcheck.printing import style_for

__all__ = ["EXIT_USAGE", "run_command"]

EXIT_USAGE = 2


def run_command(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    *,
    errors: tuple[type[Exception], ...] = (OpcheckError,),
) -> int:
    """Parse the arguments and run the command that they choose.

    Args:
        parser: each of its commands sets `command`, a function from the parsed arguments to the
            exit status.
        argv: None for those of the process.
        errors: what is shown as one line, with the exit status of wrong usage.

    Returns:
        The exit status.
    """
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    try:
        chosen = parser.parse_args(argv)
    except SystemExit as leave:  # argparse has printed help or usage
        return leave.code if isinstance(leave.code, int) else EXIT_USAGE
    command: Callable[[argparse.Namespace], int] = chosen.command
    try:
        status = command(chosen)
        sys.stdout.flush()
    except BrokenPipeError:  # `opcheck review LOG | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except errors as error:
        print(f"{parser.prog}: {style_for(sys.stderr).text(error, 2000)}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
    return status
