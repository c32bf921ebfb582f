"""Asks the frameworks what they can run on this machine, in a separate process (it imports torch)."""

import importlib
import json
from typing import Any

from gemmscope.bench.backends.base import BackendOptions, OperandStore
from gemmscope.engine.worker import versions_of
from gemmscope.errors import in_a_line
from gemmscope.process import messages_to_parent
from gemmscope.recipe.frameworks import measuring_classes
from gemmscope.recipe.recipes import recipes


def main() -> None:
    """For each backend: its versions and, for each recipe, why it does not run (empty: it runs); or why it does not load."""
    answer: dict[str, Any] = {}
    for name, (module, class_name) in measuring_classes("bench").items():
        try:
            backend = getattr(importlib.import_module(module), class_name)(OperandStore("cpu"), BackendOptions())
            reasons = {recipe.name: backend.why_not(recipe) for recipe in recipes().values()}
            answer[name] = {"versions": versions_of(name), "why_not": reasons}
        except ModuleNotFoundError as error:
            answer[name] = {"broken": f"{error.name} is not installed"}
        except Exception as error:
            answer[name] = {"broken": in_a_line(error)}
    with messages_to_parent() as out:
        out.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
