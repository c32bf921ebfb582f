"""The table of recorded traces in docs/measured/traces.md is current."""

from __future__ import annotations

from pathlib import Path

from support.explain_files import FIRST_CAUSE, REAL_FIXES, found_in, with_the_fix

DOCS = Path(__file__).parent.parent.parent / "docs" / "measured/traces.md"


def table() -> str:
    lines = []
    for name in FIRST_CAUSE:
        diagnosis = found_in(name)
        first = diagnosis.causes[0] if diagnosis.causes else None
        shown = f"{first.title} | {first.cost_ms / diagnosis.account.step_ms:.0%}" if first else "as expected | "
        lines.append(f"| {name.replace('_', ' ')} | {shown} |")
    return "\n".join(lines)


def test_recorded_traces_in_the_documentation() -> None:
    shown = DOCS.read_text().split("<!-- traces -->\n")[1].split("\n<!-- /traces -->")[0]
    assert shown == table()


def pairs() -> str:
    lines = []
    for before, after, codes in REAL_FIXES:
        (predicted, most, least), real = with_the_fix(before, after, codes)
        span = f"{least:.1f} to {most:.1f}" if most > least else ""
        names = f"{before} | {after}".replace("_", " ")
        lines.append(f"| {names} | {predicted:.1f} | {span} | {real:.1f} | {predicted / real - 1:+.1%} |")
    return "\n".join(lines)


def test_pairs_in_the_documentation() -> None:
    shown = DOCS.read_text().split("<!-- pairs -->\n")[1].split("\n<!-- /pairs -->")[0]
    assert shown == pairs()


def test_every_recorded_trace_is_named() -> None:
    assert min(found_in(name).account.named_share for name in FIRST_CAUSE) >= 0.999
