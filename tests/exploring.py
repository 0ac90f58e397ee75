"""How many examples a property is tried on: a few, the same in every run, or new and many more.

`pytest --hypothesis-profile=explore` draws new ones, ten times as many; the profiles are in
`conftest.py`.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

USUAL = 100
"""The number of examples of hypothesis where nobody says otherwise, which a profile multiplies."""


def examples(number: int, **options: Any) -> settings:
    """Return settings for `number` examples, more in a profile that explores.

    Slow and large examples are no reason to fail: tests are not timed.
    """
    return settings(
        max_examples=number * settings.default.max_examples // USUAL,
        suppress_health_check=list(HealthCheck),
        **options,
    )
