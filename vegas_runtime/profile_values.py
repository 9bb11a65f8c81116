"""Values a profile is made of: strict numbers and text, free facts, sections, estimates.

Numbers are strict (text is never taken for a number, nor `no` for false), NaN is refused, and an
unknown key is an error that names the nearest known one. Every refusal is one line.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Final, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    Strict,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from vegas_runtime.config import MAX_SPECULATIVE_TOKENS, SWITCHES, SpeculationConfig
from vegas_runtime.errors import ConfigError

WILDCARD: Final = "*"


def refusal(message: str) -> PydanticCustomError:
    """A validation error whose text is shown as it is."""
    # The message goes in as a value: it may quote user text with braces in it.
    return PydanticCustomError("vegas", "{message}", {"message": message})


def unknown_key(key: object, known: list[str]) -> PydanticCustomError:
    """The error for a key that a section does not have, with the nearest one it has."""
    near = difflib.get_close_matches(str(key), known, n=1)
    listed = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    advice = f"did you mean {near[0]!r}?" if near else f"known are {listed}."
    return refusal(f"unknown key {shown(key)}; {advice}")


def shown(value: object) -> str:
    """A value as an error message quotes it: one line, not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _whole(value: Any) -> Any:
    """Integers of other libraries become int; everything else is left to the strict check."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def _real(value: Any) -> Any:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return float(value) if is_number else value


def _plain(value: Any) -> Any:
    """JSON-like values with plain types, finite numbers and sorted text keys."""
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise refusal(f"key {key!r} is not text; put it in quotes.")
        return {key: _plain(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    number = _whole(value)
    if isinstance(number, int):
        return number
    number = _real(value)
    if not isinstance(number, float):
        raise refusal(f"a {type(value).__name__} cannot be kept in a profile.")
    if not math.isfinite(number):
        raise refusal(f"{number} is not a measurement; leave the key out.")
    return number


def _plain_mapping(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise refusal("a mapping (key: value) is needed.")
    return _plain(value)


def _count_fact(value: Any) -> Any:
    number = _whole(value)
    if value in (None, WILDCARD) or (isinstance(number, int) and not isinstance(number, bool)):
        return number
    raise refusal('a whole number, or "*" for any, is needed.')


def _number_fact(value: Any) -> Any:
    number = _real(value)
    if value in (None, WILDCARD) or (isinstance(number, float) and math.isfinite(number)):
        return number
    raise refusal('a number, or "*" for any, is needed.')


def _fraction(value: float) -> float:
    if not 0 < value <= 1:
        advice = f"; to keep {value:g} % write {value / 100:g}" if 1 < value <= 100 else ""
        raise refusal(f"{value:g} is not a fraction of KV entries kept, in (0, 1]{advice}.")
    return value


def _range(value: Any) -> tuple[int, int]:
    ends = tuple(_whole(end) for end in value) if isinstance(value, (list, tuple)) else ()
    is_whole = all(isinstance(end, int) and not isinstance(end, bool) for end in ends)
    if len(ends) != 2 or not is_whole or not 0 <= ends[0] < ends[1]:
        raise refusal(
            f"{shown(value)} is not a range; write [first, end] with 0 <= first < end, "
            "where end itself is outside."
        )
    return (ends[0], ends[1])


def speculation(value: Any) -> SpeculationConfig:
    """`SpeculationConfig.from_dict` with a profile's error texts; also makes the ratio a float.

    Raises:
        PydanticCustomError: an unknown or missing key, or a value outside its range.
    """
    if isinstance(value, SpeculationConfig):
        value = value.to_dict()
    if not isinstance(value, Mapping):
        raise refusal("the speculation settings (key: value) are needed.")
    known = [field.name for field in fields(SpeculationConfig)]
    for key in value:
        if key not in known:
            raise unknown_key(key, known)
    if not isinstance(value.get("algorithm", ""), str):
        raise refusal(f"`algorithm` is {shown(value['algorithm'])}; a policy's name is needed.")
    try:
        config = SpeculationConfig.from_dict(value)
    except ConfigError as error:
        ratio = _real(value.get("sparsity_ratio"))
        if isinstance(ratio, float) and 1 < ratio <= 100:
            raise refusal(
                f"`sparsity_ratio` is {ratio:g}, which is not a fraction; "
                f"to keep {ratio:g} % write {ratio / 100:g}."
            ) from error
        raise refusal(str(error)) from error
    return config.replace(sparsity_ratio=float(config.sparsity_ratio))


# Switches that profiles have not always had. At their default they are left out, so that what was
# written before hashes to the same id.
_LATER: Final = ("granularity",)


def _written(config: SpeculationConfig) -> dict[str, Any]:
    """A setting in a profile's keys."""
    values = config.to_dict()
    return {
        name: value
        for name, value in values.items()
        if name not in _LATER or value != SWITCHES[name][0]
    }


# As JSON Schema can say it; `SpeculationConfig` itself is the judge.
_SPECULATION_PROPERTIES: Final = {
    "algorithm": {"type": "string"},
    "num_speculative_tokens": {
        "type": "integer",
        "minimum": 0,
        "maximum": MAX_SPECULATIVE_TOKENS,
    },
    "sparsity_ratio": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "min_tokens": {"type": "integer", "minimum": 1},
    **{name: {"enum": list(values)} for name, values in SWITCHES.items()},
}

