"""Where the texts that tests compare are kept: one file per package, `tests/<package>/__snapshots__/prose.ambr`.

`pytest tests --snapshot-update` rewrites them all.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from syrupy.extensions.amber import AmberSnapshotExtension

if TYPE_CHECKING:
    from syrupy.location import PyTestLocation
    from syrupy.types import SnapshotIndex

__all__ = ["PackageProse"]

_TESTS = Path(__file__).parents[1]


class PackageProse(AmberSnapshotExtension):
    """Keeps the texts of all tests of a package in one file; a text is named by its test's file and function."""

    @classmethod
    def dirname(cls, *, test_location: PyTestLocation) -> str:
        """Return the folder of a test's texts."""
        package = Path(test_location.filepath).relative_to(_TESTS).parts[0]
        return str(_TESTS / package / "__snapshots__")

    @classmethod
    def get_file_basename(cls, *, test_location: PyTestLocation, index: SnapshotIndex) -> str:  # noqa: ARG003 - its signature
        """Return the name of the file, which the whole package shares."""
        return "prose"

    @classmethod
    def get_snapshot_name(cls, *, test_location: PyTestLocation, index: SnapshotIndex = 0) -> str:
        """Return the name of a text: functions of two files may have the same name."""
        name = super().get_snapshot_name(test_location=test_location, index=index)
        return f"{Path(test_location.filepath).stem}.{name}"
