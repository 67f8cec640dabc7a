"""From bodies to requests: the only place where a `Request` is made.

    body ──ranges──► render, tokenise (in threads) ──lengths──► Job

Ranges are checked in `ranges.py`; here are what needs the tokenizer, the template and the model's limits. No
text is tokenised and no template rendered on the event loop. Knows no HTTP, and not how a request is run.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from headrace_router.config import RouterConfig
from headrace_router.errors import (
    NATIVE_PREFIX,
    ContextLengthExceeded,
    ModelNotFound,
    TemplateError,
    Unavailable,
    context_length_exceeded,
)
from headrace_router.scheduling.limits import Limits
from headrace_router.scheduling.request import Request
from headrace_router.schemas.decode import invalid
from headrace_router.schemas.openai import ChatRequest, CompletionRequest, SamplingRequest, base_model_names
from headrace_router.schemas.tgi import GenerateParameters, GenerateRequest
from headrace_router.text.chat_template import RESERVED_VARIABLES, ChatTemplate
from headrace_router.text.output import OutputOptions
from headrace_router.text.tokenizer import Encoding, Tokenizer
from headrace_router.validation import ranges

DEFAULT_COMPLETION_TOKENS = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt. Copies for `n` and `best_of` are made by whoever submits it."""

    request: Request
    options: OutputOptions
    prompt: str
    """The final text, before truncation."""
    num_cut_chars: int = 0
    """Leading characters of `prompt` whose tokens were cut off; 0 unless the prompt's tokens are shown."""


