"""What a client hears when its request is refused, in the shape that OpenAI's clients understand."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse


class ApiError(Exception):
    """A refusal with its HTTP status. param: the field that is wrong; retry_after_s: when to come again."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """``{"error": {message, type, param, code}}``."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in _CLOSING or self.code == BODIES_FULL_CODE:
            headers["Connection"] = "close"
        return JSONResponse(self.body(), self.status, headers)


COME_AGAIN_S = 5  # where nobody can say how long it takes
TOO_LONG_CODE = "context_length_exceeded"
BODIES_FULL_CODE = "bodies_full"
_KINDS = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable"}
_CLOSING = (408, 413)  # the rest of the body has not been read


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400 for a value that cannot be used."""
    return ApiError(400, message, code="invalid_value", param=param)


async def answer_api_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's handler for ``ApiError``."""
    if not isinstance(error, ApiError):
        raise error
    return error.response()


async def answer_http_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's own refusals (no such path, no such method) in the same shape."""
    status = int(getattr(error, "status_code", 500))
    code = "method_not_allowed" if status == 405 else "not_found"
    answer = ApiError(status, f"{request.method} {request.url.path[:200]}: {error}", code=code).response()
    answer.headers.update(getattr(error, "headers", None) or {})  # Allow, where the method is wrong
    return answer


async def answer_defect(request: Request, error: Exception) -> JSONResponse:
    """The same shape for what must not happen; the trace goes to the log."""
    return ApiError(500, "a defect of this server, see its log; please report it", code="defect").response()
