"""Every setting of the router: default, range, help. `RouterSettings` are also flags of the launcher."""

from dataclasses import dataclass

from headrace_proto.logs import LEVELS
from headrace_proto.settings import SettingsError, setting


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """What a user may set, whether the router is started by hand or by the launcher."""

    hostname: str = setting("0.0.0.0", help="Address to listen on.")
    port: int = setting(3000, help="Port to listen on.", minimum=0, maximum=65535, short="-p", tgi=True)
    prometheus_port: int | None = setting(
        None, help="Serves `/metrics` on this port too.", minimum=1, maximum=65535, tgi=True
    )
    validation_workers: int = setting(
        2, help="Threads that tokenise prompts.", minimum=1, maximum=1024, tgi=True
    )
    tokenizer_config_path: str | None = setting(
        None,
        help="A tokenizer_config.json (chat template, special tokens) to use instead of the model's.",
        tgi=True,
    )
    max_concurrent_requests: int = setting(
        128,
        help="Answers under way at once, waiting or running; each of `n`, `best_of` and several prompts "
        "counts. What would exceed it is answered with 429.",
        minimum=1,
        tgi=True,
    )
    max_queued_requests: int | None = setting(
        None,
        help="Answers that may wait for their first step; a request that would exceed them is answered with "
        "429, unless nobody waits. Default: as many as `--max-concurrent-requests` lets in.",
        minimum=1,
    )
    max_queued_tokens: int | None = setting(
        None,
        help="Prompt tokens that may wait for their first step; a request that would exceed them is answered "
        "with 429, unless nobody waits. Default: no limit.",
        minimum=1,
    )
    request_timeout: float | None = setting(
        None,
        help="Seconds from the arrival of a request to the end of its answer; then it ends with 504, or with "
        "an error event in a stream. Default: no limit.",
        minimum=0.001,
    )
    max_best_of: int = setting(2, help="Largest `best_of` on the native face.", minimum=1, tgi=True)
    max_n: int = setting(16, help="Largest `n` and `best_of` on the OpenAI face.", minimum=1)
    max_stop_sequences: int = setting(4, help="Stop strings per request.", minimum=0, tgi=True)
    max_top_n_tokens: int = setting(5, help="Alternatives per token on the native face.", minimum=0, tgi=True)
    max_client_batch_size: int = setting(
        4, help="Prompts in one `/v1/completions` request.", minimum=1, tgi=True
    )
    max_input_tokens: int | None = setting(
        None,
        help="Longest prompt in tokens. Default: one less than `--max-total-tokens`.",
        minimum=1,
        aliases=("--max-input-length",),
        tgi=True,
    )
    max_total_tokens: int | None = setting(
        None,
        help="Longest prompt and answer together. Default: the model's context, or what the KV cache holds.",
        minimum=2,
        tgi=True,
    )
    max_batch_prefill_tokens: int | None = setting(
        None,
        help="Most tokens computed in one step: one for each running answer, the rest of prompts. Longer "
        "prompts are computed in parts. Sets the memory that a step needs beside weights and cache. "
        "Default: 512 on a CPU, 4096 on a GPU.",
        minimum=1,
        tgi=True,
    )
    max_batch_total_tokens: int | None = setting(
        None,
        help="Tokens of the KV cache, which running answers and cached prefixes share. "
        "Default: as many as fit into memory.",
        minimum=1,
        tgi=True,
    )
    max_batch_size: int | None = setting(
        None,
        help="Most answers running at once; further ones wait. "
        "Default: `--max-concurrent-requests`, as far as the KV cache has room.",
        minimum=1,
        tgi=True,
    )
    waiting_served_ratio: float = setting(
        0.0,
        help="While answers run, waiting ones join only once they number at least this share of the running "
        "ones: fewer interruptions, later first tokens. 0 lets them join at once.",
        minimum=0,
        tgi=True,
    )
    max_waiting_tokens: int = setting(
        20,
        help="Steps that somebody may wait because of `--waiting-served-ratio`; then waiting answers join "
        "whatever their number. Without that ratio it has no effect.",
        minimum=0,
        tgi=True,
    )
    prefix_caching: bool = setting(
        True,
        help="Keeps the KV of finished prompts and answers while there is room, so that a prompt which "
        "begins like an earlier one computes only what is new.",
        tgi=True,
    )
    max_step_slowdown: float = setting(
        3.0,
        help="Parts of prompts are made so small that a step with one takes at most so many times what the "
        "running answers alone would take, as far as parts of one KV block allow: such a part is always let "
        "in. At least 1, or 0 for no bound: prompts sooner, answers jerkily.",
        minimum=0,
    )
    payload_limit: int = setting(2_000_000, help="Largest request body in bytes.", minimum=1, tgi=True)
    api_key: tuple[str, ...] = setting(
        (),
        help="A key that inference requests must carry as `Authorization: Bearer KEY` (repeatable). Those "
        "who wait get fair turns by key.",
        tgi=True,
        secret=True,
    )
    cors_allow_origin: tuple[str, ...] = setting(
        (), help="Allowed origin (repeatable). Default: any origin.", tgi=True
    )
    keep_alive_seconds: float = setting(
        15.0, help="Silence on an event stream after which a comment is sent.", minimum=0.1
    )
    graceful_termination_timeout: float = setting(
        90.0,
        help="Seconds that running requests are given to end after SIGTERM.",
        minimum=0,
        short="-g",
        tgi=True,
    )
    shard_timeout: float = setting(
        60.0,
        help="Seconds after which a step without an answer means that the shard is frozen; ten times what "
        "the largest step took at warm-up, if that is more.",
        minimum=0.1,
    )
    json_output: bool = setting(False, help="Log lines are JSON objects.", tgi=True)
    log_level: str = setting(
        "info", help="Log lines below this level are not written.", choices=tuple(LEVELS), tgi=True
    )

    def __post_init__(self) -> None:
        if "" in self.api_key:
            # Most likely a variable that was not set; to serve without a key by mistake is the worst answer.
            raise SettingsError("--api-key: must not be empty; leave it out to serve without a key")
        if 0 < self.max_step_slowdown < 1:
            raise SettingsError(
                f"--max-step-slowdown: must be at least 1, or 0 for no bound, got {self.max_step_slowdown:g}"
                ": no step with a prompt in it is faster than one without"
            )
        highest = self.max_total_tokens
        if highest is None:
            return
        if self.max_input_tokens is not None and self.max_input_tokens >= highest:
            raise SettingsError(
                f"--max-input-tokens: must be less than --max-total-tokens ({highest}), "
                f"got {self.max_input_tokens}"
            )
        if self.max_batch_total_tokens is not None and highest > self.max_batch_total_tokens:
            raise SettingsError(
                f"--max-total-tokens: must be at most --max-batch-total-tokens "
                f"({self.max_batch_total_tokens}), got {highest}"
            )


@dataclass(frozen=True, kw_only=True)
class RouterConfig(RouterSettings):
    """All settings of a router process."""

    shard: str = setting(
        "unix:///tmp/headrace-0", help="Address of the shard: `unix:///path` or `tcp://host:port`."
    )
    tokenizer_name: str = setting(help="Folder with the model's tokenizer.json and config files.")
    model_id: str | None = setting(
        None, help="Name of the model in `/info` and `/v1/models`. Default: the folder.", tgi=True
    )
    revision: str | None = setting(
        None, help="Revision of the model. `/info` shows it when it is a commit.", tgi=True
    )
