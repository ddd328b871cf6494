"""A JupyterLab that a command starts: the address that it prints, and its end."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request


@contextlib.contextmanager
def serving(command, *, cwd, env, home, seconds=90):
    """Yield (server, page, token or None) once it answers; what Jupyter writes goes under `home`."""
    log = home / "log"
    with log.open("wb") as out:
        lab = subprocess.Popen(
            command,
            cwd=cwd,
            env=env | {"HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        end, address = time.monotonic() + seconds, None
        while not address and time.monotonic() < end and lab.poll() is None:
            time.sleep(0.3)
            address = re.search(r"(http://127\.0\.0\.1:\d+)(/lab/tree/[^\s?]+)(?:\?token=(\w+))?\s", log.read_text())
        assert address, log.read_text()[-3000:]
        while not _listening(address[1]) and time.monotonic() < end:  # the address is printed a little before
            time.sleep(0.3)
        yield address.groups()
    finally:
        os.killpg(lab.pid, signal.SIGTERM)
        try:
            lab.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(lab.pid, signal.SIGKILL)


def check_first_page(server, page, token):
    """The page is served, and JupyterLab does not ask for news, as it does by default."""
    assert urllib.request.urlopen(f"{server}{page}?token={token}", timeout=20).status == 200
    settings = f"{server}/lab/api/settings/@jupyterlab/apputils-extension:notification?token={token}"
    schema = json.load(urllib.request.urlopen(settings, timeout=20))["schema"]
    assert schema["properties"]["fetchNews"]["default"] == "false"


def _listening(server):
    try:
        socket.create_connection(server.removeprefix("http://").split(":"), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True