Text = Annotated[str, Strict()]
Whole = Annotated[int, BeforeValidator(_whole), Strict()]
Count = Annotated[int, BeforeValidator(_whole), Strict(), Field(ge=0)]
Real = Annotated[float, BeforeValidator(_real), Strict(), Field(allow_inf_nan=False)]
Ratio = Annotated[
    float,
    BeforeValidator(_real),
    Strict(),
    Field(allow_inf_nan=False),
    AfterValidator(_fraction),
    WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
]
Flag = Annotated[bool, Strict()]
Range = Annotated[
    tuple[int, int],
    BeforeValidator(_range),
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 0},
            "minItems": 2,
            "maxItems": 2,
            "description": "half-open: [first, end]",
        }
    ),
]
Json = Annotated[Any, BeforeValidator(_plain)]
JsonMapping = Annotated[
    dict[str, Any], PlainValidator(_plain_mapping), WithJsonSchema({"type": "object"})
]
CountFact = Annotated[
    int | str | None,
    PlainValidator(_count_fact),
    WithJsonSchema({"anyOf": [{"type": "integer"}, {"const": WILDCARD}, {"type": "null"}]}),
]
NumberFact = Annotated[
    float | str | None,
    PlainValidator(_number_fact),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"const": WILDCARD}, {"type": "null"}]}),
]
Sha256Id = Annotated[str, Strict(), Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Speculation = Annotated[
    SpeculationConfig,
    PlainValidator(speculation),
    PlainSerializer(_written, return_type=dict),
    WithJsonSchema(
        {
            "type": "object",
            "properties": _SPECULATION_PROPERTIES,
            "required": ["num_speculative_tokens", "sparsity_ratio"],
            "additionalProperties": False,
        }
    ),
]


class Section(BaseModel):
    """Base of every part: frozen, and no key is ever dropped."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def known_keys(cls) -> list[str]:
        """The keys this part has in the file, in order."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        return cls._prepare(data) if isinstance(data, Mapping) else data

    @classmethod
    def _prepare(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        known = cls.known_keys()
        for key in data:
            if key not in known:
                raise unknown_key(key, known)
        return dict(data)


class FactSection(Section):
    """A part that describes something, and may meet facts it has no name for."""

    other: JsonMapping = Field(default_factory=dict)

    @classmethod
    def known_keys(cls) -> list[str]:
        """The keys this part has in the file, in order."""
        return [*(key for key in super().known_keys() if key != "other"), "other"]

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Build from plain facts; those without a field here are kept under `other`."""
        known = set(cls.known_keys())
        other = dict(facts.get("other", {}))
        other |= {key: value for key, value in facts.items() if key not in known}
        named = {key: value for key, value in facts.items() if key in known}
        return cls.model_validate({**named, "other": other})

    def to_facts(self) -> dict[str, Any]:
        """The inverse of `from_facts`: plain values, None for what is unknown."""
        facts = {key: None for key in self.known_keys() if key != "other"}
        values = self.model_dump(mode="json", by_alias=True)
        return facts | {k: v for k, v in values.items() if k != "other"} | self.other

    @model_serializer(mode="wrap")
    def _other_last(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        other = values.pop("other", None)
        return values | ({"other": other} if other else {})


class Estimate(Section):
    """A measured figure with its interval, or one marked as having none.

    Attributes:
        est: the estimate, kept to six significant digits as are the bounds.
        low: lower end of the 95 % interval.
        high: upper end of the 95 % interval.
        n: independent observations behind it (batches, prompts or pairs).
        point_only: no interval is known; a bare number in a file is read as this.
    """

    est: Real
    low: Real | None = None
    high: Real | None = None
    n: Count | None = None
    point_only: Flag = False

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        if isinstance(_real(data), float):
            data = {"est": data, "point_only": True}
        return cls._prepare(data) if isinstance(data, Mapping) else data

    @classmethod
    def _prepare(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        values = super()._prepare(data)
        for key in ("est", "low", "high"):
            number = _real(values.get(key))
            if isinstance(number, float) and math.isfinite(number):
                values[key] = float(f"{number:.6g}")
        return values

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Also admit the bare number that `_read` does."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        whole = dict(schema)
        schema.clear()
        schema.update({"title": cls.__name__, "anyOf": [whole, {"type": "number"}]})
        return schema

    @model_validator(mode="after")
    def _check_interval(self) -> Self:
        if self.point_only:
            if self.low is not None or self.high is not None:
                raise refusal("`point_only` is true beside `low` or `high`; keep one of them.")
        elif self.low is None or self.high is None:
            raise refusal("`low` and `high` are needed, or `point_only: true`.")
        elif not self.low <= self.est <= self.high:
            raise refusal(
                f"`est` {self.est:g} is not between `low` {self.low:g} and `high` {self.high:g}."
            )
        return self

    @model_serializer(mode="plain")
    def _only_what_is_known(self) -> dict[str, Any]:
        values = {"est": self.est, "low": self.low, "high": self.high, "n": self.n}
        known = {key: value for key, value in values.items() if value is not None}
        return known | ({"point_only": True} if self.point_only else {})
