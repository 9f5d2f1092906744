"""Find the material beside the checkout: ground truths and real adapter files, not committed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def shared(*parts: str) -> Path:
    """The path of a file or folder in the shared material; skips the test where it is absent.

    The material is the folder that FULLDIFF_SHARED names, else ``shared`` beside the checkout.
    """
    folder = Path(os.environ.get("FULLDIFF_SHARED") or REPOSITORY.parent / "shared")
    path = folder.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} is absent: set FULLDIFF_SHARED to the folder of shared material")
    return path
