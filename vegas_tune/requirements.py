"""The packages this project needs or can use: installed or not, in a fitting version or not."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PROJECT: Final = "vegas-tune"
# For working on the project, not with it.
_NOT_SHOWN: Final = frozenset({"dev"})


@dataclass(frozen=True, kw_only=True)
class Package:
    """One requirement.

    Attributes:
        name: as the package index spells it.
        required: the range asked for, e.g. `>=5,<6`; empty for any version.
        extra: the extra that asks for it; empty for one that is always needed.
        version: installed version; None when missing.
        fits: whether that version is in the range.
    """

    name: str
    required: str
    extra: str
    version: str | None
    fits: bool

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.name}{self.required}"


class RequirementsUnknownError(Exception):
    """The project's requirements cannot be read; the message says why.

    Attributes:
        is_incomplete: whether required packages are surely missing.
    """

    def __init__(self, message: str, *, is_incomplete: bool) -> None:
        super().__init__(message)
        self.is_incomplete = is_incomplete


def read_packages() -> tuple[Package, ...]:
    """Requirements in the order of pyproject.toml, those of extras last.

    Raises:
        RequirementsUnknownError: the project or `packaging` is not installed.
    """
    try:
        from packaging.requirements import Requirement
    except ImportError as error:
        # Every required package brings it; without it most of them are missing, too.
        raise RequirementsUnknownError("packaging is missing", is_incomplete=True) from error
    try:
        lines = metadata.requires(PROJECT) or []
        extras = metadata.metadata(PROJECT).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError as error:
        raise RequirementsUnknownError(
            f"{PROJECT} is not installed as a package", is_incomplete=False
        ) from error
    found: dict[str, Package] = {}
    for extra in ("", *(each for each in extras if each not in _NOT_SHOWN)):
        for requirement in map(Requirement, lines):
            if requirement.name not in found and _applies(requirement, extra):
                found[requirement.name] = _package(requirement, extra)
    return tuple(found.values())


def _applies(requirement: Requirement, extra: str) -> bool:
    """Whether a requirement holds here; an extra's own ones come after the unconditional."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _package(requirement: Requirement, extra: str) -> Package:
    try:
        version: str | None = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        version = None
    fits = version is not None and requirement.specifier.contains(version, prereleases=True)
    return Package(
        name=requirement.name,
        required=_ordered(str(requirement.specifier)),
        extra=extra,
        version=version,
        fits=fits,
    )


def _ordered(specifier: str) -> str:
    """`>=5,<6` rather than the `<6,>=5` of a sorted set."""
    return ",".join(sorted(specifier.split(","), key=lambda part: not part.startswith(">")))
