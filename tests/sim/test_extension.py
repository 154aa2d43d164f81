"""The extension is built once per machine, found again, and its absence has a reason."""

import os
import stat
import subprocess
import sys

import pytest

from tests.sim import extension

BUILD = "from tests.sim.extension import build; print(build())"


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """A compiler that writes its output and a line for each call; returns the file of those lines."""
    calls, compiler = tmp_path / "calls", tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nfor last; do :; done\necho built > "$last"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv(extension.CACHE, str(tmp_path / "cache"))
    return calls


def test_processes_that_need_it_at_once_build_it_once(fake_compiler):
    """Of several processes one compiles; all get the same file, and nothing else is left beside it."""
    if extension.why_missing():
        pytest.skip(extension.why_missing())
    command = [sys.executable, "-c", BUILD]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate()[0].strip() for process in processes}
    (path,) = paths
    with open(path) as built:
        assert built.read() == "built\n"
    assert len(fake_compiler.read_text().splitlines()) == len(extension._UNITS) + 1
    assert sorted(os.listdir(os.path.dirname(path))) == ["fairshard_sim.so", "lock"]


def test_every_source_is_compiled_once():
    """Each source of the folder is in one unit."""
    assert sorted(sum(extension._UNITS, ())) == sorted(source.stem for source in extension._CSRC.glob("*.cpp"))


def test_a_changed_source_is_another_file(tmp_path, monkeypatch):
    """The path depends on the text of every source and header."""
    for name in ("a.cpp", "b.h"):
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(extension, "_CSRC", tmp_path)
    paths = [extension._built.__wrapped__()]
    for name in ("a.cpp", "b.h"):
        (tmp_path / name).write_text("2")
        paths.append(extension._built.__wrapped__())
    assert len(set(paths)) == 3


def test_no_compiler_is_a_reason(tmp_path, monkeypatch):
    """Without a compiler, and without an extension built before, the reason says what to install."""
    if extension.why_missing():
        pytest.skip(extension.why_missing())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(extension.CACHE, str(tmp_path))
    monkeypatch.setattr(extension, "_built", extension._built.__wrapped__)
    assert extension.why_missing.__wrapped__().startswith("needs a C++ compiler: none of c++, g++, clang++ is on PATH")


def test_an_older_torch_is_a_reason(monkeypatch):
    """An older torch is named."""
    monkeypatch.setattr(extension.torch, "__version__", "2.6.0+cpu")
    assert extension.why_missing.__wrapped__() == "needs torch 2.13: its C++ interface of devices differs in 2.6.0+cpu"


def test_an_error_of_the_compiler_is_shown(tmp_path, monkeypatch):
    """What the compiler says is in the error."""
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match=r"The simulator does not build: .*false -x"):
        extension._run(["-x"])
