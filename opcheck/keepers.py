"""Who keeps calls beyond their records: reproducers and recordings."""

from __future__ import annotations

from typing import Any, Protocol

from opcheck.calls import Call
from opcheck.records import OpRecord

__all__ = ["CallKeeper"]


class CallKeeper(Protocol):
    """Told of every call that is judged."""

    def wants_before(self, call: Call) -> bool:
        """Are all arguments of a large op, which may change them, to be copied before it runs?

        May not raise.
        """

    def judged(self, call: Call, out: Any, record: OpRecord, *, is_open: bool) -> None:
        """A call was judged, and its tensors are still there; may not raise.

        Where it is open its record passes now and may yet become a FAIL.
        """

    def concluded(self, record: OpRecord) -> None:
        """The record of a call is final. May not raise."""
