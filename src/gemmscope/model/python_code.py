"""Follows Python code without running it: what a function, and the functions that it calls, set.

Recipes of training frameworks are Python: functions that build objects and assign their attributes, with helpers in other files
of the same tree. `Follower` walks through their syntax trees, in the order in which Python runs them. An object is a `Record`:
its attributes, and, where others cannot be known, why (`hidden`). So is the result of everything that is not followed: a function
of a package that is not here, a method, a lambda. What is set under a condition that is not known is hidden too, not guessed.

Files are found where Python finds them: beside the first file, in the packages around it, and those of the frameworks also on
Python's path. They are only read.
"""

import ast
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

from gemmscope.errors import UserError
from gemmscope.model.python_values import (
    LARGEST_NUMBER,
    LONGEST_VALUE,
    Code,
    Frame,
    Function,
    Import,
    Module,
    Record,
    copied,
    is_bounded,
    is_plain,
    repeats_too_often,
)

LONGEST_FILE = 200_000  # characters; real ones are far shorter
MOST_STEPS, MOST_FILES, DEEPEST = 50_000, 200, 30
ON_PATH = ("megatron", "torchtitan")  # packages that are also looked up on Python's path
CONDITION = "it depends on a condition that the file does not decide"


class _Return(Exception):  # noqa: N818 - not an error
    """Ends a function that is followed."""

    def __init__(self, value: object) -> None:
        self.value = value


Known = Callable[[str, object, Sequence[object], Mapping[str, object]], Record | None]
"""What a call makes that is known without its code: of the name of the function, its object, positional and keyword arguments."""

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitOr: operator.or_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda item, items: item in items, ast.NotIn: lambda item, items: item not in items,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
BUILTINS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        len,
        max,
        min,
        int,
        str,
        float,
        bool,
        list,
        tuple,
        dict,
        set,
        abs,
        divmod,
        sum,
        enumerate,
        zip,
        sorted,
        range,
    )
}
METHODS = {
    str: ("lower", "upper", "strip", "split", "join", "startswith", "endswith"),
    list: ("append", "extend", "copy"),
    dict: ("get", "keys", "items", "values", "update", "copy"),
}
COLLECT = ("list", "tuple", "len", "zip", "enumerate", "copy", "get", "keys", "items", "values")
CHANGING = ("append", "extend", "update")
COPIES = ("deepcopy", "copy", "replace")
COMPUTED = "the recipe computes it"