class Validator:
    """Turns bodies into jobs. `limits` gives None while they are not known yet."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        limits: Callable[[], Limits | None],
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._template = template
        self._current_limits = limits
        self._pool = ThreadPoolExecutor(config.validation_workers, thread_name_prefix="validation")
        self._model_id = config.model_id or config.tokenizer_name
        self._model_names = {*base_model_names(self._model_id), config.tokenizer_name, self._model_id}

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def generate(self, body: GenerateRequest, *, is_stream: bool) -> Job:
        """Raises `ValidationError`, `ModelNotFound`, `Unavailable`."""
        limits = self._limits()
        parameters = body.parameters or GenerateParameters()
        ranges.check_native(body, parameters, self._config, limits, is_stream=is_stream)

        def tokenize() -> Job:
            ids = self._encode(
                body.inputs, "inputs", limits, truncate=parameters.truncate, salt=parameters.cache_salt
            )
            max_new_tokens = _native_budget(len(ids), parameters.max_new_tokens, limits)
            if parameters.grammar is not None:
                raise invalid("grammar is not supported", "grammar")
            stop, stop_token_ids = self._stop(parameters.stop, limits)
            request = Request(
                prompt_ids=tuple(ids),
                sampling=ranges.native_sampling(body, limits.vocab_size),
                max_new_tokens=max_new_tokens,
                eos_token_ids=self._eos_token_ids(limits),
                stop_token_ids=stop_token_ids,
                top_n_tokens=parameters.top_n_tokens or 0,
                prompt_logprobs=bool(parameters.decoder_input_details),
                priority=parameters.priority or 0,
                cache_salt=parameters.cache_salt or "",
            )
            return Job(request=request, options=OutputOptions(stop=stop, keeps_stop=True), prompt=body.inputs)

        return await self.in_pool(tokenize)

    async def chat(self, body: ChatRequest) -> Job:
        """Raises as `generate`, and `TemplateError`."""
        limits = self._limits()
        self._check_model(body)
        ranges.check_openai(body, self._config, limits)
        ranges.check_chat(body)

        def tokenize() -> Job:
            prompt = self._render(body)
            ids = self._encode(
                prompt,
                "messages",
                limits,
                truncate=body.truncate_prompt_tokens,
                salt=body.cache_salt,
                add_special_tokens=False,
            )
            wanted = ranges.given_max_tokens(body)
            if wanted is None:
                wanted = max(limits.max_total_tokens - len(ids), 1)
            return self._openai_job(body, "messages", prompt, ids, wanted, limits)

        return await self.in_pool(tokenize)

    async def completion(self, body: CompletionRequest) -> list[Job]:
        """One job for each prompt, in their order. Raises as `generate`."""
        limits = self._limits()
        self._check_model(body)
        ranges.check_openai(body, self._config, limits)
        ranges.check_completion(body, self._config)
        prompts = body.prompts()
        most = self._config.max_client_batch_size
        if len(prompts) > most:
            raise invalid(
                f"Number of prompts exceeds the maximum allowed batch size of {most}. Given: {len(prompts)}",
                "prompt",
            )

        def tokenize() -> list[Job]:
            return [self._completion_job(body, prompt, limits) for prompt in prompts]

        return await self.in_pool(tokenize)

    async def tokenize(self, text: str) -> Encoding:
        """The tokens of a text, and those that the tokenizer adds to it."""
        return await self.in_pool(lambda: self._tokenizer.encode(text, add_special_tokens=True))

    async def chat_tokenize(self, body: ChatRequest) -> tuple[str, Encoding]:
        """The prompt that a chat would be answered from, and its tokens. Raises as `chat`."""
        self._check_model(body)
        ranges.check_supported(body)

        def tokenize() -> tuple[str, Encoding]:
            prompt = self._render(body)
            return prompt, self._tokenizer.encode(prompt, add_special_tokens=False)

        return await self.in_pool(tokenize)

    async def detokenize(self, ids: list[int]) -> str:
        """The text of `ids`, special tokens left out. Raises `ValidationError`."""
        ranges.check_ids("ids", ids, self._tokenizer.vocab_size)
        return await self.in_pool(lambda: self._tokenizer.decode(ids, skip_special_tokens=True))

    async def in_pool(self, work: Callable[[], T]) -> T:
        """Does what takes long in one of the threads, which are as many as `--validation-workers` says."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    # ---- what needs a thread

    def _render(self, body: ChatRequest) -> str:
        """The prompt of a chat. Raises `TemplateError`, or `ValidationError` for ill-shaped messages."""
        if not body.messages:
            raise invalid("`messages` cannot be empty", "messages")
        messages = [message.to_template(f"messages[{index}]") for index, message in enumerate(body.messages)]
        kwargs = body.chat_template_kwargs or {}
        for name in kwargs:
            if name in RESERVED_VARIABLES:
                raise invalid(
                    f"`chat_template_kwargs` cannot set `{name}`: it has a meaning of its own",
                    "chat_template_kwargs",
                )
        continues = bool(body.continue_final_message)
        if continues and body.add_generation_prompt:
            raise invalid(
                "`add_generation_prompt` and `continue_final_message` contradict each other: give one",
                "continue_final_message",
            )
        if self._template is None:
            raise TemplateError("Template error: template not found", param="messages")
        return self._template.render(
            messages,
            bos_token=self._tokenizer.bos_token,
            eos_token=self._tokenizer.eos_token,
            add_generation_prompt=body.add_generation_prompt is not False and not continues,
            continue_final_message=continues,
            kwargs=kwargs,
        )

    def _encode(
        self,
        text: str,
        source: str,
        limits: Limits,
        *,
        truncate: int | None,
        salt: str | None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids, of which `truncate` keeps the last. Refuses cheaply what is far too long."""
        least = self._tokenizer.least_tokens(text)
        if truncate is None and least > limits.max_input_tokens:
            raise _prompt_too_long(source, f"at least {least}", limits)
        # Who wants nothing computed to be found again does not want to find it tokenised either.
        shared = (salt or "") if self._config.prefix_caching else None
        ids = self._tokenizer.encode_ids(text, add_special_tokens, shared)
        if not ids:
            raise invalid(f"`{source}` cannot be empty", source)
        if max(ids) >= limits.vocab_size:
            raise invalid(
                f"`{source}` has a token that the model does not know: {max(ids)} of {limits.vocab_size}",
                source,
            )
        return ids if truncate is None else ids[-truncate:]

    def _completion_job(self, body: CompletionRequest, prompt: str | list[int], limits: Limits) -> Job:
        truncate = body.truncate_prompt_tokens
        if not prompt:
            raise invalid("`prompt` cannot be empty", "prompt")
        if isinstance(prompt, str):
            text = prompt
            ids = self._encode(prompt, "prompt", limits, truncate=truncate, salt=body.cache_salt)
        else:
            ranges.check_ids("prompt", prompt, limits.vocab_size)
            text = self._tokenizer.decode(prompt, skip_special_tokens=False)
            ids = prompt if truncate is None else prompt[-truncate:]
        wanted = body.max_tokens
        if wanted is None:
            wanted = max(min(DEFAULT_COMPLETION_TOKENS, limits.max_total_tokens - len(ids)), 1)
        job = self._openai_job(body, "prompt", text, ids, wanted, limits)
        if truncate is None or not job.request.prompt_logprobs:
            return job
        return replace(job, num_cut_chars=self._num_cut_chars(prompt, len(ids)))

    def _num_cut_chars(self, prompt: str | list[int], num_kept: int) -> int:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, add_special_tokens=True).offsets[-num_kept][0]
        # A character that the cut goes through begins with the kept tokens.
        cut = self._tokenizer.decode(prompt[:-num_kept], skip_special_tokens=False)
        return len(cut.rstrip("\N{REPLACEMENT CHARACTER}"))

    def _openai_job(
        self, body: SamplingRequest, source: str, prompt: str, ids: list[int], wanted: int, limits: Limits
    ) -> Job:
        _check_openai_budget(source, len(ids), wanted, limits)
        min_tokens = body.min_tokens or 0
        if min_tokens > wanted:
            raise invalid(f"`min_tokens` ({min_tokens}) is more than the most tokens, {wanted}", "min_tokens")
        stop, stop_token_ids = self._stop(body.stop, limits)
        is_scored = isinstance(body, CompletionRequest) and bool(body.echo) and body.logprobs is not None
        num_top = body.top_logprobs if isinstance(body, ChatRequest) else None
        if isinstance(body, CompletionRequest):
            num_top = body.logprobs
        request = Request(
            prompt_ids=tuple(ids),
            sampling=ranges.openai_sampling(body, limits.vocab_size),
            max_new_tokens=wanted,
            min_new_tokens=min_tokens,
            eos_token_ids=frozenset() if body.ignore_eos else self._eos_token_ids(limits),
            stop_token_ids=stop_token_ids | frozenset(body.stop_token_ids or ()),
            top_n_tokens=num_top or 0,
            # With nothing to generate, the prompt is all that is computed.
            prompt_logprobs=is_scored or wanted == 0,
            prompt_top_n_tokens=(num_top or 0) if is_scored else 0,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
        )
        return Job(request=request, options=OutputOptions(stop=stop), prompt=prompt)

    # ---- what needs the model

    def _limits(self) -> Limits:
        limits = self._current_limits()
        if limits is None:
            raise Unavailable("the model is not ready yet")
        return limits

    def _check_model(self, body: SamplingRequest) -> None:
        name = body.model
        if name is not None and name not in self._model_names:
            raise ModelNotFound(
                f"{NATIVE_PREFIX}the model `{name}` does not exist",
                param="model",
                openai_message=f"The model `{name}` does not exist: this server has `{self._model_id}`",
            )

    def _eos_token_ids(self, limits: Limits) -> frozenset[int]:
        return _known(limits.eos_token_ids | self._tokenizer.eos_token_ids, limits)

    def _stop(self, stop: str | list[str] | None, limits: Limits) -> tuple[tuple[str, ...], frozenset[int]]:
        """Stop strings, and the ids of those that spell a special token: no text ever holds them."""
        special = {text: self._tokenizer.special_id(text) for text in ranges.listed(stop)}
        strings = tuple(text for text, token_id in special.items() if token_id is None)
        return strings, _known((token_id for token_id in special.values() if token_id is not None), limits)


def _known(token_ids: Iterable[int], limits: Limits) -> frozenset[int]:
    """Those that the model can generate; its files may name others, and a step may not."""
    return frozenset(token_id for token_id in token_ids if token_id < limits.vocab_size)


def _native_budget(num_prompt: int, wanted: int | None, limits: Limits) -> int:
    """The number of new tokens, as asked for or as many as fit. Raises `ContextLengthExceeded`."""
    most = limits.max_total_tokens
    max_new_tokens = max(most - num_prompt, 0) if wanted is None else wanted
    if num_prompt + max_new_tokens > most:
        raise context_length_exceeded(
            num_prompt=num_prompt, num_new=max_new_tokens, most=most, source="inputs"
        )
    if num_prompt > limits.max_input_tokens:
        raise _prompt_too_long("inputs", str(num_prompt), limits)
    return max_new_tokens


def _check_openai_budget(source: str, num_prompt: int, wanted: int, limits: Limits) -> None:
    if num_prompt > limits.max_input_tokens:
        raise _prompt_too_long(source, str(num_prompt), limits)
    most = limits.max_total_tokens
    if num_prompt + wanted > most:
        raise context_length_exceeded(num_prompt=num_prompt, num_new=wanted, most=most, source=source)


def _prompt_too_long(source: str, num_prompt: str, limits: Limits) -> ContextLengthExceeded:
    most = limits.max_input_tokens
    return ContextLengthExceeded(
        f"{NATIVE_PREFIX}`{source}` must have less than {most} tokens. Given: {num_prompt}",
        param=source,
        openai_message=(
            f"This model's maximum context length is {limits.max_total_tokens} tokens, of which a prompt may "
            f"have {most}. However, your {source} resulted in {num_prompt} tokens. Please reduce the length "
            f"of the {source}."
        ),
    )
