"""The line of the user's code that a call comes from."""

from __future__ import annotations

import os
from pathlib import Path
from types import CodeType, FrameType

import torch

__all__ = ["TORCH_FOLDER", "find_user_frame", "spell_line"]


def _folder(file: str) -> str:
    """With a separator at the end: `torchvision` begins like `torch`, and is the user's."""
    return f"{Path(file).parent}{os.sep}"


TORCH_FOLDER = _folder(torch.__file__)
"""Of torch's own code."""
_OWN = Path(__file__).parent
_NOT_USER = (
    TORCH_FOLDER,
    _folder(__file__),
    f"{_OWN.parent / 'modulecheck'}{os.sep}",
    "<frozen ",
)
_USER = str(_OWN / "demo.py")
"""The demo is a user's script, though it lies beside us."""


def find_user_frame(frame: FrameType | None, known: dict[str, bool]) -> FrameType | None:
    """The innermost frame that is neither torch's nor ours; `known` keeps files looked up."""
    while frame is not None:
        name = frame.f_code.co_filename  # not the code: equal code of two files is equal
        is_user = known.get(name)
        if is_user is None:
            is_user = known[name] = name == _USER or not name.startswith(_NOT_USER)
        if is_user:
            return frame
        frame = frame.f_back
    return None


def spell_line(code: CodeType, line: int) -> str:
    """`model.py:41 in forward`."""
    return f"{Path(code.co_filename).name}:{line} in {code.co_name}"