class Follower:
    """Follows the code of one file and of those that it imports."""

    def __init__(self, path: Path | None, known: Known) -> None:
        self.path = path.absolute() if path is not None else None
        self.known = known
        self.files: dict[Path, Module] = {}
        self.not_followed: list[tuple[str, Record]] = []  # calls, and an object that each of them gets
        self.steps = self.depth = self.branches = 0

    def read(self, text: str, path: Path | None = None) -> Module:
        """The names that a file defines."""
        if len(text) > LONGEST_FILE:
            raise UserError("the recipe is too long", f"recipes can have up to {LONGEST_FILE} characters")
        module = Module(path or self.path)
        name, branches, self.branches = f"the Python{f' of {path.name}' if path else ''} is not valid", self.branches, 0
        if path is not None:
            self.files[path] = module
        try:
            self._run(ast.parse(text).body, Frame(module, module.names))
        except _Return:
            pass
        except SyntaxError as error:
            raise UserError(f"{name}, line {error.lineno}: {error.msg}", "correct that line") from None
        except (ValueError, MemoryError, RecursionError):
            raise UserError(f"{name}: nested too deeply, or with a character that is not text", "simplify it") from None
        self.branches = branches
        return module

    def variables(self, code: Code) -> tuple[object, dict[str, object]]:
        """What a function without arguments returns, and its variables."""
        try:
            return self._call(code, (), {})
        except RecursionError:
            raise UserError("the recipe is nested too deeply", "simplify it") from None

    # ---- files

    def resolve(self, value: object) -> object:
        """The value of an imported name."""
        for _ in range(DEEPEST):
            if not isinstance(value, Import) or not value.name:
                return value
            module_of_it = self._module(value.importer, value.module)
            if module_of_it is None:
                return Record(value.name, hidden=f"{value.name} of {value.module}, which is not in this folder", imported=True)
            inner = self._lookup(module_of_it, value.name)
            submodule = Import(
                value.importer,
                f"{value.module.rstrip('.')}.{value.name}" if value.module.strip(".") else value.module + value.name,
            )
            if inner is None and self._module(submodule.importer, submodule.module) is None:
                return Record(value.name, hidden=f"{value.name} of {value.module}, which does not define it", imported=True)
            value = submodule if inner is None else inner
        return Record("import", hidden="an import that goes round in circles")

    def _lookup(self, module: Module, name: str) -> object:
        if name in module.names:
            return module.names[name]
        for star in module.stars:
            module_of_it = self._module(star.importer, star.module)
            if module_of_it is not None and module_of_it is not module and name in module_of_it.names:
                return module_of_it.names[name]
        return None

    def _module(self, importer: Module, name: str) -> Module | None:
        """The module of a name, read at its first use; None where there is no such file."""
        place = self._place(importer, name)
        if place is None:
            return None
        if place not in self.files:
            if len(self.files) >= MOST_FILES:
                raise UserError(f"the recipe imports more than {MOST_FILES} files", "give a file that imports fewer")
            try:
                with place.open(encoding="utf-8") if place.suffix == ".py" else StringIO() as file:
                    text = file.read(LONGEST_FILE + 1)
            except (OSError, UnicodeDecodeError):
                return None
            self.read(text, place)
        return self.files[place]

    def _place(self, importer: Module, name: str) -> Path | None:
        """The file of a module, or the folder of a package without __init__.py."""
        if importer.path is None or self.path is None:
            return None
        steps = name.lstrip(".").split(".")
        level = len(name) - len(name.lstrip("."))
        parts = importer.path.parts
        if level:
            roots = [Path(*parts[:-level])]
        else:
            around = [Path(*parts[:index]) for index in range(len(parts) - 1, 0, -1) if parts[index] == steps[0]]
            roots = [self.path.parent, *around, *(map(Path, sys.path) if steps[0] in ON_PATH else ())]
        for root in roots:
            place = root.joinpath(*filter(None, steps))
            for file in (place.with_suffix(".py") if place.suffix == "" else place, place / "__init__.py", place):
                if file.is_file() or (file == place and file.is_dir()):
                    return file
        return None

    # ---- statements

    def _run(self, body: Sequence[ast.stmt], frame: Frame) -> None:
        for node in body:
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise UserError("the recipe takes too many steps to follow", "give a file that does less")
            self._statement(node, frame)

    def _statement(self, node: ast.stmt, frame: Frame) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                frame.names[node.name] = Code(node, frame.module, {} if frame.names is frame.module.names else frame.names)
            case ast.Import() | ast.ImportFrom():
                self._import(node, frame)
            case ast.Assign(targets, value):
                result = self._value(value, frame)
                for target in targets:
                    self._assign(target, result, frame)
            case ast.AnnAssign(target, _, ast.expr() as value):
                self._assign(target, self._value(value, frame), frame)
            case ast.AugAssign(target, kind, value):
                combined = self._combined(node, kind, self._value(target, frame), self._value(value, frame))
                self._assign(target, combined, frame)
            case ast.Expr(value):
                self._value(value, frame)
            case ast.Return(value):
                result = self._value(value, frame) if value is not None else None
                if self.branches == frame.branches:
                    raise _Return(result)
                frame.uncertain = True
            case ast.Raise():
                if self.branches == frame.branches:
                    raise _Return(Record(_written(node), hidden="the code ends with an error"))
            case ast.If(test, body, otherwise):
                truth = self._truth(self._value(test, frame))
                if truth is None:
                    self._in_branch(body, frame)
                    self._in_branch(otherwise, frame)
                else:
                    self._run(body if truth else otherwise, frame)
            case ast.For():
                self._loop(node, frame)
            case ast.With(_, body) | ast.AsyncWith(_, body):
                self._run(body, frame)
            case ast.Try():
                self._run([*node.body, *node.orelse], frame)
                for handler in node.handlers:
                    self._in_branch(handler.body, frame)
                self._run(node.finalbody, frame)
            case ast.Global(names) | ast.Nonlocal(names):
                frame.module.names.update({name: Record(name, hidden="a function sets it") for name in names})
            case _:  # while, match
                for part in getattr(node, "cases", [node]):
                    self._in_branch([*getattr(part, "body", ()), *getattr(part, "orelse", ())], frame)

    def _in_branch(self, body: Sequence[ast.stmt], frame: Frame) -> None:
        """Follow statements that may not run."""
        self.branches += 1
        self._run(body, frame)
        self.branches -= not (frame.uncertain and self.branches == frame.branches + 1)  # what follows may not run either

    def _loop(self, node: ast.For, frame: Frame) -> None:
        items = self._value(node.iter, frame)
        jumps = any(isinstance(part, (ast.Break, ast.Continue)) for part in ast.walk(node))
        if jumps or not isinstance(items, (list, tuple, range, dict)):
            self._in_branch([*node.body, *node.orelse], frame)
            return
        for item in items:
            self._assign(node.target, item, frame)
            self._run(node.body, frame)
        self._run(node.orelse, frame)

    def _import(self, node: ast.Import | ast.ImportFrom, frame: Frame) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                name = alias.name if alias.asname else alias.name.split(".")[0]
                frame.names[alias.asname or name] = Import(frame.module, name)
                continue
            module = "." * node.level + (node.module or "")
            if alias.name == "*":
                frame.module.stars.append(Import(frame.module, module))
            else:
                frame.names[alias.asname or alias.name] = Import(frame.module, module, alias.name)

    def _assign(self, target: ast.expr, value: object, frame: Frame) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            items = value if isinstance(value, (list, tuple)) and len(value) == len(target.elts) else None
            for index, part in enumerate(target.elts):
                hidden = Record(f"{_written(target)}[{index}]", hidden=value.hidden if isinstance(value, Record) else "")
                self._assign(part, items[index] if items is not None else hidden, frame)
            return
        match target:
            case ast.Name(name):
                self._put(frame.names, name, value, self.branches > frame.branches)
            case ast.Attribute(owner, name):
                if isinstance(holder := self._value(owner, frame), Record):
                    self._put(holder.values, name, value, self.branches > 0)
            case ast.Subscript(owner, place):
                match self._value(owner, frame), self._value(place, frame):
                    case dict() as holder, str() | int() as key:
                        self._put(holder, key, value, self.branches > 0)
                    case list() as holder, _:
                        holder[:] = [Record(_written(target), hidden="the code sets an item of the list")]

    def _put(self, names: dict[Any, object], name: object, value: object, uncertain: bool) -> None:
        same = name in names and is_plain(value) and is_plain(names[name]) and names[name] == value
        names[name] = Record(str(name), hidden=CONDITION) if uncertain and not same else value

    # ---- expressions

    def _value(self, node: ast.expr, frame: Frame) -> object:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name(name):
                value = frame.names[name] if name in frame.names else self._lookup(frame.module, name)
                exists = name in frame.names or name in frame.module.names or value is not None
                return self.resolve(value) if exists else Record(name, hidden="the file does not define it")
            case ast.Attribute(owner, name):
                match self._value(owner, frame):
                    case Record() as holder:
                        return holder.get(name)
                    case Import(importer, module):
                        return self.resolve(Import(importer, module, name))
            case ast.Call():
                return self._called(node, frame)
            case ast.List(elements) | ast.Tuple(elements) | ast.Set(elements):
                items = [self._value(item, frame) for item in elements]
                if is_bounded(items) and not any(isinstance(item, ast.Starred) for item in elements):
                    return tuple(items) if isinstance(node, ast.Tuple) else items
            case ast.NamedExpr(target, inner):
                self._assign(target, value := self._value(inner, frame), frame)
                return value
            case ast.Dict():
                return self._dictionary(node, frame)
            case ast.BinOp(left, kind, right) | ast.Compare(left, [kind], [right]):
                return self._combined(node, kind, self._value(left, frame), self._value(right, frame))
            case ast.BoolOp():
                return self._either(node, frame)
            case ast.UnaryOp(ast.Not(), operand):
                if (truth := self._truth(self._value(operand, frame))) is not None:
                    return not truth
            case ast.UnaryOp(ast.USub(), operand):
                if isinstance(number := self._value(operand, frame), (int, float)):
                    return -number
            case ast.IfExp(test, body, otherwise):
                if (truth := self._truth(self._value(test, frame))) is not None:
                    return self._value(body if truth else otherwise, frame)
            case ast.Subscript():
                return self._item(node, frame)
            case ast.JoinedStr():
                return self._text(node, frame)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp() if len(node.generators) == 1:
                return self._comprehension(node, frame)
        return Record(_written(node), hidden=COMPUTED)

    def _dictionary(self, node: ast.Dict, frame: Frame) -> object:
        result: dict[object, object] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            item = self._value(value, frame)
            name = self._value(key, frame) if key is not None else None
            if key is None and isinstance(item, dict):
                result.update(item)
            elif is_plain(name) and key is not None and not isinstance(name, (list, dict, set)):
                result[name] = item
            else:
                return Record(_written(node), hidden=COMPUTED)
        return result if is_bounded(result) else Record(_written(node), hidden=COMPUTED)

    def _combined(self, node: ast.AST, kind: ast.AST, left: object, right: object) -> object:
        hidden = Record(_written(node), hidden=COMPUTED)
        function = OPERATORS.get(type(kind))
        if isinstance(kind, (ast.Is, ast.IsNot)) and (left is None or right is None):
            certain = all(value.constructed or not value.hidden for value in (left, right) if isinstance(value, Record))
            return (left is right) == isinstance(kind, ast.Is) if certain else hidden
        both = isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)) and isinstance(kind, ast.Add)
        if function is None or not (both or (is_plain(left) and is_plain(right))):
            return hidden
        if (isinstance(kind, ast.Mult) and repeats_too_often(left, right)) or (
            isinstance(kind, ast.Mod) and isinstance(left, str)
        ):
            return hidden
        try:
            result = function(left, right)
        except (TypeError, ValueError, ArithmeticError):
            return hidden
        return result if is_bounded(result) else hidden

    def _either(self, node: ast.BoolOp, frame: Frame) -> object:
        """The value of `and` or `or`: the first one that decides it."""
        value: object = None
        for part in node.values:
            value = self._value(part, frame)
            truth = self._truth(value)
            if truth is None:
                return Record(_written(node), hidden=COMPUTED)
            if truth is isinstance(node.op, ast.Or):
                return value
        return value

    def _item(self, node: ast.Subscript, frame: Frame) -> object:
        holder = self._value(node.value, frame)
        place: Any = self._value(node.slice, frame)
        if isinstance(node.slice, ast.Slice):
            place = slice(*(self._value(end, frame) if end is not None else None for end in (node.slice.lower, node.slice.upper)))
        if isinstance(holder, (list, tuple, str, dict)) and getattr(node.slice, "step", None) is None:
            with suppress(LookupError, TypeError):
                return holder[place]
        return Record(_written(node), hidden=COMPUTED)

    def _text(self, node: ast.JoinedStr, frame: Frame) -> object:
        parts = [self._value(part.value if isinstance(part, ast.FormattedValue) else part, frame) for part in node.values]
        plain = all(isinstance(part, (str, int)) for part in parts) and all(
            part.format_spec is None for part in node.values if isinstance(part, ast.FormattedValue)
        )
        return "".join(map(str, parts)) if plain else Record(_written(node), hidden=COMPUTED)

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp, frame: Frame) -> object:
        part = node.generators[0]
        items, result = self._value(part.iter, frame), list[list[Any]]()
        inner = Frame(frame.module, dict(frame.names), self.branches)
        if not isinstance(items, (list, tuple, range, dict)):
            return Record(_written(node), hidden=COMPUTED)
        for item in items:
            self._assign(part.target, item, inner)
            truths = [self._truth(self._value(test, inner)) for test in part.ifs]
            if None in truths:
                return Record(_written(node), hidden=COMPUTED)
            if all(truths):
                pair = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
                result.append([self._value(one, inner) for one in pair])
        if isinstance(node, ast.DictComp):
            names = all(isinstance(key, (str, int)) for key, _ in result)
            return dict(result) if names else Record(_written(node), hidden=COMPUTED)
        return [value for (value,) in result]

    def _truth(self, value: object) -> bool | None:
        if isinstance(value, Record):
            return None if value.hidden and not value.constructed else True
        return bool(value)

    # ---- calls

    def _called(self, node: ast.Call, frame: Frame) -> object:
        """What a call returns."""
        holder = self._value(node.func.value, frame) if isinstance(node.func, ast.Attribute) else None
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        arguments = [self._value(item, frame) for item in node.args]
        keywords: dict[str, object] = {}
        for keyword in node.keywords:
            value = self._value(keyword.value, frame)
            keywords.update({keyword.arg: value} if keyword.arg else value if isinstance(value, dict) else {"**": value})
        method = holder is not None and not isinstance(holder, Import)
        function = None if method else self._value(node.func, frame)
        if (known := self.known(_class_name(function) or name, holder, arguments, keywords)) is not None:
            return known
        if isinstance(function, Code) and self.depth < DEEPEST:
            if isinstance(function.node, ast.ClassDef):
                return self._object(function, keywords, arguments)
            return self._call(function, arguments, keywords)[0]
        if not isinstance(function, Code) and holder is None:
            match [name, *arguments]:
                case ["hasattr" | "getattr" | "isinstance" | "setattr", *_]:
                    return self._about(name, arguments, node)
                case ["fields", Record() as one, *_]:
                    return [Record("Field", {"name": field}, constructed=True) for field in one.known()]
                case ["cast", _, value]:
                    return value
                case _ if name in BUILTINS:
                    return self._plain(node, BUILTINS[name], arguments)
        if any(type(holder) is kind and name in methods for kind, methods in METHODS.items()):
            if self.branches and name in CHANGING:
                arguments = [[Record(name, hidden=CONDITION)]]
            result = self._plain(node, getattr(holder, name), arguments)
            if isinstance(holder, (list, dict)) and not is_bounded(holder):
                holder.clear()
            return result
        if name in COPIES and arguments and not method:
            copy = copied(arguments[0])
            if isinstance(copy, Record):
                copy.values |= keywords
            return copy
        why = f"{name}(), which is not read"
        if isinstance(holder, Record) and holder.hidden and not holder.constructed:
            why = holder.hidden
        elif isinstance(function, Record):
            why = function.hidden if function.imported else f"{name}(), which the file does not define"
        if name[:1].isupper():
            return Record(name, dict(keywords), why, constructed=True)
        self.not_followed += [(f"{name}()", one) for one in (holder, *arguments, *keywords.values()) if isinstance(one, Record)]
        return Record(f"{name}()", hidden=why)

    def _plain(self, node: ast.Call, function: Callable[..., Any], arguments: Sequence[object]) -> object:
        """What a function of Python itself returns."""
        hidden = Record(_written(node), hidden=COMPUTED)
        collects = function.__name__ in COLLECT and not any(isinstance(one, Record) for one in arguments[:1])
        if node.keywords or not (collects or function.__name__ in CHANGING or all(map(is_plain, arguments))):
            return hidden
        if function is range and not all(isinstance(one, int) and abs(one) <= LONGEST_VALUE for one in arguments):
            return hidden
        try:
            result = function(*arguments)
            if function.__name__ in ("zip", "enumerate", "keys", "items", "values"):
                result = list(result)
        except (TypeError, ValueError, ArithmeticError, LookupError):
            return hidden
        return result if is_bounded(result) else hidden

    def _about(self, name: str, arguments: Sequence[object], node: ast.Call) -> object:
        """hasattr, getattr, setattr, isinstance."""
        hidden = Record(_written(node), hidden=COMPUTED)
        match [name, *arguments]:
            case ["isinstance", one, _]:
                wanted = {_last(item) for item in (node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]])}
                if isinstance(one, Record):
                    return True if one.name in wanted else hidden
                return type(one).__name__ in wanted
            case ["setattr", Record() as one, str() as attribute, value]:
                self._put(one.values, attribute, value, self.branches > 0)
                return None
            case ["setattr", Record() as one, *_]:
                self.not_followed.append(("setattr()", one))
            case ["hasattr", Record() as one, str() as attribute]:
                return True if attribute in one.values or attribute in one.defaults else hidden if one.hidden else False
            case ["getattr", Record() as one, str() as attribute, default] if attribute not in one.values and not one.hidden:
                return default
            case ["getattr", Record() as one, str() as attribute, *_]:
                return one.get(attribute)
            case ["getattr", None, str(), default]:
                return default
        return hidden

    def _call(self, code: Code, arguments: Sequence[object], keywords: Mapping[str, object]) -> tuple[object, dict[str, object]]:
        """What a function returns, and its variables at the end."""
        node = code.node
        assert not isinstance(node, ast.ClassDef)
        frame, before = Frame(code.module, {}, self.branches), self.branches
        spec = node.args
        positional = [*spec.posonlyargs, *spec.args]
        missing = {one.arg: Record(one.arg, hidden="the caller gives it") for one in [*positional, *spec.kwonlyargs]}
        module = Frame(code.module, code.module.names, self.branches)
        defaults = [*zip(reversed(positional), reversed(spec.defaults)), *zip(spec.kwonlyargs, spec.kw_defaults)]  # noqa: B905
        given = {one.arg: self._value(default, module) for one, default in defaults if default is not None}
        passed = dict(zip((one.arg for one in positional), arguments))  # noqa: B905
        named = {name: value for name, value in keywords.items() if name in missing}
        frame.names = {**code.around, **missing, **({} if "**" in keywords else given), **passed, **named}
        if spec.kwarg:
            frame.names[spec.kwarg.arg] = {name: value for name, value in keywords.items() if name not in missing}
        if spec.vararg:
            frame.names[spec.vararg.arg] = [*arguments[len(positional) :]]
        result: object = None
        self.depth += 1
        try:
            self._run(node.body, frame)
        except _Return as returned:
            result = returned.value
        self.depth -= 1
        self.branches = before
        if any(isinstance(part, (ast.Yield, ast.YieldFrom)) for part in ast.walk(node)):
            result = Record(f"{node.name}()", hidden="it is a generator")
        return Record(f"{node.name}()", hidden=CONDITION) if frame.uncertain else result, frame.names

    def _object(self, code: Code, keywords: Mapping[str, object], arguments: Sequence[object] = ()) -> Record:
        """The object that a class makes: the values of its body, over those of its bases, under the arguments."""
        node = code.node
        assert isinstance(node, ast.ClassDef)
        record, frame = Record(node.name, constructed=True), Frame(code.module, code.module.names, self.branches)
        self.depth += 1
        for base in reversed(node.bases):
            of_base = self._value(base, frame)
            inner = self.known(_class_name(of_base) or _last(base), None, (), {})
            if inner is None and isinstance(of_base, Code) and isinstance(of_base.node, ast.ClassDef) and self.depth < DEEPEST:
                inner = self._object(of_base, {})
            if inner is None:
                inner = Record("", hidden=of_base.hidden if isinstance(of_base, Record) else "a base of its class is not read")
            record.values |= inner.values
            record.hidden, record.base, record.methods = (
                record.hidden or inner.hidden,
                inner.base or record.base,
                record.methods + inner.methods,
            )
        self.depth -= 1
        body = Frame(code.module, dict(code.module.names), self.branches)
        methods = [part.name for part in node.body if isinstance(part, Function)]
        fields = [part for part in node.body if isinstance(part, (ast.Assign, ast.AnnAssign)) and part.value is not None]
        for part in fields:
            target = part.targets[0] if isinstance(part, ast.Assign) else part.target
            if isinstance(target, ast.Name) and part.value is not None:
                record.values[target.id] = body.names[target.id] = self._field(part.value, body)
        record.methods += tuple(f"{node.name}.{name}" for name in methods)
        names = [part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)]
        record.values |= {**dict(zip(names, arguments)), **keywords}  # noqa: B905
        return record

    def _field(self, node: ast.expr, frame: Frame) -> object:
        """The default of a field of a dataclass."""
        if isinstance(node, ast.Call) and _last(node.func) == "field":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            return self._value(given["default"], frame) if "default" in given else Record(_written(node), hidden="it is not read")
        return self._value(node, frame)


