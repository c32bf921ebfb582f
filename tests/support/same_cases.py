"""Hypothesis draws the same cases, whatever else is imported.

It draws some values from the constants in the source of every module that is loaded. So cases would depend on which tests ran
before in the same process, and on every number in the package: a property could fail far away from a change, or by chance.
"""

from __future__ import annotations

from contextlib import suppress


def draw_the_same_cases() -> None:
    """Draw no constants of local modules, where this version of Hypothesis does."""
    with suppress(ImportError, AttributeError):
        from hypothesis.internal.conjecture import providers

        nothing = providers._local_constants
        providers._get_local_constants = lambda: nothing
