"""Every error a caller can meet, and why the process cannot start.

    HeadraceError                500 internal
    ├── InvalidRequest                                 the caller's fault; only its subclasses are raised
    │   ├── BadRequest           400 bad_request       not JSON, not UTF-8
    │   ├── Unauthorized         401 unauthorized
    │   ├── NotFound             404 not_found
    │   │   └── ModelNotFound    404 model_not_found (422 validation on the native face)
    │   ├── MethodNotAllowed     405 method_not_allowed
    │   ├── RequestTimeout       408 request_timeout   the body stopped coming
    │   ├── PayloadTooLarge      413 payload_too_large
    │   ├── UnsupportedMediaType 415 unsupported_media_type
    │   ├── ValidationError      422 validation        (400 on the OpenAI face)
    │   │   ├── ContextLengthExceeded                  (400, code context_length_exceeded)
    │   │   └── TemplateError    422 template_error
    │   └── HeadTooLarge         431 head_too_large
    ├── GenerationError          424 generation        the step that held the request failed (500 on OpenAI)
    ├── Overloaded               429 overloaded        with retry-after
    ├── TimedOut                 504 timeout           `--request-timeout` has passed
    └── Unavailable              503 unhealthy         shard gone, starting or draining, with retry-after

    StartupError                 one line, exit status 1
    └── LimitsError              settings contradict what the model or the memory allows

A request's error has one message, in the words of the native face, and optionally another for the OpenAI
face. `api/tgi.py` and `api/openai.py` render it in the envelope of their face.
"""

NATIVE_PREFIX = "Input validation error: "
"""How the native face begins the message of every `ValidationError`."""


def counted(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class HeadraceError(Exception):
    """Root of the tree; also what an unforeseen fault of one request becomes."""

    status = 500
    openai_status: int | None = None
    """When it differs from `status`."""
    error_type = "internal"
    openai_type = "server_error"
    code: str | None = None
    cause = "incomplete"
    """The `err` under which `tgi_request_failure` counts a request that ends so."""
    retry_after_seconds: int | None = None

    def __init__(self, message: str, *, param: str | None = None, openai_message: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """The field at fault, as a path."""
        self.openai_message = openai_message or message


class InvalidRequest(HeadraceError):
    """The request itself is at fault, and would fail again."""

    openai_type = "invalid_request_error"
    cause = "validation"


class BadRequest(InvalidRequest):
    """The body cannot be read as JSON."""

    status = 400
    error_type = "bad_request"


class Unauthorized(InvalidRequest):
    """No key, or a wrong one."""

    status = 401
    error_type = "unauthorized"
    code = "invalid_api_key"


class NotFound(InvalidRequest):
    """No such route."""

    status = 404
    error_type = "not_found"


class ModelNotFound(NotFound):
    """The request names a model or adapter that is not served."""

    status = 422
    openai_status = 404
    error_type = "validation"
    code = "model_not_found"


class MethodNotAllowed(InvalidRequest):
    """The route exists, for another method."""

    status = 405
    error_type = "method_not_allowed"


class RequestTimeout(InvalidRequest):
    """The client has begun a body and does not go on."""

    status = 408
    error_type = "request_timeout"


class PayloadTooLarge(InvalidRequest):
    """The body is over `--payload-limit`."""

    status = 413
    error_type = "payload_too_large"


class UnsupportedMediaType(InvalidRequest):
    """The body is not declared as JSON, or is compressed."""

    status = 415
    error_type = "unsupported_media_type"


class ValidationError(InvalidRequest):
    """A field is of the wrong shape, out of range or not supported."""

    status = 422
    openai_status = 400
    error_type = "validation"


class ContextLengthExceeded(ValidationError):
    """Prompt and answer do not fit into the context."""

    code = "context_length_exceeded"


def context_length_exceeded(
    *, num_prompt: int, num_new: int, most: int, source: str = "prompt"
) -> ContextLengthExceeded:
    """For `num_prompt` tokens in the field `source` and `num_new` to generate, where `most` are possible."""
    return ContextLengthExceeded(
        f"{NATIVE_PREFIX}`inputs` tokens + `max_new_tokens` must be <= {most}. Given: {num_prompt} `inputs` "
        f"tokens and {num_new} `max_new_tokens`",
        param=source,
        openai_message=(
            f"This model's maximum context length is {most} tokens. However, you requested "
            f"{num_prompt + num_new} tokens ({num_prompt} in the {source}, {num_new} in the completion). "
            f"Please reduce the length of the {source} or completion."
        ),
    )


class TemplateError(ValidationError):
    """The chat template is missing, or refused the messages."""

    error_type = "template_error"
    cause = "template"


class HeadTooLarge(InvalidRequest):
    """The request line and the headers do not end where they should."""

    status = 431
    error_type = "head_too_large"


class GenerationError(HeadraceError):
    """The step that held the request failed."""

    status = 424
    openai_status = 500
    error_type = "generation"
    cause = "generation"


class Overloaded(HeadraceError):
    """`--max-concurrent-requests` are in the server already, or so many wait that no more may."""

    status = 429
    error_type = "overloaded"
    openai_type = "rate_limit_error"
    code = "rate_limit_exceeded"
    cause = "overloaded"
    retry_after_seconds = 1


class TimedOut(HeadraceError):
    """The answer was not complete after `--request-timeout` seconds."""

    status = 504
    error_type = "timeout"
    openai_type = "timeout_error"
    code = "timeout"
    cause = "timeout"


class Unavailable(HeadraceError):
    """The shard is gone or not there yet, or the server is going down."""

    status = 503
    error_type = "unhealthy"
    openai_type = "service_unavailable"
    cause = "unavailable"
    retry_after_seconds = 5


class StartupError(Exception):
    """A model's folder cannot be served. One line: which file, what is wrong, what to do."""


class LimitsError(StartupError):
    """Settings contradict what the model or the memory allows. One line with the numbers and the cure."""
