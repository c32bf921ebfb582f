"""What CONTRIBUTING.md says about options and commands, done in a copy of the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SAID = "    context.reporter.say(f'largest {options.largest}')\n"
IMPORTED = "from gemmscope.options.estimating import CountOptions\n"
COUNTED = "count --preset gpt2 --micro-batch-size 1 --sequence-length 64 --twice"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, with the documentation's generator."""
    for name in ("src", "docs", "tests/support"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.png", "*.svg", "data"))
    return tmp_path


def insert(path: Path, before: str, text: str) -> None:
    """Put a text before the only place that has another one."""
    content = path.read_text()
    assert content.count(before) == 1
    path.write_text(content.replace(before, text + before))


def run(copy: Path, code: str) -> str:
    """The output of Python code that uses the copy."""
    environment = {"PYTHONPATH": f"{copy / 'src'}:{copy / 'tests'}:{copy / 'docs'}", "PATH": "/usr/bin:/bin", "HOME": str(copy)}
    code = f"import sys\nsys.path[:0] = {environment['PYTHONPATH'].split(':')}\n{code}"
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return child.stdout


def command_line(arguments: str) -> str:
    return f"from gemmscope.cli.main import app\napp({arguments.split()}, standalone_mode=False, prog_name='gemmscope')\n"


def test_add_an_option(copy: Path) -> None:
    field = '    largest: Annotated[int | None, Option("Show so many of the largest GEMMs.", default="all")] = None\n'
    insert(copy / "src/gemmscope/options/estimating.py", "    list_presets: Annotated", field)
    insert(
        copy / "src/gemmscope/commands/shapes.py",
        "    if options.check and",
        SAID,
    )
    run(copy, "from support import api_signatures\napi_signatures.main()")
    model = "--preset gpt2 --micro-batch-size 1 --sequence-length 64 --json -"
    shown = run(
        copy,
        command_line("shapes --help")
        + "import gemmscope.say as say, gemmscope.progress as progress\nprogress.say = print\n"
        + command_line(f"shapes {model} --largest 1k")
        + "import gemmscope as gs\ngs.load('gpt2').on(1, 64).shapes(largest='2k')\n"
        + "help(gs.Job.shapes)\nimport command_reference\nprint(command_reference.each_command())\n",
    )
    assert "--largest N" in shown
    assert "largest 1024" in shown
    assert "largest 2048" in shown
    assert "largest: int | str | None = None" in shown.replace("'", "")
    assert "largest: Show so many of the largest GEMMs. [default: all]" in shown
    assert "<code>--largest N</code> | Show so many of the largest GEMMs. [default: all] |" in shown


def test_add_a_command(copy: Path) -> None:
    package = copy / "src/gemmscope"
    insert(
        package / "options/estimating.py",
        "class ShapesOptions",
        'class CountOptions(Options):\n    """What to count."""\n\n'
        '    twice: Annotated[bool, Option("Count twice.")] = False\n\n\n',
    )
    (package / "commands/count.py").write_text(
        "def count(job, options, context):\n    return len(job.source.model.layers) * (1 + options.twice)\n"
    )
    insert(package / "commands/__init__.py", '"doctor", ', '"count", ')
    insert(
        package / "cli/commands.py",
        "def bench(",
        "def count(model: ModelOptions, run: RunOptions, options: CountOptions) -> int:\n"
        "    print(commands.count.count(_job(model, run), options, None))\n    return 5\n\n\n",
    )
    insert(
        package / "cli/commands.py",
        "from gemmscope.options.job import",
        IMPORTED,
    )
    insert(
        package / "cli/commands.toml",
        "[commands.bench]",
        '[commands.count]\nsummary = "Count the layers."\ndescription = "Counts them."\n'
        'examples = ["gemmscope count --preset gpt2"]\n'
        'exit_codes = { 5 = "counted" }\n\n',
    )
    insert(copy / "docs/command_reference.py", '    "bench": "bench.md",', '    "count": "shapes.md",\n')
    insert(
        package / "api/jobs.py",
        "    @takes(ForecastOptions)\n    def forecast",
        "    @takes(CountOptions)\n    def count(\n        self,\n        *,\n        # options\n        twice: bool = False,\n"
        '    ) -> int:\n        """Count the layers.\n\n        Options:\n        """\n'
        '        options, context = prepared(f"{self.call}.count", locals(), CountOptions)\n'
        "        return commands.count.count(self, options, context)\n\n",
    )
    insert(
        package / "api/jobs.py",
        "from gemmscope.options.measuring import",
        IMPORTED,
    )
    run(copy, "from support import api_signatures\napi_signatures.main()")
    shown = run(
        copy,
        command_line("--help")
        + command_line("count --help")
        + f"print('code', app('{COUNTED}'.split(), standalone_mode=False))\n"
        + "import gemmscope as gs\nprint('python', gs.load('gpt2').on(1, 64).count(twice=True), gs.Job.count.__doc__)\n"
        + "import command_reference\nprint(command_reference.each_command(), command_reference.exit_codes())\n",
    )
    for text in ("Count the layers.", "--twice", "24\ncode 5", "python 24", "twice: Count twice.", "### count", "| counted |"):
        assert text in shown
