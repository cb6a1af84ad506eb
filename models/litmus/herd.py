"""herd7, which judges the tests: where it comes from, and how it is called.

It is built once, into `target/litmus`, from the tag VERSION of its repository. That needs the network, git, a C
compiler with GMP, and OCaml with dune, menhir and zarith: those of the machine, or else Debian's packages, which are
unpacked below `target/litmus` and not installed. Debian 12 has versions that build it; that takes some minutes.
Without any of that the script says what is missing.

- `HERD7=PATH` is a herd7 to take instead. Its version is shown, since another one may judge otherwise.
- `HERDTOOLS=URL` is another copy of the repository, perhaps a local one.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "7.57"
REPOSITORY = "https://github.com/herd/herdtools7"
CACHE = Path(__file__).resolve().parents[2] / "target" / "litmus"
PACKAGES = ["ocaml", "ocaml-dune", "menhir", "libmenhir-ocaml-dev", "libzarith-ocaml-dev"]

_command = []


def fail(what):
    sys.exit(f"litmus: FAILED: {what}")


def run(*command, **options):
    """Runs a command, and returns what it prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, **options)
    except FileNotFoundError:
        fail(f"there is no {command[0]}: the head of models/litmus/herd.py says what is needed")
    if done.returncode != 0:
        fail(f"{' '.join(map(str, command))}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def has_ocaml():
    if not all(map(shutil.which, ("ocamlc", "ocamlopt", "dune", "menhir"))):
        return False
    where = Path(run("ocamlc", "-where").strip())
    return any((folder / "zarith").exists() for folder in (where, where.parent))


def listed_packages(*options):
    """The packages that an installation of PACKAGES downloads."""
    listed = run(
        "apt-get", "install", "--print-uris", "--quiet", "--yes", "--no-install-recommends", *options, *PACKAGES
    )
    return re.findall(r"^'[^']+' ([^_\s]+)_", listed, re.MULTILINE)


def unpack(root):
    """Downloads the packages, and unpacks them in `root`, which is there only when all are."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        downloads, unpacked, status = (Path(folder) / name for name in ("packages", "unpacked", "status"))
        downloads.mkdir()
        status.touch()
        # All of OCaml from one place, also what is installed here: a machine without any package needs it all. Of the
        # rest, which is a C compiler and what that needs, what is missing.
        of_ocaml = re.compile("ocaml|menhir|gmp")
        everything = listed_packages("-o", f"Dir::State::status={status}")
        names = {*filter(of_ocaml.search, everything), *listed_packages()}
        run("apt-get", "download", "--quiet", "-o", "APT::Sandbox::User=root", *sorted(names), cwd=downloads)
        for package in downloads.glob("*.deb"):
            run("dpkg-deb", "-x", package, unpacked)
        shutil.rmtree(root, ignore_errors=True)
        unpacked.rename(root)


def debian_packages():
    """The environment in which Debian's packages of OCaml are found, unpacked in the cache."""
    if not shutil.which("apt-get"):
        fail(
            "herd7 is built by OCaml with dune, menhir and zarith, which are not here, and neither is Debian's "
            "apt-get. `opam install dune menhir zarith` gets them; or HERD7=PATH is a herd7."
        )
    root = CACHE / "debian"
    if not (root / "usr/bin/ocamlopt").exists():
        unpack(root)
    [architecture] = {path.name for path in (root / "usr/lib").glob("*-linux-gnu*")} or {"none"}
    ocaml, libraries = root / "usr/lib/ocaml", root / "usr/lib" / architecture
    return {
        **os.environ,
        "PATH": f"{root}/usr/bin:{os.environ['PATH']}",
        "OCAMLLIB": str(ocaml),
        "OCAMLPATH": str(ocaml),
        "CAML_LD_LIBRARY_PATH": str(ocaml / "stublibs"),
        "LIBRARY_PATH": str(libraries),
        "LD_LIBRARY_PATH": str(libraries),
        "CPATH": f"{root}/usr/include:{root}/usr/include/{architecture}",
    }


def build():
    """Finds herd7, or builds it."""
    if path := os.environ.get("HERD7"):
        _command[:] = [path]
        print("litmus: herd7 is", run(path, "-version").splitlines()[0])
        return
    herd, libraries = CACHE / "herd7", CACHE / f"libdir-{VERSION}"
    if not (herd.exists() and libraries.exists()):
        source = CACHE / "source"
        shutil.rmtree(source, ignore_errors=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        repository = os.environ.get("HERDTOOLS", REPOSITORY)
        print(f"litmus: builds herd7 {VERSION} from {repository}, once: some minutes", flush=True)
        run("git", "clone", "--quiet", "--depth", "1", "--branch", VERSION, repository, source)
        environment = None if has_ocaml() else debian_packages()
        run("sh", "version-gen.sh", str(CACHE), cwd=source)
        run("dune", "build", "--profile", "release", "herd/herd.exe", cwd=source, env=environment)
        shutil.copytree(source / "herd/libdir", libraries, dirs_exist_ok=True)
        new = herd.with_suffix(".new")
        shutil.copy(source / "_build/default/herd/herd.exe", new)
        new.rename(herd)
        shutil.rmtree(source)
    _command[:] = [str(herd), "-set-libdir", str(libraries)]


def verdict(file, variants):
    """What herd7 says of a test: "Never", "Sometimes" or "Always"."""
    options = [word for variant in variants for word in ("-variant", variant)]
    done = subprocess.run([*_command, *options, file], capture_output=True, text=True)
    found = re.search(r"^Observation \S+ (Never|Sometimes|Always)\b", done.stdout, re.MULTILINE)
    if not found:
        fail(f"herd7 has no verdict: {done.stderr}\n{Path(file).read_text()}")
    return found.group(1)
