"""What a loader is. To test your own implementation, subclass `Loader` and write `load`.

    from fulldiff.harness.subjects.loaders.base import Loader

    class Mine(Loader):
        def load(self, base, files, rejection):
            return Loaded(patches, fates, names_tried)

Then ``fulldiff conform --suite load --subject my_package.my_module:Mine``. The types are those of the naive loader,
`fulldiff.reference.load`, which says what is to come out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from fulldiff.harness.subjects.loaders import merging
from fulldiff.reference.key_maps import Base
from fulldiff.reference.load import File, Loaded, Patch, Rejection


class Loader(ABC):
    """An implementation of loading under test. One instance serves many calls, with different bases."""

    @abstractmethod
    def load(self, base: Base, files: Sequence[File], rejection: Rejection) -> Loaded:
        """The patches of each weight in load order, and each file's fate.

        Raise `fulldiff.reference.load.LoadError` for an orphan factor; the message names the file.
        """

    def merge(self, weight: Tensor, patches: Sequence[Patch]) -> Tensor:
        """The weight (out, …) with its patches, summed in f32 and cast once to its dtype; ``weight`` is left as it is.

        Raise `LoadError`, `Refused` or `Unsupported` for what has no delta here.
        """
        return merging.stacked(weight, patches)
