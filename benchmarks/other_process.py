"""The CPU's kernels as another machine has them: a process with other settings computes the op."""

from __future__ import annotations

import atexit
import io
import os
import subprocess
import sys
from typing import Any

import torch

from benchmarks.subjects import Subject
from opcheck.calls import traits_of
from opcheck.outside import outside_everything
from opcheck.references import Result

__all__ = ["OtherProcess"]

_HEAD = 8


class OtherProcess:
    """Runs calls in a process of its own; a new one where that has ended."""

    def __init__(self, **environment: str) -> None:
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, subject: Subject) -> Result | str:
        """What the kernel gives there, or why there is nothing."""
        arguments: list[Any] = []

        def keep(*args: Any, **kwargs: Any) -> None:
            arguments.extend((args, kwargs))

        subject.run(func=keep)
        process = self._started()
        try:
            _send(process.stdin, (subject.call.traits.name, *arguments))
            answer = _receive(process.stdout)
        except (EOFError, BrokenPipeError):
            self._process = None
            return "the other process ended"
        return answer if isinstance(answer, str) else Result(*answer)

    def close(self) -> None:
        """End it; it ends by itself when the pipe is closed."""
        process, self._process = self._process, None
        if process is not None:
            process.communicate()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.other_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **self._environment},
            )
            atexit.register(self.close)
        return self._process


def _send(pipe: Any, value: Any) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    pipe.write(len(buffer.getvalue()).to_bytes(_HEAD, "little") + buffer.getvalue())
    pipe.flush()


def _receive(pipe: Any) -> Any:
    head = pipe.read(_HEAD)
    if len(head) < _HEAD:
        raise EOFError
    # both ends are this module, and nobody else writes to the pipe
    return torch.load(io.BytesIO(pipe.read(int.from_bytes(head, "little"))), weights_only=False)


def _computed(name: str, args: Any, kwargs: Any) -> Any:
    namespace, base, overload = name.split(".")
    func = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    try:
        with outside_everything():
            out = func(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        return f"refused there: {type(error).__name__}"
    written = [
        value
        for param, value in traits_of(func).bound(args, kwargs)
        if param.mutated and value is not None
    ]
    return out, written


def main() -> None:
    """Answer until the pipe is closed."""
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a kernel prints is no answer
    while True:
        try:
            name, args, kwargs = _receive(sys.stdin.buffer)
        except EOFError:
            return
        _send(pipe, _computed(name, args, kwargs))


if __name__ == "__main__":
    main()
