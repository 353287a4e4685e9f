"""Types of the fields of a recipe, with their ranges and their conversions from YAML."""

from contextlib import suppress
from os.path import expanduser
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, Strict
from pydantic_core import PydanticCustomError

from crosshead.common.yaml_text import typed


def checked_home(name: str) -> str:
    """Replace a leading `~` by the home folder; other paths and Hub ids are returned unchanged."""
    path = expanduser(name)
    if path.startswith("~"):
        raise PydanticCustomError("home", "it begins with the home folder of an unknown user: write the whole path")
    return path


def whole_number(value: Any) -> Any:
    """Convert text such as 2e7 to an integer; other values are returned unchanged."""
    if isinstance(value, str) and "e" in value.lower():
        with suppress(ValueError):
            return int(number) if (number := float(value)).is_integer() else value
    return value


_INTEGER: Any = {"type": ["integer", "string"], "pattern": "^[0-9][0-9_]*$"}
"""JSON schema of a count: editors parse 65_536 as a string."""
Count = Annotated[int, Field(ge=1, le=2**63 - 1, json_schema_extra=_INTEGER), BeforeValidator(whole_number)]
Length = Annotated[int, Field(ge=2, le=2**63 - 1, json_schema_extra=_INTEGER), BeforeValidator(whole_number)]
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Decay = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Flag = Annotated[bool, BeforeValidator(typed), Strict()]
PathOrId = Annotated[str, AfterValidator(expanduser)]
DataPath = Annotated[str, AfterValidator(checked_home), Field(validate_default=True)]
Json = Annotated[dict[str, Any], BeforeValidator(typed)]
