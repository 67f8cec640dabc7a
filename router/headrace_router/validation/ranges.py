"""What values the fields of a body may have, on each face, and the sampling parameters that they mean.

TGI's order and words on the native face (numbers are still the true ones), OpenAI's ranges on the other.
Pure functions of body, settings and limits; knows no text and no tokenizer.
"""

import secrets
from collections.abc import Iterable, Mapping

from headrace_router.config import RouterConfig
from headrace_router.errors import NATIVE_PREFIX, ModelNotFound
from headrace_router.scheduling.limits import Limits
from headrace_router.scheduling.request import SamplingParams
from headrace_router.schemas.decode import invalid
from headrace_router.schemas.openai import ChatRequest, CompletionRequest, SamplingRequest
from headrace_router.schemas.tgi import GenerateParameters, GenerateRequest

MAX_TOP_LOGPROBS = 20
MAX_STOP_CHARS = 4096
"""Of all stop strings of a request together."""

MIN_TEMPERATURE = 1e-5
"""Below it the most likely token is all there is; dividing by less leaves the range of float32."""
MAX_TEMPERATURE = 1e5
"""Of the native face. All tokens are as good as equally likely long before; float32 knows no 1e39."""
MIN_SHARE = 1e-6
"""Of probability, for top-p and typical-p: no model's most likely token has less, so one token is kept."""
MIN_PRIORITY, MAX_PRIORITY = -1000, 1000
MAX_SALT_CHARS = 256
"""Of `cache_salt`: enough for any digest or id."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-5, 1e5

NUM_SEEDS = 2**64
NUM_GENERATED_SEEDS = 2**53 - 2**10
"""Seeds below 2**53 survive in clients whose numbers are floats; copies count up from the first."""


def check_native(
    body: GenerateRequest,
    parameters: GenerateParameters,
    config: RouterConfig,
    limits: Limits,
    *,
    is_stream: bool,
) -> None:
    """All that can be said before tokenising. Raises `ValidationError`, `ModelNotFound`."""
    _check_best_of(body, parameters, config, is_stream=is_stream)
    # These messages are Text Generation Inference's to the letter, for clients know them by their words:
    # temperature 0 is taken all the same, and so is a `truncate` or a prompt of just the limit.
    if parameters.temperature is not None and not parameters.temperature >= 0:
        raise invalid("`temperature` must be strictly positive", "temperature")
    _check_range("temperature", parameters.temperature, 0.0, MAX_TEMPERATURE)
    _check_common(parameters)
    if parameters.top_p is not None and not 0 < parameters.top_p <= 1:
        raise invalid("`top_p` must be > 0.0 and <= 1.0", "top_p")
    _check_filters(parameters)
    if parameters.max_new_tokens is not None and parameters.max_new_tokens < 1:
        raise invalid("`max_new_tokens` must be strictly positive", "max_new_tokens")
    check_stop(parameters.stop, config)
    if parameters.seed is not None and not 0 <= parameters.seed < NUM_SEEDS:
        raise invalid(f"`seed` must be >= 0 and < 2**64. Given: {parameters.seed}", "seed")
    num_top = parameters.top_n_tokens or 0
    if not 0 <= num_top <= config.max_top_n_tokens:
        raise invalid(
            f"`top_n_tokens` must be >= 0 and <= {config.max_top_n_tokens}. Given: {num_top}", "top_n_tokens"
        )
    if not body.inputs:
        raise invalid("`inputs` cannot be empty", "inputs")
    most = limits.max_input_tokens
    if parameters.truncate is not None and not 1 <= parameters.truncate <= most:
        raise invalid(
            f"`truncate` must be strictly positive and less than {most}. Given: {parameters.truncate}",
            "truncate",
        )
    _check_turn(parameters)
    if parameters.watermark:
        raise invalid("`watermark` is not supported", "watermark")
    if parameters.adapter_id is not None:
        name = parameters.adapter_id
        raise ModelNotFound(f"{NATIVE_PREFIX}the adapter `{name}` does not exist", param="adapter_id")


def _check_best_of(
    body: GenerateRequest, parameters: GenerateParameters, config: RouterConfig, *, is_stream: bool
) -> None:
    best_of = parameters.best_of if parameters.best_of is not None else 1
    if is_stream:
        if best_of != 1:
            raise invalid("`best_of` != 1 is not supported when streaming tokens", "best_of")
        if parameters.decoder_input_details:
            raise invalid(
                "`decoder_input_details` == true is not supported when streaming tokens",
                "decoder_input_details",
            )
    elif best_of > 1 and config.max_best_of == 1:
        raise invalid("`best_of` != 1 is not allowed for this endpoint", "best_of")
    elif not 0 <= best_of <= config.max_best_of:
        raise invalid(f"`best_of` must be > 0 and <= {config.max_best_of}. Given: {best_of}", "best_of")
    if best_of > 1 and not is_sampled(body):
        raise invalid("you must use sampling when `best_of` is > 1", "best_of")


def check_openai(body: SamplingRequest, config: RouterConfig, limits: Limits) -> None:
    """What chat and completions have in common. Raises `ValidationError`."""
    check_supported(body)
    _check_stream_options(body)
    _check_range("temperature", body.temperature, 0.0, 2.0)
    _check_common(body)
    _check_range("top_p", body.top_p, 0.0, 1.0)
    _check_range("min_p", body.min_p, 0.0, 1.0)
    _check_filters(body)
    _check_range("n", body.n, 1, config.max_n)
    check_stop(body.stop, config)
    if body.seed is not None and not -NUM_SEEDS // 2 <= body.seed < NUM_SEEDS:
        raise invalid(f"`seed` must be a 64-bit integer. Given: {body.seed}", "seed")
    if body.min_tokens is not None and body.min_tokens < 0:
        raise invalid(f"`min_tokens` must be >= 0. Given: {body.min_tokens}", "min_tokens")
    check_ids("stop_token_ids", body.stop_token_ids or (), limits.vocab_size)
    _check_range("truncate_prompt_tokens", body.truncate_prompt_tokens, 1, limits.max_input_tokens)
    _check_logit_bias(body.logit_bias or {}, limits.vocab_size)
    _check_turn(body)


def check_chat(body: ChatRequest) -> None:
    """The fields of chat alone. Raises `ValidationError`."""
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("`top_logprobs` needs `logprobs: true`", "top_logprobs")
    _check_range("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)
    wanted = given_max_tokens(body)
    if wanted is not None and wanted < 1:
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise invalid(f"`{name}` must be >= 1. Given: {wanted}", name)


def check_completion(body: CompletionRequest, config: RouterConfig) -> None:
    """The fields of completions alone. Raises `ValidationError`."""
    _check_range("logprobs", body.logprobs, 0, MAX_TOP_LOGPROBS)
    _check_range("best_of", body.best_of, 1, config.max_n)
    num_choices = body.n or 1
    if body.best_of is not None and body.best_of < num_choices:
        raise invalid(f"`best_of` must be at least `n`, {num_choices}. Given: {body.best_of}", "best_of")
    if body.stream and body.best_of is not None and body.best_of > num_choices:
        raise invalid(
            "`best_of` greater than `n` cannot be streamed: which is best shows only at the end", "best_of"
        )
    least = 0 if body.echo else 1
    if body.max_tokens is not None and body.max_tokens < least:
        hint = "" if body.echo else " (0 only with `echo`)"
        raise invalid(f"`max_tokens` must be >= {least}{hint}. Given: {body.max_tokens}", "max_tokens")


def check_supported(body: SamplingRequest) -> None:
    """Refuses by name what would change the answer and is not there. Raises `ValidationError`."""
    name = body.unsupported()
    if name is not None:
        raise invalid(f"`{name}` is not supported", name)


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raises `ValidationError` for the first id that the model does not have."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise invalid(
                f"`{name}`: token id {token_id} is not in the vocabulary of {vocab_size} tokens", name
            )


def check_stop(stop: str | list[str] | None, config: RouterConfig) -> None:
    """Raises `ValidationError` for too many, too long or empty stop strings."""
    strings = listed(stop)
    most = config.max_stop_sequences
    if len(strings) > most:
        raise invalid(f"`stop` supports up to {most} stop sequences. Given: {len(strings)}", "stop")
    if not all(strings):
        raise invalid("`stop` cannot hold an empty string", "stop")
    num_chars = sum(map(len, strings))
    if num_chars > MAX_STOP_CHARS:
        raise invalid(f"`stop` supports up to {MAX_STOP_CHARS} characters. Given: {num_chars}", "stop")


def listed(stop: str | list[str] | None) -> list[str]:
    """`stop` in one form."""
    return [stop] if isinstance(stop, str) else stop or []


def given_max_tokens(body: ChatRequest) -> int | None:
    """What a chat asks for under either name. Raises `ValidationError` if both are there and differ."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid(
            f"`max_tokens` ({old}) and `max_completion_tokens` ({new}) differ: give one", "max_tokens"
        )
    return old if new is None else new