def evaluate(text: str) -> int | list[int]:
    """The value of an expression of whole numbers, lists, + - * / and parentheses, without executing it; else ValueError.

    >>> evaluate("([0]*2+[1])*2")
    [0, 0, 1, 0, 0, 1]
    """
    # The depth of the syntax tree is bounded before Python's parser sees the text, because the parser recurses.
    if not re.fullmatch(r"[0-9\[\]()+*/,\s-]{1,100000}", text) or sum(map(text.count, "+-*/([")) > 200:
        raise ValueError("not such an expression")
    nothing = Module(None)
    try:
        tree = ast.parse(re.sub("/+", "//", text.strip()), mode="eval")
        value = Follower(None, lambda *_: None)._value(tree.body, Frame(nothing, {}))
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("not such an expression") from error
    items = [*value] if isinstance(value, (list, tuple)) else [value]
    numbers = [item for item in items if type(item) is int and abs(item) <= LARGEST_NUMBER]
    if len(numbers) != len(items):
        raise ValueError("not a number, a list or a sum or product of them")
    return numbers if isinstance(value, (list, tuple)) else numbers[0]


def _class_name(function: object) -> str:
    """The name that a function or class has where it is defined; empty for anything else."""
    return function.node.name if isinstance(function, Code) else function.name if isinstance(function, Record) else ""


def _last(node: ast.expr) -> str:
    """`GPTModelProvider`, also of `models.GPTModelProvider`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _written(node: ast.AST) -> str:
    return ast.unparse(node)[:60]
