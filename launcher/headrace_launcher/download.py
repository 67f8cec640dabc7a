"""Fetches a model from the Hugging Face Hub into its cache: `python -m headrace_launcher.download`.

A process of its own, so that the launcher can end it at once whatever the network does, and stays small
itself. Progress goes to standard error; the result is one JSON object on standard output: `{"folder": …}`, or
`{"error": …}` with a message of one line. Knows nothing of what the files mean.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from headrace_proto.process import die_with_parent
from headrace_proto.settings import load_or_exit, setting

from headrace_launcher.errors import StartError

WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
UNWANTED = ["*/*", "consolidated*", "*arguments*", "*args*", "*training*"]
"""Files in folders, a second copy of the weights in another layout, and what a training run has left."""


@dataclass(frozen=True, kw_only=True)
class DownloadSettings:
    """What the launcher passes on, by its own names."""

    model_id: str = setting(help="Model id on the Hub.")
    revision: str | None = setting(None, help="Branch, tag or commit.")
    huggingface_hub_cache: str | None = setting(None, help="Folder to keep it in.")
    hf_token: str | None = setting(None, help="Token for gated and private models.", secret=True)


def fetch(settings: DownloadSettings) -> Path:
    """The folder that holds the model's files. Raises StartError."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise StartError(
            "--model-id: models from the Hub need the package huggingface-hub: pip install huggingface-hub"
        ) from None
    where = f"--model-id {settings.model_id}"
    try:
        return Path(
            snapshot_download(
                settings.model_id,
                revision=settings.revision,
                cache_dir=settings.huggingface_hub_cache,
                token=settings.hf_token,
                allow_patterns=WANTED,
                ignore_patterns=UNWANTED,
            )
        )
    except errors.GatedRepoError:
        raise StartError(
            f"{where}: the Hub asks for a token that may read this gated model; set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise StartError(f"{where}: the model has no revision {settings.revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise StartError(
            f"{where}: no such folder here and no such model on the Hub, or a private one; "
            "check the spelling, or set HF_TOKEN"
        ) from None
    except errors.HFValidationError:
        raise StartError(f"{where}: neither a folder nor a file nor a model id of the Hub") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise StartError(
            f"{where}: no such folder here, not in the cache of the Hub, and the Hub cannot be reached; "
            "connect, or give a folder with the model's files"
        ) from None
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise StartError(f"{where}: the download failed: {reason}") from error


def main() -> None:
    """Prints the result; exit status 0 also for a failure that the result tells."""
    die_with_parent(os.environ)
    settings = load_or_exit(
        DownloadSettings, sys.argv[1:], os.environ, program="python -m headrace_launcher.download"
    )
    try:
        result = {"folder": str(fetch(settings))}
    except StartError as error:
        result = {"error": str(error)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
