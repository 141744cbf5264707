"""OpenAI's `response_format` as the form of a text."""

from __future__ import annotations

from collections.abc import Mapping

from giveway.core.errors import InvalidRequestError
from giveway.core.sampling import StructuredOutput


def parse_response_format(value: object) -> StructuredOutput | None:
    """Return the form that a `response_format` asks for; None: any text.

    value: None, or an object whose `type` is `text`, `json_object` or `json_schema`. A schema is always kept strictly,
    whatever its `strict` says; its name and description are for people. Raises InvalidRequestError, naming the field.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"response_format must be an object, not {type(value).__name__}")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput(json_object=True)
    if kind != "json_schema":
        raise InvalidRequestError(
            f"response_format.type is {str(kind)[:60]!r}; it must be text, json_object or json_schema"
        )
    about = value.get("json_schema")
    if not isinstance(about, Mapping):
        raise InvalidRequestError("response_format.json_schema must be an object with a schema")
    schema = about.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidRequestError("response_format.json_schema.schema must be an object, the JSON schema")
    if not isinstance(about.get("strict"), bool | None):
        raise InvalidRequestError("response_format.json_schema.strict must be true or false")
    try:
        return StructuredOutput(json_schema=schema)
    except InvalidRequestError as error:
        shown = str(error).replace("structured_output.json_schema", "response_format.json_schema.schema", 1)
        raise InvalidRequestError(shown) from error
