"""Profile: a setting, what it was tuned for and what was measured; and its file.

The file is checked in three steps: YAML (`profile_yaml`), content (`profile_sections`, put into
words by `profile_errors`), and the hash that ties the setting to its evidence.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import ProfileInvalidError
from vegas_runtime.profile_errors import first_problem
from vegas_runtime.profile_sections import (
    Artifact,
    Bucket,
    Curves,
    DecisionRecord,
    DeviceFacts,
    Failure,
    LosslessCheck,
    Match,
    MeasurementProtocol,
    ModelFacts,
    PhaseTimes,
    Point,
    RejectedWindow,
    Results,
    RuntimeFacts,
    SamplingFacts,
    Selected,
    Serving,
    TokenCounts,
    Tool,
    Validity,
    Workload,
)
from vegas_runtime.profile_values import (
    WILDCARD,
    Count,
    Estimate,
    JsonMapping,
    Section,
    Text,
    refusal,
    shown,
    speculation,
)
from vegas_runtime.profile_yaml import from_yaml, to_yaml
from vegas_runtime.records import replace_file

__all__ = [
    "SCHEMA_NAME",
    "SCHEMA_VERSION",
    "UNSEALED",
    "WILDCARD",
    "Artifact",
    "Bucket",
    "Curves",
    "DecisionRecord",
    "DeviceFacts",
    "Estimate",
    "Failure",
    "LosslessCheck",
    "Match",
    "MeasurementProtocol",
    "ModelFacts",
    "PhaseTimes",
    "Point",
    "Profile",
    "RejectedWindow",
    "Results",
    "RuntimeFacts",
    "SamplingFacts",
    "Selected",
    "Serving",
    "TokenCounts",
    "Tool",
    "Validity",
    "Workload",
    "dump_profile",
    "json_schema",
    "load_profile",
    "parse_profile",
    "to_yaml",
    "write_profile",
]

SCHEMA_NAME: Final = "vegas-tune/profile"
SCHEMA_VERSION: Final = 1
UNSEALED: Final = "unsealed"

# version n -> the content as version n + 1 writes it. Version 1 is the first.
MIGRATIONS: Final[dict[int, Callable[[dict[str, Any]], dict[str, Any]]]] = {}

# A profile is about 40 KB; what is far larger was not written as one, and is not worth parsing.
_MAX_BYTES: Final = 1 << 20
# What every profile but a draft must say; a validated one also what was found.
_EVIDENCE: Final = ("created", "tool", "backend", "workload", "protocol")
_UNHASHED: Final = frozenset({"profile_id", "notes"})
_SHA256: Final = r"^sha256:[0-9a-f]{64}$"
_PROFILE_ID: Final = r"^(unsealed|sha256:[0-9a-f]{64})$"
_UTC: Final = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"


def _this_version(value: int) -> int:
    if value != SCHEMA_VERSION:
        raise refusal(f"{value} is another version than {SCHEMA_VERSION}, which is built here.")
    return value


class Profile(Section):
    """A setting, what it was tuned for, and the evidence.

    Build it, `seal()` it, write it with `profile.write_profile`. Top-level keys that start with
    `x-` are the user's own; they and `notes` are not part of the content hash.
    """

    schema_name: Literal["vegas-tune/profile"] = Field(default=SCHEMA_NAME, alias="schema")
    schema_version: Annotated[
        Count, AfterValidator(_this_version), WithJsonSchema({"const": SCHEMA_VERSION})
    ] = SCHEMA_VERSION
    profile_id: Annotated[Text, Field(pattern=_PROFILE_ID)] = UNSEALED
    status: Literal["validated", "inconclusive", "draft"]
    created: Annotated[Text, Field(pattern=_UTC)] | None = None
    tool: Tool | None = None
    supersedes: Annotated[Text, Field(pattern=_SHA256)] | None = None
    notes: Text = ""
    extensions: JsonMapping = Field(default_factory=dict)
    backend: Literal["reference", "vllm", "replay"] | None = None
    match: Match
    selected: Selected
    serving: Serving
    validity: Validity
    workload: Workload | None = None
    protocol: MeasurementProtocol | None = None
    results: Results | None = None
    decisions: tuple[DecisionRecord, ...] = ()
    curves: Curves = Field(default_factory=Curves)
    lossless_check: LosslessCheck | None = None
    artifacts: tuple[Artifact, ...] = ()
    host: JsonMapping = Field(default_factory=dict)

    @classmethod
    def known_keys(cls) -> list[str]:
        """The keys of the file, in order."""
        return [key for key in super().known_keys() if key != "extensions"]

    @classmethod
    def _prepare(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        own = {k: v for k, v in data.items() if isinstance(k, str) and k.startswith("x-")}
        values = super()._prepare({k: v for k, v in data.items() if k not in own})
        values["extensions"] = own
        if "serving" not in values:
            selected = values.get("selected")
            if isinstance(selected, Selected):
                selected = {"default": selected.default}
            # A setting that is refused here is refused again, with its place, as `selected`.
            if isinstance(selected, Mapping) and "default" in selected:
                with suppress(PydanticCustomError):
                    values["serving"] = Serving.of(speculation(selected["default"]))
        return values

    @model_validator(mode="after")
    def _check_agreement(self) -> Self:
        if self.serving != Serving.of(self.selected.default):
            raise refusal(
                "`serving.speculative_config` and `selected.default` differ, so which one was "
                "measured is unclear; remove `serving`, it is derived."
            )
        if self.status != "draft":
            needed = _EVIDENCE + (("results", "decisions") if self.status == "validated" else ())
            missing = [name for name in needed if not getattr(self, name)]
            if missing:
                raise refusal(
                    f"`status` is {self.status}, but {missing[0]!r} is missing; "
                    "write `status: draft` for a setting without evidence."
                )
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain values in the file's own keys and order; what is unknown is left out."""
        known = self.model_dump(
            mode="json", by_alias=True, exclude_none=True, exclude={"extensions"}
        )
        # A null here says "plain decoding", it is not an unknown.
        known["serving"].setdefault("speculative_config", None)
        values: dict[str, Any] = {}
        for key, value in known.items():
            values[key] = value
            if key == "notes":
                values |= self.extensions
        return values

    def compute_id(self) -> str:
        """Hash of the content: everything but `profile_id`, `notes` and `x-` keys."""
        return content_id(self.to_dict())

    def seal(self) -> Self:
        """A copy that carries the hash of its content."""
        return self.model_copy(update={"profile_id": self.compute_id()})

    def select(self, batch: int, context: int) -> SpeculationConfig:
        """The setting for a batch size and a context length; the lookup serving uses.

        A bucket that holds the cell wins. Without buckets, `validity` is the measured region of
        the default. Elsewhere `selected.outside` decides.

        Args:
            batch: requests running.
            context: tokens in their KV cache.
        """
        selected = self.selected
        for bucket in selected.buckets:
            if bucket.contains(batch, context):
                return bucket.config
        if selected.outside == "default":
            return selected.default
        if not selected.buckets and self.validity.contains(batch, context):
            return selected.default
        if selected.outside == "fallback_gamma_0":
            return selected.default.replace(num_speculative_tokens=0)
        if not selected.buckets:
            return selected.default
        return min(selected.buckets, key=lambda cell: _distance(cell, batch, context)).config


