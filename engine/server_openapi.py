"""The tuning protocol as an OpenAPI 3.1 document, made from the schemas that also check every message."""

from typing import Any

from rooftune.policies import wire

MOST_AFTER = 2**53
_AFTER = {
    "name": "after",
    "in": "query",
    "required": False,
    "description": "only rows with a number above this; -1: from the oldest kept; then `next` of the latest answer",
    "schema": {"type": "integer", "minimum": -1, "maximum": MOST_AFTER, "default": -1},
}


def openapi(*, read_only: bool) -> dict[str, Any]:
    """read_only: without a token, so the routes that change something refuse."""
    paths: dict[str, Any] = {
        "/tuning/v1/state": {"get": _read("Envelope, knobs, policies, revision and lease", wire.State)},
        "/tuning/v1/steps": {"get": _read("Step records by column", wire.StepColumns, _AFTER)},
        "/tuning/v1/requests": {"get": _read("Ended requests by column", wire.RequestColumns, _AFTER)},
    }
    if not read_only:
        paths |= {
            "/tuning/v1/knobs": {"put": _change("Push knobs under a lease, whole or not at all", wire.PushRequest)},
            "/tuning/v1/lease": {"delete": _change("Back to the boot settings now", wire.RevertRequest, False)},
            "/tuning/v1/resume": {"post": _change("Allow pushes again after a revert", wire.ResumeRequest)},
        }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Rooftune tuning protocol", "version": str(wire.PROTOCOL_VERSION)},
        "paths": paths,
        "components": {"schemas": _components()},
    }
    if not read_only:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document


_TEXT_OR_NULL = {"type": ["string", "null"]}
# What ``ApiError.body`` gives: this one answer is OpenAI's, not the protocol's.
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT_OR_NULL,
                "code": _TEXT_OR_NULL,
            },
        }
    },
}


def _components() -> dict[str, Any]:
    """Every message and every part of one, under its own name."""
    found: dict[str, Any] = {"Error": _ERROR}
    for name, schema in wire.json_schemas().items():
        parts = schema.pop("$defs", {})
        found |= _relocated(parts) | {name: _relocated(schema)}
    return found


def _relocated(value: Any) -> Any:
    """The same schema with its references pointing to the document's components."""
    if isinstance(value, dict):
        return {key: _relocated(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_relocated(part) for part in value]
    if isinstance(value, str) and value.startswith("#/$defs/"):
        return value.replace("#/$defs/", "#/components/schemas/")
    return value


def _content(kind: type[wire.Message]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


def _answers(kind: type[wire.Message], refusals: tuple[int, ...]) -> dict[str, Any]:
    answers: dict[str, Any] = {"200": {"description": kind.__name__, "content": _content(kind)}}
    for status in refusals:
        answers[str(status)] = {"description": "nothing was changed", "content": _content(wire.Refusal)}
    refused = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    answers["401"] = {"description": "no valid bearer token", "content": refused}
    return answers


def _read(summary: str, kind: type[wire.Message], *parameters: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary, "parameters": list(parameters), "responses": _answers(kind, (422,))}


def _change(summary: str, kind: type[wire.Message], needs_body: bool = True) -> dict[str, Any]:
    statuses = tuple(sorted({413, *wire.REFUSAL_STATUS.values()}))
    return {
        "summary": summary,
        "requestBody": {"required": needs_body, "content": _content(kind)},
        "responses": _answers(wire.PushAnswer, statuses),
    }
