"""Find a tritonserver and run it on a rendered repository."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from clover_trt.errors import EngineError
from clover_trt.serving.options import ServeOptions

LOG_FLAGS = {
    "error": ("--log-info=false", "--log-warning=false"),
    "warning": ("--log-info=false",),
    "info": (),
    "verbose": ("--log-verbose=1",),
}
EXIT_TIMEOUT = 3  # seconds that Triton waits for open streams when it is told to stop; draining comes before
KEEPALIVE_MS = 5000  # a client's machine that is gone without a word is noticed after twice that
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "clover_trt_"


@dataclass(frozen=True)
class Installation:
    """A tritonserver: the program, the folder of its backends (None: its own default), and library folders it needs."""

    program: Path
    backends: Path | None
    libraries: tuple[Path, ...] = ()
    stub: Path | None = None  # the Python backend's process, when it does not lie in `backends`


def find_server() -> Installation:
    """The tritonserver on PATH or where NVIDIA's containers have it; else the one from PyPI (nvidia-pytriton).

    Raises:
        EngineError: there is none.
    """
    on_path = shutil.which("tritonserver") or (shutil.which("tritonserver", path="/opt/tritonserver/bin"))
    if on_path is not None:
        return Installation(Path(on_path), None)
    spec = importlib.util.find_spec("pytriton")
    for place in (spec.submodule_search_locations or []) if spec else []:
        root = Path(place) / "tritonserver"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
        if (root / "bin" / "tritonserver").exists():
            if not stub.exists():
                raise EngineError(f"{root}: its Python backend has no stub for Python {version}; run with another Python")
            own = Path(str(sysconfig.get_config_var("LIBDIR")))
            return Installation(
                root / "bin" / "tritonserver", root / "backends", (Path(place).parent / "nvidia_pytriton.libs", own), stub
            )
    raise EngineError(
        "no tritonserver: expected one on PATH (NVIDIA's Triton container has it) or pip install 'clover-trt[serve]'"
    )


class TritonProcess:
    """One run of tritonserver, in a process group of its own.

    Args:
        installation: which one.
        repository: the rendered model repository.
        options: ports and log level.
        work: folder for backends and the log file.
    """

    def __init__(self, installation: Installation, repository: Path, options: ServeOptions, work: Path) -> None:
        self.log = work / "triton.log"
        command = [
            str(installation.program),
            f"--model-repository={repository}",
            "--exit-on-error=true",
            "--strict-readiness=true",
        ]
        command += [f"--http-address={options.host}", f"--http-port={options.http_port}"]
        command += [f"--grpc-address={options.host}", f"--grpc-port={options.grpc_port}"]
        command += [f"--metrics-address={options.host}", f"--metrics-port={options.metrics_port}"]
        command += [f"--grpc-keepalive-time={KEEPALIVE_MS}", f"--grpc-keepalive-timeout={KEEPALIVE_MS}"]
        command += [f"--exit-timeout-secs={EXIT_TIMEOUT}", *LOG_FLAGS[options.log_level]]
        self._shared_prefix = f"{PREFIX}{os.getpid()}_{os.urandom(4).hex()}_"
        command.append(f"--backend-config=python,shm-region-prefix-name={self._shared_prefix}")
        if installation.backends is not None:
            command.append(f"--backend-directory={_backends(installation, work)}")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(installation), start_new_session=True
            )
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    def last_lines(self, count: int = 12) -> str:
        """The end of the server's log."""
        text = self.log.read_text(errors="replace")
        return "\n".join(text.splitlines()[-count:])

    def terminate(self, seconds: float = EXIT_TIMEOUT + 5) -> None:
        """Ask it to stop, then make it; models' processes and their shared memory go too."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """End the whole process group at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for left in SHARED_MEMORY.glob(f"{self._shared_prefix}*"):
            left.unlink(missing_ok=True)


def _environment(installation: Installation) -> dict[str, str]:
    """This Python's environment first on PATH: the Python backend takes its packages from the first python3 there."""
    here = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": os.pathsep.join((here, os.environ.get("PATH", "")))}
    if installation.libraries:
        known = os.environ.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = os.pathsep.join([*map(str, installation.libraries), *([known] if known else [])])
    return environment


def _backends(installation: Installation, work: Path) -> Path:
    """A folder of backends in which the Python backend has its stub beside it."""
    assert installation.backends is not None
    if installation.stub is None:
        return installation.backends
    target = work / "backends"
    if not target.exists():
        shutil.copytree(installation.backends, target)
        shutil.copy(installation.stub, target / "python")
    return target
