"""How an option is declared: once, as a typed field of a class.

    class ShapesOptions(Options):
        check: Annotated[bool, Option("Compare the shapes with a trace of the real model.")] = False

The field has the name, the type and the default; `Option` has the rest. The classes that a command takes are its options: they
are spread over the command line (`cli/build.py`) and over the keywords of the Python API (`api/`), and the function of the
command gets them as filled-in objects. Nothing heavy is imported here: `--help` reads these classes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass
from inspect import get_annotations
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

from typing_extensions import Self, dataclass_transform

from gemmscope.options.values import names, number, size

OWN = "Options"
"""The group of a command's own options."""
GROUPS = (OWN, "Model", "Run", "Parallelism", "Overlap and network", "Recipes", "Measuring", "Output")
"""The groups in the order of `--help`."""

RunFile = Any
"""A run file: its path, or in Python also the result itself."""

Group = TypeVar("Group", bound="Options")


@dataclass(frozen=True)
class Option:
    """What the name, the type and the default of a field do not say about an option."""

    help: str
    default: str = ""
    """The default in words, where the field has none or says it less well."""
    metavar: str = ""
    """How its value is written, with its unit, where the type does not say it."""
    parse: Callable[[Any], Any] | None = None
    """Reads its text, where the type does not say how, and returns other values as they are. Raises a `ValueError` or a
    `UserError`."""
    choices: tuple[str, ...] = ()
    """The values it can have, where the type is no `Literal`: the metavar, and offered by shell completion."""
    names: str = ""
    """Where the names that shell completion offers are: a file of facts, `FILE TABLE`, or a folder with a file for each."""
    flags: tuple[str, ...] = ()
    """Its spellings, where they do not follow from its name."""
    group: str = ""
    """Its group in `--help`, where that is not the `GROUP` of the class that declares it first."""
    after: str = ""
    """The option of its group that it follows, where that is not the one declared before it."""
    keyword: str = ""
    """Its name in Python, where that is another one."""
    accepts: str = ""
    """The type of its keyword in Python, where that is wider than the type of the field."""
    argument: bool = False
    """Written without a flag; `required` if it cannot be left out."""
    required: bool = False
    repeated: bool = False
    """Can be given several times; `parse` gets all its texts."""
    hidden: bool = False
    """Accepted and not shown."""
    in_shell: bool = True
    in_python: bool = True
    in_sweeps: bool = True
    """False: it applies to a single run."""


@dataclass(frozen=True)
class Declared:
    """An option with its name, its type and its default. `group`: where `--help` shows it."""

    name: str
    hint: Any
    default: Any
    option: Option
    group: str

    @property
    def types(self) -> tuple[Any, ...]:
        """The types that its value can have."""
        return () if get_origin(self.hint) is Literal else get_args(self.hint) or (self.hint,)

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it can have; empty if there is no list of them."""
        literals = [hint for hint in (self.hint, *self.types) if get_origin(hint) is Literal]
        return self.option.choices or (get_args(literals[0]) if literals else ())

    @property
    def is_flag(self) -> bool:
        return bool in self.types

    @property
    def metavar(self) -> str:
        """How its value is written; empty if it has none."""
        usual = "" if self.is_flag else "N" if int in self.types else "X" if float in self.types else ""
        return self.option.metavar or "|".join(self.choices) or usual

    @property
    def parse(self) -> Callable[[Any], Any] | None:
        """Reads its text; None if that stays as it is."""
        return self.option.parse or (
            None if self.is_flag else size if int in self.types else number if float in self.types else None
        )

    @property
    def flags(self) -> tuple[str, ...]:
        """Its spellings that are shown: `--tp`, or `--on/--off`."""
        return self.option.flags or (f"--{self.name.replace('_', '-')}",)

    @property
    def keyword(self) -> str:
        """Its name in Python."""
        return self.option.keyword or self.name


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Options:
    """A group of options: a frozen class whose fields are annotated with an `Option`. To type checkers it is a dataclass; at run
    time it generates no code, because `--help` would wait for that."""

    GROUP: ClassVar[str] = OWN

    def __init__(self, **values: Any) -> None:
        if wrong := values.keys() - options_of(type(self)).keys():
            raise TypeError(f"{type(self).__name__} has no option {', '.join(sorted(wrong))}")
        self.__dict__.update(values)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check them against each other; classes that have something to check do."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"options are frozen: {name} stays")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and type(self) is type(other) and self.values() == other.values()

    def values(self) -> dict[str, Any]:
        """The value of every option."""
        return {name: getattr(self, name) for name in options_of(type(self))}

    def but(self, **values: Any) -> Self:
        """These options with other values for some of them."""
        return type(self)(**self.__dict__ | values)

    def given(self) -> dict[str, Any]:
        """The options with values other than their defaults."""
        return {
            name: value for name, declared in options_of(type(self)).items() if (value := getattr(self, name)) != declared.default
        }

    def typed(self) -> list[str]:
        """The options of the command line that were given."""
        return [name for name in self.given() if options_of(type(self))[name].option.in_shell]

    def of_one_run(self) -> list[str]:
        """The options that were given and do not apply to a sweep."""
        return [name for name in self.given() if not options_of(type(self))[name].option.in_sweeps]


def with_defaults(options: Group, **defaults: Any) -> Group:
    """The options with these values where none was given."""
    return options.but(**{name: value for name, value in defaults.items() if getattr(options, name) is None})


def shared(options: "Options", group: type[Group]) -> Group:
    """The options of another class that these ones have, too; defaults for the others."""
    return group(**{name: getattr(options, name) for name in options_of(group) if hasattr(options, name)})


def options_of(*groups: type[Options]) -> dict[str, Declared]:
    """The options of these classes by name, in the order of `--help` within each group."""
    options: dict[str, Declared] = {}
    for owner in (owner for group in groups for owner in _owners(group)):
        for name, hint in get_annotations(owner).items():
            for option in getattr(hint, "__metadata__", ()):
                default = owner.__dict__.get(name, MISSING)
                group = option.group or (options[name].group if name in options else owner.GROUP)
                options[name] = Declared(name, hint.__origin__, default, option, group)
    followers: dict[str, list[str]] = {}
    for name, declared in options.items():
        followers.setdefault(declared.option.after if declared.option.after in options else "", []).append(name)

    def ordered(before: str) -> Iterator[str]:
        for name in followers.get(before, ()):
            yield name
            yield from ordered(name)

    return {name: options[name] for name in ordered("")}


def _owners(group: type[Options]) -> Iterator[type[Options]]:
    """The classes that declare its options: those that it extends first, in their order."""
    for base in group.__bases__:
        if issubclass(base, Options):
            yield from _owners(base)
    yield group


def from_python(group: type[Group], given: Mapping[str, Any]) -> Group:
    """The options from keywords of Python; others are not looked at. Texts are read as on the command line where they can be:
    `sequence_length="8k"`."""
    values = {}
    for name, declared in options_of(group).items():
        if declared.option.in_python and (value := given.get(declared.keyword)) is not None:
            values[name] = read_value(declared, value)
    return group(**values)


def read_value(declared: Declared, value: Any) -> Any:
    """A value as Python gave it; a text that is not a number stays as it is."""
    if declared.parse is not None and (isinstance(value, str) or (declared.option.parse is names and value is not None)):
        with suppress(ValueError):
            return declared.parse(value)
    return value