def is_sampled(body: GenerateRequest) -> bool:
    """TGI's rule: without `parameters` the answer is sampled, with them only if they ask for it."""
    given = body.parameters
    if given is None:
        return True
    return (
        bool(given.do_sample)
        or given.temperature not in (None, 0, 1)
        or given.top_k not in (None, 0, -1)
        or given.top_p not in (None, 1)
        or given.typical_p not in (None, 1)
    )


def native_sampling(body: GenerateRequest, vocab_size: int) -> SamplingParams:
    """Of a body that has been checked."""
    return _sampling(body.parameters or GenerateParameters(), vocab_size, is_greedy=not is_sampled(body))


def openai_sampling(body: SamplingRequest, vocab_size: int) -> SamplingParams:
    """Of a body that has been checked."""
    bias = tuple((int(key), value) for key, value in (body.logit_bias or {}).items())
    return _sampling(body, vocab_size, is_greedy=False, min_p=body.min_p or 0.0, logit_bias=bias)


def _sampling(
    given: GenerateParameters | SamplingRequest,
    vocab_size: int,
    *,
    is_greedy: bool,
    min_p: float = 0.0,
    logit_bias: tuple[tuple[int, float], ...] = (),
) -> SamplingParams:
    temperature = 1.0 if given.temperature is None else given.temperature
    is_greedy = is_greedy or temperature < MIN_TEMPERATURE
    top_p = 1.0 if given.top_p is None else given.top_p
    typical_p = 1.0 if given.typical_p is None else max(given.typical_p, MIN_SHARE)
    top_k = max(given.top_k or 0, 0)
    if top_p <= MIN_SHARE:
        top_k, top_p = 1, 1.0
    return SamplingParams(
        temperature=0.0 if is_greedy else temperature,
        top_k=top_k if top_k < vocab_size and not is_greedy else 0,
        top_p=1.0 if is_greedy else top_p,
        min_p=0.0 if is_greedy else min_p,
        typical_p=1.0 if is_greedy else typical_p,
        repetition_penalty=1.0 if given.repetition_penalty is None else given.repetition_penalty,
        presence_penalty=given.presence_penalty or 0.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        seed=secrets.randbelow(NUM_GENERATED_SEEDS) if given.seed is None else given.seed % NUM_SEEDS,
        logit_bias=logit_bias,
    )


