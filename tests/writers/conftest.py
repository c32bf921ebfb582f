"""One browser for all tests of this folder: starting one takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.browser import CHROMIUM, Browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()
