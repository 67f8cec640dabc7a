"""`headrace`: `serve` (the default) or `download`; turns every way to end into an exit status.

0   a signal ended it, or the download is done
1   it could not start or go on: one line says what to do
2   a usage error: one line names the flag

All else is imported late, so that a signal finds its handler from the start.
"""

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_launcher.config import LauncherConfig

DESCRIPTION = (
    "Serves a language model over HTTP. `headrace serve` is the same as `headrace`; `headrace download` "
    "fetches or converts the model and prints the folder it is in."
)
DOWNLOAD_DESCRIPTION = (
    "Fetches or converts the model that `--model-id` names, prints the folder it is in and ends. It takes "
    "all flags of `headrace`, and looks at those that say which model, and where it is kept."
)
VERBS = ("serve", "download")


async def download(config: "LauncherConfig") -> "Path":
    """The folder of the model's files, fetched and converted. Raises StartError or Stopped."""
    from headrace_launcher.errors import StartError
    from headrace_launcher.model_files import resolve
    from headrace_launcher.serve import handle_signals, private_folder

    stop = handle_signals()
    with private_folder() as scratch:
        files = await resolve(config, os.environ, scratch, stop)
        if files.folder.is_relative_to(scratch):
            raise StartError(
                "the cache for converted models cannot be written; name another with --model-cache"
            )
        return files.folder


def main() -> None:
    """Entry point; ends the process."""
    started = time.monotonic()
    # Until the event loop handles signals: nothing is started, so there is nothing to end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))

    import asyncio

    from headrace_proto import logs
    from headrace_proto.settings import load_or_exit

    from headrace_launcher.config import LauncherConfig
    from headrace_launcher.errors import StartError, Stopped
    from headrace_launcher.serve import serve

    argv = sys.argv[1:]
    verb = argv.pop(0) if argv[:1] and argv[0] in VERBS else "serve"
    program, description = "headrace", DESCRIPTION
    if verb == "download":
        program, description = "headrace download", DOWNLOAD_DESCRIPTION
    config = load_or_exit(LauncherConfig, argv, os.environ, program=program, description=description)
    logs.setup("launcher", config.json_output, config.log_level, is_output_taken=verb == "download")
    try:
        if verb == "download":
            print(asyncio.run(download(config)))
        else:
            asyncio.run(serve(config, os.environ, started))
    except StartError as error:
        print(f"headrace: error: {error}", file=sys.stderr)
        sys.exit(1)
    except Stopped:
        return


if __name__ == "__main__":
    main()
