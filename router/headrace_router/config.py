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
        128, help="Requests in the server at once; one more is answered with 429.", minimum=1, tgi=True
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
        help="Most tokens computed in one step. Default: 512 on a CPU, 4096 on a GPU.",
        minimum=1,
        tgi=True,
    )
    max_batch_total_tokens: int | None = setting(
        None, help="Tokens of KV cache to use. Default: as many as fit into memory.", minimum=1, tgi=True
    )
    max_batch_size: int | None = setting(
        None, help="Most sequences running at once. Default: no limit but memory.", minimum=1, tgi=True
    )
    waiting_served_ratio: float = setting(
        0.0,
        help="While requests run, waiting ones are admitted once they number at least this share of the "
        "running ones. 0 admits at once.",
        minimum=0,
        tgi=True,
    )
    max_waiting_tokens: int = setting(
        20,
        help="Admits waiting requests after so many steps, whatever `--waiting-served-ratio` says.",
        minimum=0,
        tgi=True,
    )
    payload_limit: int = setting(2_000_000, help="Largest request body in bytes.", minimum=1, tgi=True)
    api_key: str | None = setting(
        None,
        help="Key that inference requests must carry as `Authorization: Bearer KEY`.",
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
        if self.api_key == "":
            # Most likely a variable that was not set; to serve without a key by mistake is the worst answer.
            raise SettingsError("--api-key: must not be empty; leave it out to serve without a key")
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
