"""Where a shard listens: `unix:///path` or `tcp://host:port`. Knows sockets; knows no gRPC."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from headrace_proto.settings import SettingsError

from headrace_shard.errors import StartError

_MAX_UNIX_PATH_BYTES = 107
"""`sun_path` of sockaddr_un holds 108, the last of them zero."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket in the file system."""

    path: Path

    @property
    def target(self) -> str:
        """As gRPC spells it."""
        return f"unix:{self.path}"

    def claim(self) -> None:
        """Remove what a killed shard has left there. Raises StartError if the path cannot be used."""
        try:
            if self.path.is_socket():
                self._remove_if_stale()
            elif self.path.exists():
                raise StartError(f"--listen: {self.path} exists and is no socket; give another path")
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(str(self.path))
            self.path.unlink()
        except OSError as error:
            raise StartError(f"--listen: cannot listen on {self.path}: {error.strerror}") from error

    def _remove_if_stale(self) -> None:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.path))
            except ConnectionRefusedError:
                self.path.unlink()
                return
        raise StartError(f"--listen: another process listens on {self.path}; stop it or give another path")


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A port of this machine; 0 lets the system choose one."""

    host: str
    port: int

    @property
    def target(self) -> str:
        """As gRPC spells it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def claim(self) -> None:
        """Raises StartError if the port is taken or not this process's to take."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            with socket.socket(family) as probe:
                # As gRPC does: connections that still fade away do not keep the port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((self.host, self.port))
        except OSError as error:
            raise StartError(f"--listen: cannot listen on {self.target}: {error.strerror}") from error


def parse(address: str) -> UnixAddress | TcpAddress:
    """Raises SettingsError for anything but `unix:///path` and `tcp://host:port`."""
    scheme, separator, rest = address.partition("://")
    if scheme == "unix" and separator and rest.startswith("/"):
        if len(os.fsencode(rest)) > _MAX_UNIX_PATH_BYTES:
            raise SettingsError(
                f"--listen: a socket's path must be at most {_MAX_UNIX_PATH_BYTES} bytes, got {rest!r}"
            )
        return UnixAddress(Path(rest))
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isascii() and port.isdecimal() and int(port) <= 65535:
        return TcpAddress(host.removeprefix("[").removesuffix("]"), int(port))
    raise SettingsError(f"--listen: expected unix:///path or tcp://host:port, got {address!r}")
