"""`headrace`: `serve` (the default) or `download`; turns every way to end into an exit status.

0   a signal ended it, or the download is done
1   it could not start or go on: one line says what to do
2   a usage error: one line names the flag
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from headrace_proto import logs
from headrace_proto.settings import load_or_exit

from headrace_launcher.config import LauncherConfig
from headrace_launcher.errors import StartError, Stopped
from headrace_launcher.model_files import resolve
from headrace_launcher.serve import handle_signals, private_folder, serve

DESCRIPTION = (
    "Serves a language model over HTTP. `headrace serve` is the same as `headrace`; `headrace download` "
    "fetches or converts the model and prints the folder it is in."
)
VERBS = ("serve", "download")


async def download(config: LauncherConfig) -> Path:
    """The folder of the model's files, fetched and converted. Raises StartError or Stopped."""
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
    # Until the event loop handles signals: nothing is started, so there is nothing to end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    argv = sys.argv[1:]
    verb = argv.pop(0) if argv[:1] and argv[0] in VERBS else "serve"
    config = load_or_exit(LauncherConfig, argv, os.environ, program="headrace", description=DESCRIPTION)
    logs.setup("launcher", config.json_output, config.log_level)
    try:
        if verb == "download":
            print(asyncio.run(download(config)))
        else:
            asyncio.run(serve(config, os.environ))
    except StartError as error:
        print(f"headrace: error: {error}", file=sys.stderr)
        sys.exit(1)
    except Stopped:
        return


if __name__ == "__main__":
    main()
