"""`gemmscope doctor`."""

from gemmscope import commands, writers
from gemmscope.cli.options import takes
from gemmscope.cli.output import check_targets, to_stdout, write


@takes()
def command(json: str | None = None) -> None:
    """Check what this machine can measure, and what is missing."""
    check_targets({"json": json} if json is not None else {})
    diagnosis = commands.doctor.diagnose()
    if json is not None:
        write(json, diagnosis.to_json())
        if to_stdout(json):
            return
    writers.terminal.show_texts([*diagnosis.answer(), "", *diagnosis.lines()])
    writers.terminal.show_table(diagnosis.table())
    if reasons := diagnosis.why_not():
        writers.terminal.show_texts(["", "Why not", *reasons])