def _distance(cell: Validity, batch: int, context: int) -> float:
    """How far a point lies outside a cell, in octaves: doubling either axis counts alike."""

    def axis(value: int, span: tuple[int, int]) -> float:
        nearest = min(max(value, span[0]), span[1] - 1)
        return abs(math.log2(max(value, 1) / max(nearest, 1)))

    return axis(batch, cell.batch) + axis(context, cell.context)


def content_id(values: Mapping[str, Any]) -> str:
    """The `profile_id` of a profile's plain values."""
    hashed = {
        key: value
        for key, value in values.items()
        if key not in _UNHASHED and not key.startswith("x-")
    }
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def load_profile(path: Path | str) -> Profile:
    """Read and check a profile file.

    Raises:
        ProfileInvalidError: it cannot be read, is not a profile, holds something this release
            does not know, or was changed after it was sealed. One line each.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(data) > _MAX_BYTES:
        raise ProfileInvalidError(
            f"{path} is larger than 1 MiB; a profile is about 40 KB, so this is another file."
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileInvalidError(
            f"{path} is not UTF-8 text: byte 0x{data[error.start]:02X} at position {error.start}.",
            hint="Save it as UTF-8, or restore the original.",
        ) from error
    return parse_profile(text, source=str(path))


def parse_profile(text: str, *, source: str = "profile") -> Profile:
    """Read a profile from text; `source` names it in messages.

    Raises:
        ProfileInvalidError: as `load_profile`.
    """
    values = from_yaml(text, source)
    if values is None:
        raise ProfileInvalidError(
            f"{source} is empty.", hint="Run `vegas-tune sweep` to write a profile."
        )
    if not isinstance(values, dict) or values.get("schema") != SCHEMA_NAME:
        found = shown(values.get("schema")) if isinstance(values, dict) else "no key: value text"
        raise ProfileInvalidError(
            f"{source} is not a vegas-tune profile: its first line must be "
            f"`schema: {SCHEMA_NAME}`, found {found}."
        )
    values = _migrated(values, source)
    try:
        profile = Profile.model_validate(values)
    except ValidationError as error:
        raise first_problem(error, values, Profile.known_keys(), source) from error
    if profile.profile_id == UNSEALED:
        if profile.status != "draft":
            raise ProfileInvalidError(
                f"{source} says `status: {profile.status}` but is unsealed, so nothing ties its "
                "evidence to its setting.",
                hint="Write `status: draft` for a profile made by hand.",
            )
    elif profile.profile_id != profile.compute_id():
        raise _tampered(source, profile.profile_id, profile.compute_id())
    return profile


def dump_profile(profile: Profile) -> str:
    """The file's text: canonical YAML, so that equal profiles give equal bytes."""
    return to_yaml(profile.to_dict())


