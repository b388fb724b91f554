"""A PostgreSQL server of a test's own: a cluster in a temporary folder, on a Unix socket, gone afterwards."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

USER = "postgres"


def programs() -> Path | None:
    """The folder with initdb and pg_ctl; Debian keeps them off the PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: -float(folder.parent.name))
    found = [folder for folder in folders if (folder / "initdb").exists()]
    on_path = shutil.which("initdb")
    return found[0] if found else Path(on_path).parent if on_path else None


class Server:
    """folder: the cluster's and the socket's."""

    def __init__(self, folder: Path, bin_folder: Path) -> None:
        self.folder = folder
        self._bin = bin_folder
        self.url = f"postgresql+psycopg://{USER}@/postgres?host={folder}"

    def run(self, program: str, *words: str) -> None:
        """As a user that is not root: the server refuses root."""
        as_user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"] if os.geteuid() == 0 else []
        command = [*as_user, str(self._bin / program), *words]
        done = subprocess.run(
            command, cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"

    def start(self) -> None:
        options = f"-k {self.folder} -c listen_addresses= -c fsync=off"
        log = str(self.folder / "log")
        self.run("pg_ctl", "-D", str(self.folder / "data"), "-l", log, "-o", options, "-w", "start")

    def stop(self) -> None:
        """At once, even with clients connected."""
        self.run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")


@contextmanager
def postgres() -> Iterator[Server]:
    """A running server; skips where the programs are not installed (`make test` installs them as root)."""
    bin_folder = programs()
    if bin_folder is None:
        pytest.skip("no PostgreSQL server programs; install Debian's package postgresql")
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path is at most 107 bytes long
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, USER, USER)
        server = Server(folder, bin_folder)
        server.run("initdb", "-D", str(folder / "data"), "-U", USER, "--auth=trust", "--no-sync")
        server.start()
        try:
            yield server
        finally:
            if (folder / "data" / "postmaster.pid").exists():
                server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
