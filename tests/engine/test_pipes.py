"""Non-blocking pipes, and the last output of a process."""

from __future__ import annotations

import os
import tempfile

from gemmscope.engine.pipes import MOST_ERRORS, PipeWriter, last_line, last_part, read_now


def test_what_a_full_pipe_does_not_take_follows_later() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    content = os.urandom(1 << 20)
    outgoing = PipeWriter(writing)
    outgoing.send(content)
    assert outgoing
    received = b""
    while outgoing or len(received) < len(content):
        received += read_now(reading) or b""
        outgoing.flush()
    assert received == content
    assert read_now(reading) == b""
    os.close(writing)
    assert read_now(reading) is None
    os.close(reading)


def test_nothing_is_left_for_who_does_not_read_any_more() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    outgoing = PipeWriter(writing)
    outgoing.send(b"nobody reads this")
    assert not outgoing
    os.close(writing)


def test_the_last_line_of_long_error_output() -> None:
    with tempfile.TemporaryFile() as errors:
        assert last_line(errors) == ""
        errors.write(b"first\n" + b"x" * 2 * MOST_ERRORS + b"\nout of luck\n \n")
        assert last_line(errors) == ": out of luck"
        assert len(last_part(errors)) == MOST_ERRORS
