"""Machines for tests of launchers: network namespaces with a name and a link each, and an ssh server in those that want one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.collectives.slow_network import Namespaces, slow_network, why_not
from tests.support.processes import until

PORT = 2222
SSHD = shutil.which("sshd", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin")))
_SERVER = """
Port {port}
PidFile none
HostKey {folder}/host_key_{name}
AuthorizedKeysFile {folder}/authorized_{name}
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
"""
_CLIENT = """
Host *
  User root
  Port {port}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  ConnectTimeout 20
"""


@contextlib.contextmanager
def named_network(names: Sequence[str], prefix: str) -> Iterator[Namespaces]:
    """Make a namespace per name, whose hosts file knows all of them; skip the test where that is not possible."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(slow_network(len(names), prefix))
        except RuntimeError as error:
            pytest.skip(f"no network namespaces here: {error}")
        lines = ["127.0.0.1 localhost", *(f"{made.address(number)} {name}" for number, name in enumerate(names))]
        for name in made.names:
            folder = Path("/etc/netns", name)  # `ip netns exec` puts these files in the place of those of /etc
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("\n".join(lines) + "\n")
            stack.callback(folder.rmdir)
            stack.callback((folder / "hosts").unlink)
        yield made


def named(name: str, words: Sequence[str]) -> list[str]:
    """Return the command that runs ``words`` under the host name ``name``."""
    return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name, *words]


@dataclass
class Machines:
    """Machines with ssh servers.

    Attributes:
        network: Their namespaces.
        names: Their host names.
        folder: Keys and configurations.
        servers: The servers, by number of the machine.
    """

    network: Namespaces
    names: Sequence[str]
    folder: Path
    servers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        """Configuration for ssh clients."""
        return self.folder / "ssh_config"

    def serve(self, number: int, before: str = "true") -> None:
        """Start the ssh server of a machine, after the shell command ``before`` in its name space of mounts."""
        name = self.names[number]
        config = self.folder / f"sshd_config_{name}"
        config.write_text(_SERVER.format(port=PORT, folder=self.folder, name=name))
        words = named(name, ["sh", "-c", f'{before} && exec "$@"', "sh", str(SSHD), "-D", "-e", "-f", str(config)])
        log = (self.folder / f"log_{name}").open("wb")
        self.servers[number] = subprocess.Popen(self.network.command(number, words), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until(lambda: b"Server listening" in Path(log.name).read_bytes(), f"the ssh server of {name}")

    def processes(self, number: int) -> set[int]:
        """Return the processes of a machine, without those of its ssh server."""
        done = subprocess.run(["ip", "netns", "pids", self.network.names[number]], capture_output=True, text=True, check=True)
        return {pid for word in done.stdout.split() if not _is_server(pid := int(word))}

    def run(self, number: int, words: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path) -> subprocess.Popen[bytes]:
        """Start a command on a machine, in a process group of its own; what it prints goes to ``log``."""
        with log.open("wb") as out:
            return subprocess.Popen(
                self.network.command(number, named(self.names[number], words)),
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(env), cwd=cwd, start_new_session=True,
            )  # fmt: skip

    def crash(self, number: int) -> None:
        """Kill all processes of a machine, as if it lost power: nothing is sent over its link any more."""
        self.network.cut(number)
        if number in self.servers:
            self.servers.pop(number).kill()
        done = subprocess.run(["ip", "netns", "pids", self.network.names[number]], capture_output=True, text=True, check=True)
        for word in done.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(word), signal.SIGKILL)


def _is_server(pid: int) -> bool:
    """Whether a process is an ssh server, or has just ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("sshd")
    except OSError:
        return True


@contextlib.contextmanager
def machines(names: Sequence[str], prefix: str, folder: Path) -> Iterator[Machines]:
    """Make machines, keys that all of them accept, and a client configuration that knows their keys; no server runs yet."""
    if SSHD is None:
        pytest.skip("no ssh server (Debian: openssh-server)")
    with named_network(names, prefix) as network:
        made = Machines(network, names, folder)
        Path("/run/sshd").mkdir(exist_ok=True)  # an empty folder that the server wants
        known = []
        for name in ("key", *(f"host_key_{name}" for name in names)):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / name)], check=True)
        for number, name in enumerate(names):
            shutil.copy(folder / "key.pub", folder / f"authorized_{name}")
            known.append(f"[{name}]:{PORT},[{network.address(number)}]:{PORT} {(folder / f'host_key_{name}.pub').read_text()}")
        (folder / "known_hosts").write_text("".join(known))
        made.config.write_text(_CLIENT.format(port=PORT, folder=folder))
        try:
            yield made
        finally:
            for server in made.servers.values():
                server.kill()
                server.wait()
            for number in range(len(names)):
                made.crash(number)
