"""One folder of compiled code for the tests of the twin, kept between runs; an edit of any source makes a new one."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def compiled_once(pytestconfig: pytest.Config) -> Iterator[None]:
    """ROOFTUNE_CACHE_DIR, unless the caller has one."""
    with pytest.MonkeyPatch.context() as patch:
        if "ROOFTUNE_CACHE_DIR" not in os.environ:
            patch.setenv("ROOFTUNE_CACHE_DIR", str(pytestconfig.cache.mkdir("twin")))
        yield