def _check_range(name: str, value: float | None, lowest: float, highest: float) -> None:
    # So written that NaN fails too.
    if value is not None and not lowest <= value <= highest:
        raise invalid(f"`{name}` must be >= {lowest} and <= {highest}. Given: {value}", name)


def _check_common(given: GenerateParameters | SamplingRequest) -> None:
    penalty = given.repetition_penalty
    if penalty is not None and not penalty > 0:
        raise invalid("`repetition_penalty` must be strictly positive", "repetition_penalty")
    _check_range("repetition_penalty", penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    for name in ("frequency_penalty", "presence_penalty"):
        value = getattr(given, name)
        if value is not None and not -2 <= value <= 2:
            raise invalid(f"`{name}` must be >= -2.0 and <= 2.0", name)


def _check_turn(given: GenerateParameters | SamplingRequest) -> None:
    """What says when a request comes to its turn, and whose prefixes it shares."""
    _check_range("priority", given.priority, MIN_PRIORITY, MAX_PRIORITY)
    salt = given.cache_salt
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARS:
        raise invalid(
            f"`cache_salt` must have 1 to {MAX_SALT_CHARS} characters. Given: {len(salt)}", "cache_salt"
        )


def _check_stream_options(body: SamplingRequest) -> None:
    options = body.stream_options
    if options is None:
        return
    if not body.stream:
        raise invalid("`stream_options` is allowed only with `stream: true`", "stream_options")
    if options.include_obfuscation:
        name = "stream_options.include_obfuscation"
        raise invalid(f"`{name}` is not supported: leave it out or send false", name)


def _check_filters(given: GenerateParameters | SamplingRequest) -> None:
    if given.typical_p is not None and not 0 < given.typical_p <= 1:
        raise invalid("`typical_p` must be > 0.0 and <= 1.0", "typical_p")
    if given.top_k is not None and given.top_k < -1:
        raise invalid(
            f"`top_k` must be strictly positive, or 0 or -1 for none. Given: {given.top_k}", "top_k"
        )


def _check_logit_bias(biases: Mapping[str, float], vocab_size: int) -> None:
    named: dict[int, str] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit()):
            raise invalid(f"`logit_bias`: the key {key!r} is not a token id", "logit_bias")
        # A number of that many digits would take long to read, and is no id anyway.
        if len(key) > 18 or int(key) >= vocab_size:
            raise invalid(
                f"`logit_bias`: token id {key[:18]} is not in the vocabulary of {vocab_size} tokens",
                "logit_bias",
            )
        if not -100 <= bias <= 100:
            raise invalid(f"`logit_bias` must be >= -100 and <= 100. Given: {bias} for {key}", "logit_bias")
        if (former := named.setdefault(int(key), key)) != key:
            raise invalid(f"`logit_bias`: {former!r} and {key!r} are one token id: give one", "logit_bias")
