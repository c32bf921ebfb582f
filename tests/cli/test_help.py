"""The help of every command: groups, width, examples that parse; and the same as data for the reference page."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from gemmscope.cli.build import build, function_of, shell_options
from gemmscope.cli.build import every_command as every_help
from gemmscope.cli.help import COMMANDS, CommandHelp, OptionHelp, wrapped
from gemmscope.options.declare import GROUPS, OWN
from support.command import Run, run

__all__ = ["run"]  # the fixture

REFERENCE = {command.name: command for command in every_help()}
every_command = pytest.mark.parametrize("name", COMMANDS)


def options(command: CommandHelp) -> dict[str, OptionHelp]:
    return {option.name: option for group in command.groups for option in group.options}


def parameters(name: str) -> list[Any]:
    command = build(name)
    options: list[Any] = command.get_params(command.make_context(name, [], resilient_parsing=True))
    return options


@every_command
@pytest.mark.parametrize("columns", [80, 200])
def test_lines_fit_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch, name: str, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    outcome = run(f"{name} --help")
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert outcome.out.isascii()  # can be shown on a terminal without UTF-8
    assert outcome.out == run(f"{name} -h").out


@every_command
def test_nothing_is_lost_at_40_columns(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    wide = run(f"{name} --help").out
    monkeypatch.setenv("COLUMNS", "40")
    narrow = run(f"{name} --help").out
    assert sum(len(line) > 40 for line in narrow.splitlines()) <= 2  # only where one option with its value is longer
    assert max(map(len, narrow.splitlines())) <= 50
    joined = ["".join(text.replace("\\\n", " ").split()) for text in (wide, narrow)]
    assert joined[0] == joined[1]


def test_the_program_fits_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = run("--help").out
    assert max(map(len, wide.splitlines())) <= 80
    assert all(f"\n  {name} " in wide for name in COMMANDS)
    monkeypatch.setenv("COLUMNS", "40")
    narrow = run("--help").out
    assert max(map(len, narrow.splitlines())) <= 40
    assert "".join(wide.replace("\\\n", " ").split()) == "".join(narrow.replace("\\\n", " ").split())


@every_command
def test_groups_in_their_order(run: Run, name: str) -> None:
    titles = [group.title for group in REFERENCE[name].groups]
    assert titles == [title for title in GROUPS if title in titles]
    headings = [line for line in run(f"{name} --help").out.splitlines() if line.rstrip(":") in GROUPS]
    assert headings == [f"{title}:" for title in titles]


def test_groups_of_the_large_commands() -> None:
    titles = {name: [group.title for group in REFERENCE[name].groups] for name in COMMANDS}
    assert titles["bench"] == titles["step"] == [OWN, "Model", "Run", "Parallelism", "Recipes", "Measuring", "Output"]
    assert titles["shapes"] == [OWN, "Model", "Run", "Parallelism", "Output"]
    assert titles["calibrate"] == ["Recipes", "Measuring"]
    assert titles["trace-me"] == titles["doctor"] == [OWN]
    assert titles["compare"] == [OWN, "Output"]


@every_command
def test_every_option_is_in_exactly_one_group(name: str) -> None:
    listed = [option.name for group in REFERENCE[name].groups for option in group.options]
    shown = [parameter.name for parameter in parameters(name) if not getattr(parameter, "hidden", False)]
    assert sorted(listed) == sorted(shown)


@every_command
def test_the_first_20_lines_say_what_matters(run: Run, name: str) -> None:
    top = "\n".join(run(f"{name} --help").out.splitlines()[:20])
    assert REFERENCE[name].summary in " ".join(top.split())
    assert wrapped(REFERENCE[name].examples[0])[-1] in top
    first = REFERENCE[name].groups[0]
    assert f"\n{first.title}:\n  {first.options[0].usage}" in top


@every_command
def test_examples_parse(run: Run, name: str) -> None:
    """As they are printed: pasted into a shell, with their backslashes."""
    shown = run(f"{name} --help").out
    for example in REFERENCE[name].examples:
        pasted = "\n".join(wrapped(example))
        assert pasted in shown
        program, command, *arguments = shlex.split(pasted.replace("\\\n", ""))  # as a shell continues a line
        assert (program, command) == ("gemmscope", name)
        build(name).make_context(name, arguments)  # raises an error for an unknown option or an invalid value


@every_command
def test_options_of_the_table_are_as_typer_has_them(name: str) -> None:
    known = options(REFERENCE[name])
    for parameter in parameters(name):
        if parameter.name not in known or parameter.name == "help":
            continue
        option = known[parameter.name]
        assert {*option.flags, *option.negative} <= {*parameter.opts, *parameter.secondary_opts}
        assert bool(option.metavar) is not bool(getattr(parameter, "is_flag", False))
        declared = shell_options(function_of(name))[parameter.name]
        if declared.option.default and parameter.default is not None and declared.parse is not None:
            assert declared.parse(option.default) == pytest.approx(parameter.default)  # help text and code must agree


@every_command
def test_exit_codes_end_the_help(run: Run, name: str) -> None:
    codes = dict(REFERENCE[name].exit_codes)
    assert {0, 2, 130} <= codes.keys()
    end = run(f"{name} --help").out.rpartition("Exit codes:")[2]
    assert all(f"  {code} " in end for code in codes)


def test_aliases_work_and_are_not_shown(run: Run) -> None:
    assert "--longest" not in run("bench --help").out
    context = build("bench").make_context("bench", ["--longest", "7"])
    assert context.params["time_limit"] == 7


def test_options_that_do_not_apply_are_not_shown() -> None:
    assert "device" not in options(REFERENCE["calibrate"])
    assert "verify_dgrad" not in options(REFERENCE["bench"])