def write_profile(profile: Profile, path: Path | str) -> None:
    """Write a profile, whole or not at all.

    A profile other than a draft must be sealed.

    Raises:
        StorageError: the folder is full or cannot be written.
    """
    is_sealed = profile.profile_id == profile.compute_id()
    is_draft = profile.status == "draft" and profile.profile_id == UNSEALED
    assert is_sealed or is_draft, "seal() a profile before it is written"
    replace_file(Path(path), dump_profile(profile).encode())


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the file."""
    schema = Profile.model_json_schema(by_alias=True)
    del schema["properties"]["extensions"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{SCHEMA_NAME}/{SCHEMA_VERSION}",
        **schema,
        "required": ["schema", "schema_version", *schema["required"]],
        "patternProperties": {"^x-": {}},
    }


def _unreadable(path: Path, error: OSError) -> ProfileInvalidError:
    if error.errno == errno.ENOENT:
        return ProfileInvalidError(
            f"there is no profile at {path}.",
            hint="`vegas-tune sweep` writes one and prints its path.",
        )
    if error.errno == errno.EISDIR:
        inside = path / "profile.yaml"
        return ProfileInvalidError(
            f"{path} is a folder; a profile is a file.",
            hint=f"Use {inside}." if inside.is_file() else "Name the YAML file in it.",
        )
    return ProfileInvalidError(f"{path} cannot be read: {error.strerror or error}.")


def _migrated(values: dict[str, Any], source: str) -> dict[str, Any]:
    """The content as this release's schema version writes it."""
    version = values.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        found = "missing" if version is None else shown(version)
        raise ProfileInvalidError(
            f"{source}: `schema_version` is {found}; a whole number from 1 to {SCHEMA_VERSION} "
            "is needed to know how to read the rest."
        )
    if version > SCHEMA_VERSION:
        raise ProfileInvalidError(
            f"{source} has schema version {version}; this release reads up to {SCHEMA_VERSION}, "
            "and might misread what is new.",
            hint="Upgrade vegas-tune, or tune again with this release.",
        )
    if version == SCHEMA_VERSION:
        return values
    # The hash is over what the file says, so it is checked before the content changes.
    stored = values.get("profile_id", UNSEALED)
    if stored != UNSEALED and stored != content_id(values):
        raise _tampered(source, stored, content_id(values))
    while version < SCHEMA_VERSION:
        values = MIGRATIONS[version](values)
        version += 1
        values["schema_version"] = version
    if stored != UNSEALED:
        # Defaults a migration may leave out count in the hash, hence the way through the model.
        with suppress(ValidationError):
            values["profile_id"] = Profile.model_validate(values).compute_id()
    return values


def _tampered(source: str, stored: object, found: str) -> ProfileInvalidError:
    return ProfileInvalidError(
        f"{source} was changed after it was written: `profile_id` is {str(stored)[:19]}... but its "
        f"content hashes to {found[:19]}..., so its evidence may not belong to its setting.",
        hint="Restore the original; to keep the change, write `profile_id: unsealed` and "
        "`status: draft`.",
    )
