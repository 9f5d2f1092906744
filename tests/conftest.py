"""Nothing that a test calibrates is kept in the user's cache folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLDIFF_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
