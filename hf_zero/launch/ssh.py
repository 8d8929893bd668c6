"""Build the ssh command of a node, and explain why ssh did not reach it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping

from hf_zero.launch.flags import split_words

BOOTSTRAP = 'import sys;r=sys.stdin.buffer;n=int(r.readline());exec(compile(r.read(n),"agent","exec"),{"__name__":"__main__"})'
"""Program of the agent's interpreter: it reads the agent itself from standard input, after the number of its bytes."""
_STOP_SECONDS = 60.0  # torchrun gives its ranks 30 s
# -I and -S: neither variables of the host nor its site-packages can change the agent.
_AGENT = ["-I", "-S", "-u", "-c", BOOTSTRAP]
_OPTIONS = {
    "BatchMode": "yes",  # never ask
    "ConnectTimeout": "20",
    "ServerAliveInterval": "15",  # a host that is gone is noticed after a minute
    "ServerAliveCountMax": "4",
    "LogLevel": "ERROR",  # no banners
    "ControlMaster": "no",  # a connection of its own, which ends with the node
    "ControlPath": "none",
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
}
# What ssh says, in lower case -> the reason, and what to do; {host} is its name.
_REASONS = (
    ("identification has changed", "its host key has changed; if that is right, remove the old one with `ssh-keygen -R {host}`"),
    ("host key verification failed", "its host key is unknown here; connect once by hand with `ssh {host}` and compare the key"),
    ("permission denied", "it refuses this user or key; `ssh {host}` must work without a password (`ssh-copy-id {host}`)"),
    ("too many authentication failures", "it refuses this user or key; name the key with --ssh_args='-i FILE -o IdentitiesOnly=yes'"),
    ("could not resolve hostname", "its name is unknown here; correct the hostfile, or name the host in the ssh configuration"),
    ("connection refused", "no ssh server answers at this port; start one, or give its port with --ssh_port"),
    ("timed out", "it does not answer"),
    ("no route to host", "it does not answer"),
    ("network is unreachable", "it does not answer"),
)


def words_of_ssh(port: int, arguments: list[str], environ: Mapping[str, str]) -> list[str]:
    """Return the first words of an ssh command, without the host.

    Args:
        port: Port of the server; 0 for that of the ssh configuration.
        arguments: The user's own arguments, which take precedence; so do those in ``PDSH_SSH_ARGS_APPEND``, a variable of pdsh.
        environ: Variables of this process.

    Raises:
        ConfigError: The variable cannot be split into words.
    """
    words = ["ssh", *arguments, *split_words(environ.get("PDSH_SSH_ARGS_APPEND", ""), "PDSH_SSH_ARGS_APPEND")]
    words += ["-p", str(port)] if port else []
    for name, value in _OPTIONS.items():
        words += ["-o", f"{name}={value}"]
    return words


def seconds_to_stop(arguments: list[str]) -> float:
    """Return how long torchrun may take to end after a signal, if it is started with these ``arguments``."""
    text = " ".join(arguments).replace("=", " ").replace("_", "-")
    found = re.search(r"--shutdown-timeout ([0-9]{1,6})", text)
    return max(_STOP_SECONDS, int(found[1]) + _STOP_SECONDS / 2) if found else _STOP_SECONDS


def agent_here() -> list[str]:
    """Return the command that starts the agent of a node on this machine, without ssh."""
    return [sys.executable, *_AGENT]


def agent_on(host: str, words: list[str]) -> list[str]:
    """Return the command that starts the agent on ``host``; ``words`` are those of ``words_of_ssh``."""
    return [*words, "--", host, f"exec {shlex.join(agent_here())}"]


def explain(host: str, status: int, lines: list[str]) -> str:
    """Return why a node has ended before the start of the job.

    Args:
        host: Name of the host.
        status: Exit status of ssh: 255 is its own, others are of the program on the host.
        lines: What was printed as errors.
    """
    text = "\n".join(lines).lower()
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if status in (126, 127):
        reason = f"the interpreter {sys.executable} does not exist there; all hosts need the same one at the same place"
    elif status == 255:
        reason = next((told.format(host=host) for found, told in _REASONS if found in text), "ssh failed")
    else:
        reason = f"the agent ended with exit status {status}"
    return f"{reason} ({said})" if said else reason
