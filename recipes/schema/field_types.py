"""Types of the fields of a recipe, with their ranges and their conversions from YAML."""

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


_INTEGER: Any = {"type": ["integer", "string"], "pattern": "^[0-9][0-9_]*$"}
"""JSON schema of a count: editors parse 65_536 as a string."""
Count = Annotated[int, Field(ge=1, le=2**63 - 1, json_schema_extra=_INTEGER)]
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Decay = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Flag = Annotated[bool, BeforeValidator(typed), Strict()]
PathOrId = Annotated[str, AfterValidator(expanduser)]
DataPath = Annotated[str, AfterValidator(checked_home), Field(validate_default=True)]
Json = Annotated[dict[str, Any], BeforeValidator(typed)]
