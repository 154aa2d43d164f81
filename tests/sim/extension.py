"""The simulator's extension: compiled once per machine, found again by a hash of all that it is made from.

The compiler is called directly: `torch.utils.cpp_extension` needs ninja and hashes neither flags nor versions; here a
file that is there is loaded in milliseconds, and several processes that need it at once build it once.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

CACHE = "FAIRSHARD_SIM_CACHE"
"""Environment variable that names the folder of the built extension."""

NAME = "fairshard_sim"
_CSRC = Path(__file__).parent / "csrc"
_OLDEST = (2, 13)
_FLAGS = [
    "-std=c++20",
    "-O1",
    "-DNDEBUG",  # as torch is built: its headers declare more members without
    "-fPIC",
    "-fvisibility=hidden",
    "-w",
    "-DUSE_C10D_GLOO",
    f"-DTORCH_EXTENSION_NAME={NAME}",
]
_UNITS = (  # sources that are compiled as one: torch's headers take most of the time
    ("autocast", "backend", "fallback", "random", "tensors", "work"),
    ("device", "host", "memory", "module", "races", "scheduler"),
)
_LIBRARIES = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]


@functools.cache
def why_missing() -> str | None:
    """The reason why the simulator cannot be had here; None if it can."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST:
        return f"needs torch {'.'.join(map(str, _OLDEST))}: its C++ interface of devices differs in {torch.__version__}"
    if not sys.platform.startswith("linux"):
        return f"needs Linux, but this is {sys.platform}"
    if _built().exists():
        return None
    if _compiler() is None:
        return "needs a C++ compiler: none of c++, g++, clang++ is on PATH; install one, or name one in CXX"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"needs Python's headers: {sysconfig.get_path('include')}/Python.h is missing"
    return None


def build():
    """Build the extension if this machine does not have it, and return its path; one process does, others wait."""
    path = _built()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / "lock"):
            if not path.exists():
                _compile(path)
    return path


def opened():
    """The extension as a module."""
    path = build()
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(NAME, loader))
    loader.exec_module(module)
    return module


def _compiler() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


@functools.cache
def _built() -> Path:
    """Path of the extension, whether it has been built or not."""
    made_from = hashlib.sha256()
    for source in sorted(_CSRC.iterdir()):
        made_from.update(f"{source.name}\0{source.read_text()}\0".encode())
    machine = (torch.__version__, torch.__file__, sys.version, platform.machine())
    made_from.update(repr((_FLAGS, _UNITS, machine)).encode())
    folder = os.environ.get(CACHE)
    if not folder:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairshard-sim"
    return Path(folder) / made_from.hexdigest()[:16] / f"{NAME}.so"


@contextlib.contextmanager
def _locked(path):
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(path: Path) -> None:
    """Compile all units at once, and link them to ``path``, which appears when it is whole."""
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    flags = [*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [f"-isystem{include}" for include in includes]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [Path(folder, f"{names[0]}.o") for names in _UNITS]
        for names, target in zip(_UNITS, objects, strict=True):
            target.with_suffix(".cpp").write_text("".join(f'#include "{_CSRC / name}.cpp"\n' for name in names))
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(lambda to: _run([*flags, "-c", to.with_suffix(".cpp"), "-o", to]), objects))
        whole = Path(folder, path.name)
        library = root / "lib"
        links = [f"-L{library}", f"-Wl,-rpath,{library}", *_LIBRARIES]
        _run(["-shared", *objects, *links, "-o", whole])
        os.replace(whole, path)


def _run(arguments) -> None:
    done = subprocess.run([_compiler(), *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"The simulator does not build: {' '.join(map(str, done.args))}\n{done.stderr[-8000:]}")
